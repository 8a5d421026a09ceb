"""Quantization policies of units: `fully_shard(quantization_policy=QuantizationPolicy(...))`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from dbuffer import ReductionForm
from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, BlockReduction, CastReduction

from .._params.group import Group
from .at_rest import AtRestGroup
from .on_wire import BlockGradsGroup, OnWireGroup

__all__ = ["BlockFP8", "BlockInt8", "BlockNF4", "QuantizationPolicy", "matrices_only"]

OnWire = BlockFP8 | BlockInt8
AtRest = BlockNF4 | BlockInt8 | BlockFP8
Selection = Callable[[str, torch.Tensor, nn.Module], bool]

_NOT_MATRICES = re.compile(
    r"(^|\.)(embed\w*|\w+_embeddings?|wte|wpe|head|lm_head|output|router|gate|\w*norm\w*)(\.|$)",
    re.IGNORECASE,
)


def matrices_only(name: str, param: torch.Tensor, module: nn.Module) -> bool:
    """The matrices that most of the compute is in: two dimensions or more, no embedding, head, norm or router.

    Decided by the module's class and the parameter's name in its unit (`lm_head`, `output`, `router`, `gate` ...). The
    name in a separate unit of a head is only `weight`: leave `quantization_policy` out there.
    """
    if param.ndim < 2 or not param.is_floating_point():
        return False
    embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return not (embedding or "norm" in type(module).__name__.lower() or _NOT_MATRICES.search(name))


@dataclass(frozen=True)
class QuantizationPolicy:
    """In which form the selected weights of a unit are kept or gathered, and its gradients are reduced.

    Args:
        weights: None, or the blocks that selected weights are quantized in before a gather, and read back from after:
            `BlockFP8((128, 128))` or `BlockInt8(256)`. Shards, optimizer states and checkpoints keep values.
        gradients: None: a reduce-scatter in `MixedPrecisionPolicy.reduce_dtype`. "bf16": all gradients travel in bf16.
            `BlockInt8(256, rounding="stochastic")`: gradients of selected weights travel as integer codes, others in
            their dtype. Both by one all-to-all, summed in fp32 in the order of the ranks. HSDP's all-reduce over
            replicas stays in the reduction's dtype.
        at_rest: the blocks that selected weights, which are not trained, are kept in: `BlockNF4(64)`,
            `BlockInt8(256)` or `BlockFP8((128, 128))`. Their codes and scales are the shard, the payload of gathers,
            and the entries of state dicts. None: values are kept.
        select: `(name, parameter, module) -> bool`: whether to quantize a parameter. The name is the parameter's in its
            unit. None: `matrices_only`, and with `at_rest` only if frozen when `fully_shard` is called.

    Weights are quantized again when they have changed, which torch's version counters tell. After a write that these do
    not count (through `.data` of a local tensor, or by a kernel of your own) call
    `torch.autograd.graph.increment_version(param.to_local())`.

    Weights at rest keep shape and dtype of their values. `load_state_dict` and `copy_` quantize values; every other
    write, training them and giving them to an optimizer raise. A state dict has `X.codes`, `X.scales` and `X.format`
    for each `X`; codes that were saved in another format raise.

    Raises:
        ValueError: a value that is not one of these, options that do not go together, or nothing to quantize.
    """

    weights: OnWire | None = None
    gradients: Literal["bf16"] | BlockInt8 | None = None
    select: Selection | None = None
    at_rest: AtRest | None = None

    def __post_init__(self) -> None:
        weights, gradients, at_rest = self.weights, self.gradients, self.at_rest
        select: Any = self.select
        checked: Any = (("weights", weights, OnWire), ("at_rest", at_rest, AtRest))
        for name, blocks, formats in checked:
            if blocks is not None and not isinstance(blocks, formats):
                expected = ", ".join(kind.__name__ for kind in get_args(formats))
                raise ValueError(f"QuantizationPolicy: {name} is {blocks!r}; expected {expected} or None")
            if blocks is not None and blocks.needs_noise:
                raise ValueError(f"QuantizationPolicy: {name}={blocks}: weights are rounded to nearest only")
        problem = ""
        if gradients not in (None, "bf16") and not isinstance(gradients, BlockInt8):
            problem = f"gradients is {gradients!r}; expected 'bf16', BlockInt8 or None"
        elif at_rest is not None and weights is not None:
            problem = (
                f"weights={weights} does not go with at_rest={at_rest}: codes at rest travel as they are; give one of "
                "the two, and units of trained weights a separate policy"
            )
        elif at_rest is not None and isinstance(gradients, BlockInt8):
            problem = (
                f"gradients={gradients} does not go with at_rest={at_rest}: selected weights have no gradients; use "
                "'bf16' or None"
            )
        elif weights is None and gradients is None and at_rest is None:
            problem = "nothing is quantized; give weights, at_rest or gradients, or no policy"
        elif select is not None and not callable(select):
            problem = f"select is {select!r}; expected (name, parameter, module) -> bool"
        if problem:
            raise ValueError(f"QuantizationPolicy: {problem}")

    def selects(self, param: Any) -> bool:
        """Whether a parameter (a `ManagedParam`) is quantized: it is selected wherever it is used."""
        if self.blocks is None and not isinstance(self.gradients, BlockInt8):
            return False
        if self.select is None and self.at_rest is not None and param.requires_grad:
            return False
        select = self.select or matrices_only
        return all(select(param.name, param.example, place.module) for place in param.places)

    def kind_of(self, param: Any) -> type[Group]:
        """The class of the groups of a selected parameter."""
        if self.at_rest is not None:
            return AtRestGroup
        return OnWireGroup if self.weights is not None else BlockGradsGroup

    @property
    def blocks(self) -> OnWire | AtRest | None:
        """The format of selected weights, at rest or before a gather; None: weights are not quantized."""
        return self.weights if self.at_rest is None else self.at_rest

    def reduction(self, selected: bool, gathered: torch.dtype) -> ReductionForm | None:
        """The form in which gradients that are reduced in this dtype travel; raises ValueError if they cannot."""
        if self.gradients is None or not gathered.is_floating_point:
            return None
        if self.gradients == "bf16":
            form: ReductionForm = CastReduction(torch.bfloat16)
        else:
            form = BlockReduction(self.gradients) if selected else CastReduction(None)
        form.check(gathered)
        return form
