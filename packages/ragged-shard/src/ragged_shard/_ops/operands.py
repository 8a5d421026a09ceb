"""The operands that an op on a ragged tensor accepts, and their local tensors.

another ragged tensor     with the same sharding; else, on the same mesh, redistributed to that of the first
Replicate DTensor         on the same mesh; 0-d, or broadcasting to the tensor's shape: this rank's range of it. One
                          number also on another mesh that has all ranks of this one
DTensor with Shard        on the same mesh: redistributed like a ragged one
plain tensor              0-d only: for a larger one it is not known how it is meant to be distributed, unless torch's
                          implicit_replication() says that plain tensors are the same on all ranks
Python number             unchanged

The first ragged operand, or the one that is written, keeps its placements. Every rank redistributes the same operands,
since only placements, shapes and meshes decide; a warning says so, except where torch's own DTensors are written into
ragged tensors, as when they are loaded.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from ragged_shard import _redistribute
from ragged_shard._autograd import local_and_sharding
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


def to_locals(
    values: Sequence[Any],
    targets: Sequence[Sharding],
    func: Op,
    *,
    writes: bool = False,
    recorded: bool = False,
) -> list[Any]:
    """The local forms of operands of ops on tensors of these shardings: together, by as few collectives as possible.

    Args:
        writes: whether the op writes the tensors of these shardings: then DTensors of torch's move without a warning.
        recorded: whether autograd records the op.

    Raises:
        ValueError: a distributed operand that cannot be redistributed, or not where autograd would miss it; one of a
            shape that does not broadcast; a plain tensor that is not 0-d.
    """
    locals_, moved, sources = list(values), [], []
    for i, (value, target) in enumerate(zip(values, targets, strict=True)):
        if not isinstance(value, torch.Tensor):
            continue
        if not is_distributed(value):
            locals_[i] = _local_of_plain(value, target, func)
            continue
        local, sharding = local_and_sharding(value)
        locals_[i] = local
        if sharding == target or _broadcasts(sharding, target):
            continue
        if sharding.replicate:
            if local.ndim == 0 and (sharding.mesh == target.mesh or _covers(sharding, target)):
                continue
            if sharding.mesh == target.mesh:
                locals_[i] = local_from_full(local, target, func)
                continue
        _check_moves(func, sharding, target, recorded)
        moved.append(i)
        sources.append(sharding)
    if not moved:
        return locals_
    if any(isinstance(values[i], RaggedDTensor) for i in moved) or not writes:
        warnings.warn(
            f"{func}: an operand has other placements than the first, as tensors of models do that were wrapped in "
            "other units. It is redistributed in every call, by an all-to-all that all ranks must take part in. Wrap "
            "both models in the same units to avoid it, or keep a copy of "
            "ragged_shard.redistribute(second, placements=first.placements)",
            stacklevel=2,
        )
    results = _redistribute.together([locals_[i] for i in moved], sources, [targets[i] for i in moved])
    for i, result in zip(moved, results, strict=True):
        locals_[i] = result
    return locals_


def recorded(values: Iterable[object]) -> bool:
    """Whether autograd records an op on these."""
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _local_of_plain(value: torch.Tensor, target: Sharding, func: Op) -> torch.Tensor:
    if value.ndim == 0:
        return value
    if implicitly_replicated():
        return local_from_full(value, target, func)
    raise ValueError(  # not a TypeError: Python's operators would swallow its message
        f"{func}: a plain tensor of shape {tuple(value.shape)} together with a ragged one ({target}); "
        "distribute it first with ragged_shard.distribute_like, use to_local() on both, or say with torch's "
        "implicit_replication() that all ranks have the same"
    )


def _check_moves(func: Op, sharding: Sharding, target: Sharding, recorded: bool) -> None:
    """Raise unless an operand can be redistributed here. Reads global metadata only, so all ranks agree."""
    what = f"{func}: operands with different shardings:\n  {target}\n  {sharding}\n"
    known = sharding.local_shape is not None and target.local_shape is not None
    pending = sharding.partial or target.partial
    if sharding.mesh != target.mesh or sharding.shape != target.shape or pending or not known:
        raise ValueError(
            f"{what}make the second like the first: "
            "ragged_shard.redistribute(second, placements=first.placements) on one mesh, else "
            "ragged_shard.distribute_like(second.full_tensor(), first)"
        )
    if recorded:
        raise ValueError(
            f"{what}autograd records this op and would not see the second one redistributed: pass "
            "ragged_shard.redistribute(second, placements=first.placements), which it records, or call the op under "
            "torch.no_grad()"
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
