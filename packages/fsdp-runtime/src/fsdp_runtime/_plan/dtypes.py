"""In which dtypes a group is kept, computed with and reduced: `MixedPrecisionPolicy` for one parameter dtype."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one group.

    Attributes:
        kept: of sharded parameters and their gradients.
        compute: of unsharded parameters.
        reduce: in which gradients are accumulated and reduced.
    """

    kept: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def narrowest(self) -> int:
        """Bytes of the smallest element, for alignment."""
        return min(self.kept.itemsize, self.compute.itemsize, self.reduce.itemsize)


def dtypes_for(kept: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    """What a policy means for parameters kept in `kept`. Integers stay as they are."""
    if not kept.is_floating_point:
        return Dtypes(kept, kept, kept)
    compute = policy.param_dtype or kept
    return Dtypes(kept, compute, policy.reduce_dtype or compute)
