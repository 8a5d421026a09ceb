"""The kinds of groups: plain, tensor subclasses with FSDP2's all-gather extensions, and a quantization policy's."""

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from .._plan.group import Request, dtypes_for, precision_of
from .._plan.param import ManagedParam
from .group import Group
from .subclass import Extension, SubclassGroup


def find_kinds(params: Iterable[ManagedParam[Any]], request: Request) -> None:
    """Set the precision and kind of each parameter, and whether the quantization policy selects it.

    Raises ValueError or NotImplementedError, by name, if one cannot be sharded as requested.
    """
    policy = request.quantization
    if policy is not None and policy.blocks is not None and isinstance(request.offload, CPUOffloadPolicy):
        raise ValueError(
            "quantization_policy: weights are quantized on the device that computes; offload_policy=CPUOffloadPolicy "
            "keeps their shards elsewhere. Leave one of the two out"
        )
    for param in params:
        param.precision = precision_of(param, request.precision)
        param.selected = policy is not None and policy.selects(param)
        if isinstance(param.wrapper, Extension):
            param.kind = SubclassGroup
        elif policy is not None and param.selected:
            param.kind = policy.kind_of(param)
        else:
            param.kind = Group
        param.kind.check(param, request)
        if param.grad_dtype is not None and not param.kind.holds_values:
            raise NotImplementedError(
                f"parameter {param.name} has grad_dtype {param.grad_dtype}: not supported for subclasses and weights "
                "that are kept as codes; leave grad_dtype as it is"
            )
        if policy is None:
            continue
        try:
            policy.reduction(param.selected, dtypes_for(param.dtype, param.precision).reduce)
        except ValueError as error:
            raise ValueError(
                f"quantization_policy: parameter {param.name} of {param.dtype}: {error}"
            ) from error
