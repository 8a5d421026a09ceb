"""Clipping by the norm of a model's gradients, over the memory that they lie in instead of one by one.

gradients of a unit    | grad | grad |pad| grad |     views of one shard
runs                   [-------------]   [------]     one kernel each to read and to scale; no padding is in them
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ragged_shard import CPU, RaggedDTensor

from .. import _torch_compat as compat
from .._params.group import Group
from .._params.unit import Unit
from .._plan.group import as_sharded
from .clip import joined_over_stages, norm_over

# Looked at by functions of C, since there may be thousands.
_LOCAL, _PLACEMENTS = operator.attrgetter("local"), operator.attrgetter("placements")
_ADDRESS, _NBYTES = torch.Tensor.data_ptr, operator.attrgetter("nbytes")
_PIECE = 1 << 16  # elements in one sum: over longer ones torch's CPU kernels lose digits


@dataclass(eq=False)
class _Cut:
    """This rank's slices of all gradients that are cut over the same ranks; of those that are not cut, all.

    Attributes:
        groups: the process groups of the axes that cut them.
        slices: plain tensors.
    """

    groups: tuple[dist.ProcessGroup, ...]
    slices: list[torch.Tensor] = field(default_factory=list)


class _Cuts(dict[tuple[str, ...], _Cut]):
    """By process groups; the same in the same order on every rank, whichever gradients a rank has.

    Attributes:
        meshes: on which the parameters lie.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meshes: dict[int, DeviceMesh] = {}

    def of(self, mesh: DeviceMesh, placements: Sequence[Any]) -> _Cut:
        self.meshes[id(mesh)] = mesh
        axes = [axis for axis, one in enumerate(placements) if isinstance(one, Shard)]
        return self.over(tuple([mesh.get_group(axis) for axis in axes]))

    def over(self, groups: tuple[dist.ProcessGroup, ...]) -> _Cut:
        key = tuple([group.group_name for group in groups])
        if key not in self:
            self[key] = _Cut(groups)
        return self[key]


def clip(
    units: Iterable[Unit],
    others: Iterable[nn.Parameter],
    max_norm: float,
    order: float,
    *,
    error_if_nonfinite: bool,
    copies: bool,
    pp_mesh: DeviceMesh | None,
) -> torch.Tensor:
    """See `FSDPModule.clip_grad_norm_`.

    Args:
        others: parameters that belong to no unit.
    """
    if not order > 0:
        raise ValueError(
            f"clip_grad_norm_: norm_type is {order}; expected a positive number, or inf for the largest value"
        )
    cuts, scaled = _Cuts(), list[torch.Tensor]()
    device = CPU
    for unit in units:
        device = unit.data.device
        if unit.options.update is not None:
            raise RuntimeError(
                f"clip_grad_norm_: optimizer_in_backward updates {unit.name} before the norm of all gradients is "
                "known; clip with an optimizer after backward"
            )
        for group in unit.groups:
            _add_group(group, cuts, scaled)
    for param in others:
        _add_other(param, cuts, scaled)
    if not copies and len(cuts.meshes) > 1:
        _check_ranks(cuts.meshes.values())
    norm = _norm(cuts.values(), order, device)
    if pp_mesh is not None:
        norm = joined_over_stages(norm, order, pp_mesh)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of order {order} of all gradients is {norm.item()}: not clipped")
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for alike in _by_kind(scaled).values():
        compat.scale(alike, coefficient.to(alike[0].device))
    return norm


def _add_group(group: Group, cuts: _Cuts, scaled: list[torch.Tensor]) -> None:
    """Add the gradients of a group: where they lie next to each other, as one."""
    plan = group.plan
    cut = cuts.of(plan.params[0].mesh, plan.params[0].placements)
    sharded: list[Any] = [param.sharded for param in group.params]
    grads: list[Any] = [param.grad for param in sharded]
    if _as_published(grads, sharded) and not any([planned.cut_by_others for planned in plan.params]):  # noqa: C419
        _add_runs(list(map(_LOCAL, grads)), cut, scaled)
        return
    alike: list[torch.Tensor] = []
    for planned, param, grad in zip(plan.params, sharded, grads, strict=True):
        if planned.cut_by_others:
            cut, before = cuts.of(planned.mesh, planned.placements), cut
            if cut is not before:
                _add_runs(alike, before, scaled)
                alike = []
        if grad is None:
            continue
        if type(grad) is RaggedDTensor and (
            grad.placements is param.placements or grad.placements == planned.placements
        ):
            alike.append(grad.local)
        else:  # the user's
            cut.slices.append(as_sharded(plan, planned, param, grad).to_local())
            scaled.append(grad)
    _add_runs(alike, cut, scaled)


