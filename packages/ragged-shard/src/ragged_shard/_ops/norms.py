"""Rules for the norms of lists of tensors, and for stacking them, over any mix of meshes.

What clipping does: `_foreach_norm` of all gradients, `stack` of the norms, the norm of that. A norm is Replicate on its
tensor's mesh; norms that are replicas over the same ranks can be stacked whichever meshes these are.

    tensors on        fsdp(4)   (efsdp 2, ep 2)   (dp 2, tp 2), cut over dp
    cut over ranks    0 1 2 3   0 1 2 3           0 2
                      '---one all-reduce---'      another
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ragged_shard._ops.fallback import as_dtensor, fallback, require_reduced
from ragged_shard._ops.operands import is_distributed
from ragged_shard._ops.reduce import HALVES, join, local_of, norm_over
from ragged_shard._sharding import describe_mesh, ranks_along, sharding_of
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import DISTRIBUTED, Op, bound

_REPLICATE = Replicate()


class _Cut(NamedTuple):
    """Tensors of one dtype that are cut by the same mesh axes."""

    mesh: DeviceMesh
    axes: tuple[int, ...]
    positions: list[int]
    locals: list[torch.Tensor]


def foreach_norm(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms of a list of tensors: one all-reduce, of 8 bytes per tensor, for all that are cut over the same ranks.

    One for each mesh axis if several axes cut all of them.
    """
    tensors, arguments = args[0], bound(func, args, kwargs)
    order, dtype = float(arguments.get("ord", 2)), arguments.get("dtype")
    results: list[Any] = [None] * len(tensors)
    cuts: dict[Any, _Cut] = {}
    # The last tensor's, which the next one mostly shares: hashing a mesh takes a while.
    kind, cut = None, None
    plain = []
    for i, tensor in enumerate(tensors):
        sharding = getattr(tensor, "_sharding", None)
        if sharding is not None and sharding.axis is not None:
            require_reduced(func, sharding)
            mesh, axes, local = sharding.mesh, sharding.cut_axes, tensor._local_tensor
        elif is_distributed(tensor):
            mesh, axes, local = _of_torchs(tensor)
        else:
            plain.append(i)
            continue
        if cut is None or mesh is not cut.mesh or axes != cut.axes or local.dtype is not kind:
            kind = local.dtype
            cut = cuts.setdefault((mesh, axes, kind), _Cut(mesh, axes, [], []))
        cut.positions.append(i)
        cut.locals.append(local)
    if plain:
        for i, norm in zip(plain, func([tensors[i] for i in plain], *args[1:], **kwargs), strict=True):
            results[i] = norm
    _fill_in(results, list(cuts.values()), order, dtype)
    return results


def _of_torchs(tensor: Any) -> tuple[DeviceMesh, tuple[int, ...], torch.Tensor]:
    """Mesh, axes that cut it and local tensor of a tensor with torch's own placements."""
    dtensor: DTensor = as_dtensor(tensor)
    if any(isinstance(p, Partial) for p in dtensor.placements):
        dtensor = dtensor.redistribute(
            placements=[_REPLICATE if isinstance(p, Partial) else p for p in dtensor.placements]
        )
    axes = tuple(axis for axis, p in enumerate(dtensor.placements) if not isinstance(p, Replicate))
    local: Any = dtensor.to_local()
    return dtensor.device_mesh, axes, local.wait() if hasattr(local, "wait") else local


def _fill_in(results: list[Any], cuts: list[_Cut], order: float, dtype: torch.dtype | None) -> None:
    """Write the norms of all tensors to their positions."""
    by_ranks: dict[frozenset[int], list[_Cut]] = {}
    for cut in cuts:
        by_ranks.setdefault(ranks_along(cut.mesh, cut.axes), []).append(cut)
    for members in by_ranks.values():
        values = [_values(cut.locals, order, dtype) for cut in members]
        how = norm_over(members[0].locals[0], order, dtype, torch.float64)
        groups = min(
            ([cut.mesh.get_group(a) for a in cut.axes if cut.mesh.size(a) > 1] for cut in members), key=len
        )
        totals = join(torch.cat(values), how, groups)
        for cut, total in zip(members, totals.split([len(v) for v in values]), strict=True):
            finished = norm_over(cut.locals[0], order, dtype, torch.float64).finish(total, 0)
            after = sharding_of(cut.mesh, (_REPLICATE,) * cut.mesh.ndim, torch.Size(()))
            for i, norm in zip(cut.positions, finished.unbind(), strict=True):
                results[i] = RaggedDTensor._wrap(norm, after)


def _values(locals_: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """This rank's contribution to each norm."""
    out = dtype or locals_[0].dtype
    how = norm_over(locals_[0], order, dtype, torch.float64)
    if order <= 0:
        return torch.stack([local_of(how, x.reshape(-1), [0]).reshape(()) for x in locals_])
    if order == float("inf"):  # torch refuses it over no elements; other norms are 0 there
        locals_ = [x if x.numel() else x.new_zeros(1) for x in locals_]
    inner = torch.float32 if out in HALVES else out
    values = torch.stack(torch._foreach_norm(locals_, order, dtype=inner))
    return values if order == float("inf") else values.to(torch.float64).pow_(order)


def stack(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms, or other tensors that are replicas over the same ranks, whichever meshes these are; others as torch does.

    Of a DTensor with a pending norm the total is taken first: one all-reduce for each axis that cuts it. Raises
    NotImplementedError for replicas over different ranks: the values of ranks outside are not known.
    """
    tensors = list(args[0])
    first = getattr(tensors[0], "_sharding", None) if tensors else None
    if first is not None and first.replicate and not first.shape:
        shardings = [getattr(t, "_sharding", None) for t in tensors]
        if shardings.count(first) == len(tensors):  # tests identity first, in C
            result = func([t._local_tensor for t in tensors], *args[1:], **kwargs)
            return RaggedDTensor._wrap(result, sharding_of(first.mesh, first.placements, result.shape))
    ragged = [t for t in tensors if isinstance(t, RaggedDTensor)]
    if not ragged or not all(t._sharding.replicate for t in ragged) or any(t.ndim for t in tensors):
        return fallback(func, args, kwargs)
    first = ragged[0]._sharding
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DISTRIBUTED)}
    if len(meshes) > 1:
        _check_same_ranks(func, list(meshes.values()))
    locals_ = [_total(t) for t in tensors]
    result = func(locals_, *args[1:], **kwargs)
    return RaggedDTensor._wrap(result, sharding_of(first.mesh, first.placements, result.shape))


def _total(value: Any) -> torch.Tensor:
    if isinstance(value, RaggedDTensor):
        return value._local_tensor
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check_same_ranks(func: Op, meshes: list[DeviceMesh]) -> None:
    first = ranks_along(meshes[0], tuple(range(meshes[0].ndim)))
    for mesh in meshes[1:]:
        if (ranks := ranks_along(mesh, tuple(range(mesh.ndim)))) != first:
            raise NotImplementedError(
                f"{func} of numbers that are the same over ranks {sorted(first)} ({describe_mesh(meshes[0])}) and over "
                f"{sorted(ranks)} ({describe_mesh(mesh)}): whether the other ranks hold copies or other parameters is "
                "not known. Make the parameters DTensors on the axes that are missing, Shard or Replicate there, "
                "before fully_shard; or, to clip where they hold copies, call fsdp_runtime.clip_grad_norm_ with "
                "copies=True"
            )
