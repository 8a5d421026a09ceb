"""What travels quantized, and how: `fully_shard(quantize=QuantizationPolicy(...))`."""

from dataclasses import dataclass
from typing import Literal

import torch

from dbuffer import CastReduction, ReductionForm


@dataclass(frozen=True)
class QuantizationPolicy:
    """In which form gradients of a unit are sent.

    Args:
        gradients: "bf16": each rank's gradients travel in bf16, by one all-to-all, and are summed in fp32 in the order
            of the ranks. HSDP's all-reduce over replicas stays in the parameters' dtype. None: a reduce-scatter in
            `MixedPrecisionPolicy.reduce_dtype`.

    Raises:
        ValueError: another value; or nothing at all is asked for.
    """

    gradients: Literal["bf16"] | None = None

    def __post_init__(self) -> None:
        if self.gradients not in (None, "bf16"):
            raise ValueError(f"QuantizationPolicy: gradients is {self.gradients!r}; expected 'bf16' or None")
        if self.gradients is None:
            raise ValueError(
                "QuantizationPolicy: nothing is quantized; give gradients, or leave quantize out"
            )

    def reduction(self, gathered: torch.dtype) -> ReductionForm | None:
        """What gradients reduced in this dtype travel as. Raises ValueError where they cannot."""
        if self.gradients is None or not gathered.is_floating_point:
            return None
        form = CastReduction(torch.bfloat16)
        form.check(gathered)
        return form
