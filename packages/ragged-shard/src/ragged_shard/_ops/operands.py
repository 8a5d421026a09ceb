"""The operands that an op on a ragged tensor accepts, and their local tensors.

another ragged tensor     the same sharding, else the error prints both
Replicate DTensor         on the same mesh; 0-d, or broadcasting to the tensor's shape: this rank's range of it. One
                          number also on another mesh that has all ranks of this one
Shard(0) DTensor          as torch's distribute_tensor makes it of ragged placements, where the op writes the ragged
                          tensor: redistributed by one all_to_all
plain tensor              0-d only: for a larger one it is not known how it is meant to be distributed, unless torch's
                          implicit_replication() says that plain tensors are the same on all ranks
Python number             unchanged
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import Shard

from ragged_shard import _redistribute
from ragged_shard._autograd import local_and_sharding
from ragged_shard._placement import RaggedShard
from ragged_shard._redistribute import box_views
from ragged_shard._sharding import Sharding, ranks_along
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import DISTRIBUTED, Op, implicitly_replicated


def is_distributed(value: object) -> bool:
    """Whether it is a RaggedDTensor or a DTensor of torch's."""
    return isinstance(value, DISTRIBUTED)


def ragged_sharding(values: Iterable[object]) -> Sharding | None:
    """The sharding of the first ragged operand, or None."""
    for value in values:
        if isinstance(value, RaggedDTensor) and value._sharding.axis is not None:
            return value._sharding
    return None


def to_local(value: Any, target: Sharding, func: Op, *, moves: bool = False) -> Any:
    """The local form of one operand of an op on tensors of sharding ``target``.

    With ``moves`` a DTensor that torch's `distribute_tensor` made of the target's placements is redistributed. Raises
    ValueError for a distributed operand with another sharding, or of a shape that does not broadcast, and a plain
    tensor that is not 0-d.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not is_distributed(value):
        if value.ndim == 0:
            return value
        if implicitly_replicated():
            return local_from_full(value, target, func)
        raise ValueError(  # not a TypeError: Python's operators would swallow its message
            f"{func}: a plain tensor of shape {tuple(value.shape)} together with a ragged one ({target}); "
            "distribute it first with ragged_shard.distribute_like, use to_local() on both, or say with torch's "
            "implicit_replication() that all ranks have the same"
        )
    local, sharding = local_and_sharding(value)
    if sharding == target:
        return local
    if sharding.replicate:
        if local.ndim == 0 and (sharding.mesh == target.mesh or _covers(sharding, target)):
            return local
        if sharding.mesh == target.mesh:
            return local_from_full(local, target, func)
    if _broadcasts(sharding, target):
        return local
    if moves and _is_of_rows(value, sharding, target):
        return _redistribute.start(local.contiguous(), sharding, target).wait()
    raise ValueError(
        f"{func}: operands with different shardings:\n  {target}\n  {sharding}\nmake the second like the first: "
        "ragged_shard.redistribute(second, placements=first.placements) on one mesh, else "
        "ragged_shard.distribute_like(second.full_tensor(), first)"
    )


def _is_of_rows(value: torch.Tensor, sharding: Sharding, target: Sharding) -> bool:
    """Whether it is a DTensor as torch's `distribute_tensor` makes one of the target's placements."""
    if isinstance(value, RaggedDTensor) or target.axis is None or not target.ordinary:
        return False
    if value.requires_grad and torch.is_grad_enabled():
        return False  # its gradient would be ragged
    expected = [Shard(0) if axis == target.axis else p for axis, p in enumerate(target.placements)]
    return (
        type(target.ragged) is RaggedShard
        and sharding.placements == tuple(expected)
        and sharding.shape == target.shape
        and sharding.mesh == target.mesh
    )


def _broadcasts(sharding: Sharding, target: Sharding) -> bool:
    """Whether it is the target's, except dims of size 1 in which no rank's share is cut."""
    if sharding.axis is None or sharding.placements != target.placements or sharding.mesh != target.mesh:
        return False
    cut = max([len(target.ragged.dims), *(p.dim + 1 for p in target.placements if type(p) is Shard)])
    return (
        not target.partial
        and len(sharding.shape) == len(target.shape)
        and sharding.shape[:cut] == target.shape[:cut]
        and all(n in (1, size) for n, size in zip(sharding.shape, target.shape, strict=True))
    )


def _covers(first: Sharding, second: Sharding) -> bool:
    """Whether the first one's mesh has all ranks of the second one's."""
    own = ranks_along(second.mesh, range(second.mesh.ndim))
    return own <= ranks_along(first.mesh, range(first.mesh.ndim))


def number_of(value: Any) -> Any:
    """The plain 0-d tensor of a Replicate one, for operands that are not ragged; anything else unchanged."""
    if isinstance(value, RaggedDTensor) and value._sharding.replicate and value.ndim == 0:
        return value._local_tensor
    return value


def local_from_full(full: torch.Tensor, target: Sharding, what: object = "local tensor") -> torch.Tensor:
    """This rank's local tensor of a full one that broadcasts to the sharding's shape: a copy, no communication."""
    try:
        expanded = full.expand(target.shape)
    except RuntimeError:
        raise ValueError(
            f"{what}: an operand of shape {tuple(full.shape)} does not broadcast to the ragged {target}"
        ) from None
    assert target.local_shape is not None
    local = full.new_empty(target.local_shape)
    for box, view in box_views(local, target):
        view.copy_(expanded[box.slices()])
    return local


# Ops that keep a pending sum right: op(sum of x) == sum of op(x). Value: which operands may be what.
_ANY = "any"
_SAME = "every tensor operand pending in the same sharding, no numbers"
_ONE = "one pending operand, the others numbers or Replicate"
_FIRST = "the first operand pending, the others numbers or Replicate"
LINEAR = {
    "neg": _ANY, "clone": _ANY, "detach": _ANY, "alias": _ANY, "zero": _ANY, "zeros_like": _ANY, "empty_like": _ANY,
    "new_zeros": _ANY, "new_empty": _ANY, "_to_copy": _ANY, "view": _ANY, "_unsafe_view": _ANY,
    "unsqueeze": _ANY, "squeeze": _ANY, "expand": _ANY, "add": _SAME, "sub": _SAME, "copy": _SAME,
    "mul": _ONE, "div": _FIRST, "is_pinned": _ANY, "_pin_memory": _ANY,
}  # fmt: skip


def check_linear(func: Op, target: Sharding, operands: list[Any], kwargs: dict[str, Any]) -> None:
    """Raise unless the op is linear in an operand with a pending reduction (`Partial`)."""
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
    rule = LINEAR.get(name.rstrip("_"))
    pending = [isinstance(o, RaggedDTensor) and o._sharding.partial for o in operands]
    fits = rule == _ANY or (
        (rule == _SAME and all(pending))
        or (rule == _ONE and sum(pending) == 1)
        or (rule == _FIRST and pending[0] and sum(pending) == 1 and not kwargs.get("rounding_mode"))
    )
    if name == "_to_copy" and kwargs.get("dtype") is not None and not kwargs["dtype"].is_floating_point:
        fits = False
    if not fits:
        reason = f"it takes {rule}" if rule else "it is not linear, so its results for summands are wrong"
        raise NotImplementedError(
            f"{func} on a tensor with a pending reduction ({target}): {reason}; redistribute Partial to Replicate first"
        )