def _as_published(grads: list[Any], sharded: list[Any]) -> bool:
    """Whether all gradients are there and placed as their parameters are: what backward leaves."""
    if set(map(type, grads)) != {RaggedDTensor}:
        return False
    return all(map(operator.is_, map(_PLACEMENTS, grads), map(_PLACEMENTS, sharded)))


def _add_runs(tensors: list[torch.Tensor], cut: _Cut, scaled: list[torch.Tensor]) -> None:
    runs = runs_of(tensors)
    cut.slices += runs
    scaled += runs


def _add_other(param: nn.Parameter, cuts: _Cuts, scaled: list[torch.Tensor]) -> None:
    """Add the gradient of a parameter that no unit has: a DTensor, or one that is the same on all ranks."""
    grad = param.grad
    if isinstance(param, DTensor):
        cut = cuts.of(param.device_mesh, param.placements)
        if grad is not None:
            alike: Any = grad
            if alike.placements != param.placements:
                alike = alike.redistribute(placements=param.placements)
            cut.slices.append(alike.to_local())
            scaled.append(grad)
    else:
        cut = cuts.over(())
        if grad is not None:
            cut.slices.append(grad)
            scaled.append(grad)


def runs_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of contiguous tensors in fewer: 1-D views of those that lie next to each other in a storage."""
    tensors = list(tensors)
    places = sorted(
        zip(map(_ADDRESS, tensors), map(_NBYTES, tensors), range(len(tensors)), tensors, strict=True)
    )
    runs: list[torch.Tensor] = []
    first, end, limit = None, -1, -1  # of the run that is open
    for address, nbytes, _, tensor in places:
        if not nbytes:
            continue
        if first is not None and address == end and end + nbytes <= limit and tensor.dtype is first.dtype:
            end += nbytes
            continue
        if first is not None:
            runs.append(_run(first, end))
        storage = tensor.untyped_storage()
        first, end, limit = tensor, address + nbytes, storage.data_ptr() + storage.nbytes()
    if first is not None:
        runs.append(_run(first, end))
    return runs


def _run(first: torch.Tensor, end: int) -> torch.Tensor:
    """The elements from those of a tensor up to an address."""
    length = (end - first.data_ptr()) // first.itemsize
    if length == first.numel():
        return first
    return first.as_strided((length,), (1,), first.storage_offset())


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Tensors that one foreach op takes."""
    found: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[type(tensor), tensor.dtype, tensor.device].append(tensor)
    return found


def _norm(cuts: Iterable[_Cut], order: float, device: torch.device) -> torch.Tensor:
    """The norm of all of them, on all ranks: 0-d, at least fp32."""
    totals, dtype = [], torch.float32
    for cut in cuts:
        norms = []
        for (_, kind, _), alike in _by_kind(cut.slices).items():
            wide = torch.float32 if kind.itemsize < 4 else kind
            dtype = torch.promote_types(dtype, wide)
            pieces: list[torch.Tensor] = []
            for one in alike:
                pieces += one.reshape(-1).split(_PIECE) if one.numel() > _PIECE else (one,)
            pieces = [piece for piece in pieces if piece.numel()]
            if pieces:
                norms.append(compat.norms(pieces, order, wide).to(device, torch.float64))
        here = torch.zeros((), dtype=torch.float64, device=device)
        if norms:
            here = torch.linalg.vector_norm(torch.cat(norms), order)
        totals.append(norm_over(here, order, cut.groups))
    if not totals:
        return torch.zeros((), dtype=dtype, device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(totals), order).to(dtype)
    return norm


def _check_ranks(meshes: Iterable[DeviceMesh]) -> None:
    """Raise where gradients lie on different ranks: what the others hold is not known."""
    ranks = {frozenset(mesh.mesh.flatten().tolist()): mesh for mesh in meshes}
    if len(ranks) > 1:
        raise NotImplementedError(
            f"clip_grad_norm_: parameters lie on different ranks, {' and '.join(map(str, ranks.values()))}; whether "
            "the ranks outside hold copies or other parameters is not known. Pass copies=True where they are copies, "
            "as after tensor parallelism; else make the parameters DTensors on the missing axes before fully_shard"
        )
