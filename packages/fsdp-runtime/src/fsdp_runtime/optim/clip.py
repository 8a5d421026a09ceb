"""Clipping by the norm of all gradients, over the memory that they share instead of one by one.

gradients of a unit    | grad | grad |pad| grad |     views of one shard
runs                   [-------------]   [------]     one kernel each to read and to scale; no padding is in them
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from ragged_shard import RaggedDTensor
from ragged_shard.device import CPU, is_cpu

from .. import _torch_compat as compat
from .._torch.tree import local_like

_PIECE = 1 << 16  # elements in one sum on a CPU: over longer ones torch's kernels there lose digits


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    copies: bool = False,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clip gradients to a norm, and return their norm before: a plain 0-d tensor, the same on every rank.

    `torch.nn.utils.clip_grad_norm_` in a few kernels for each unit: gradients that are adjacent in memory are read and
    scaled as one, padding is not. Half precision is summed in fp32, and all in another order, so that norms may differ
    by 1e-5 of themselves. Parameters may be on several meshes (dense ones on `fsdp`, experts on `efsdp` and `ep`,
    others on `dp` and `tp`); plain tensors count as the same on all ranks. A parameter without a gradient on this rank
    adds nothing; other ranks may have one. A replaced gradient is clipped where it is. The norm is in fp32 or wider.

    Communicates one all-reduce of 8 bytes for all gradients that are cut over the same ranks; if several axes cut each
    of them, one for each axis. Nothing is gathered.

    Args:
        parameters: the same ones on every rank.
        max_norm: the largest norm to leave.
        norm_type: of the p-norm, positive; `inf` for the largest value.
        error_if_nonfinite: raise if the norm is not finite, on all ranks, and clip nothing.
        copies: parameters on fewer ranks than others are copies on the rest, as tensor parallelism leaves them. If
            they may be different parameters (experts that are plain tensors), the norm is not known.
        pp_mesh: a 1-D mesh of pipeline stages, each with its own parameters; one more all-reduce of 8 bytes.

    Raises:
        RuntimeError: the norm is not finite, if asked.
        NotImplementedError: parameters on different ranks, without `copies`.
        ValueError: `norm_type` is not positive, or `pp_mesh` has several axes.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"clip_grad_norm_: norm_type is {order}; expected a positive number or inf")
    if pp_mesh is not None and pp_mesh.ndim != 1:
        raise ValueError(
            f"pp_mesh has {pp_mesh.ndim} axes {pp_mesh.mesh_dim_names}; pass one, such as mesh['pp']"
        )
    gradients = _Gradients(params)
    everywhere = {frozenset(mesh.mesh.flatten().tolist()): mesh for mesh in gradients.meshes.values()}
    if len(everywhere) > 1 and not copies:
        raise NotImplementedError(
            f"clip_grad_norm_: parameters are on different ranks, {' and '.join(map(str, everywhere.values()))}; "
            "whether the ranks outside hold copies or other parameters is not known. Pass copies=True if they are "
            "copies, as after tensor parallelism; else make the parameters DTensors on the missing axes before "
            "fully_shard"
        )
    norm = gradients.norm(order)
    if pp_mesh is not None:
        device = torch.device(pp_mesh.device_type) if norm.device.type != pp_mesh.device_type else norm.device
        norm = _reduced(norm.to(device, torch.float64), order, [pp_mesh.get_group()]).to(norm.dtype)
    if error_if_nonfinite and not torch.isfinite(norm):
        where = " over all pipeline stages" if pp_mesh is not None else ""
        raise RuntimeError(f"the norm of order {order} of all gradients{where} is {norm.item()}: not clipped")
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for tensors in _by_kind(gradients.scaled).values():
        compat.scale(tensors, coefficient.to(tensors[0].device))
    return norm


@dataclass(eq=False)
class _Cut:
    """This rank's slices of all gradients that are cut over the same ranks; whole gradients if there is one rank."""

    groups: list[dist.ProcessGroup]  # to reduce over in turn; a single one if it has all of these ranks
    slices: list[torch.Tensor] = field(default_factory=list)  # as backward left them in shards; runs of them
    separate: list[torch.Tensor] = field(default_factory=list)  # of other gradients


class _Gradients:
    """This rank's part of the gradients of `params`."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.cuts: dict[frozenset[int], _Cut] = {}  # by their ranks; in the same order on every rank
        self.meshes: dict[int, DeviceMesh] = {}  # those of the parameters
        self.scaled: list[torch.Tensor] = []  # the tensors to multiply
        self.dtype = torch.float32  # the norm's; of gradients without elements on this rank too
        self._device = params[0].device if params else CPU
        by_axes: dict[Any, _Cut] = {}
        for param in params:
            grad: Any = param.grad
            mesh, placements = getattr(param, "device_mesh", None), getattr(param, "placements", ())
            axes = (id(mesh), *map(type, placements))
            if axes not in by_axes:
                by_axes[axes] = self._cut(mesh, placements)
            cut = by_axes[axes]
            if grad is None:
                continue
            self.dtype = torch.promote_types(self.dtype, _wide(grad.dtype))
            if type(grad) is RaggedDTensor and grad.placements == placements:
                cut.slices.append(grad.local)
            else:
                cut.separate.append(grad if mesh is None else local_like(param, grad))
                self.scaled.append(grad)
        for cut in self.cuts.values():
            cut.slices = runs_of(cut.slices)
            self.scaled += cut.slices

    def _cut(self, mesh: Any, placements: Sequence[Placement]) -> _Cut:
        if mesh is not None:
            self.meshes[id(mesh)] = mesh
            if self._device.type != mesh.device_type:  # offloaded
                self._device = torch.device(mesh.device_type)
        axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)]
        groups, ranks = [mesh.get_group(axis) for axis in axes], frozenset[int]()
        if axes:  # the ranks that they spread this rank's coordinate over
            coordinate = enumerate(mesh.get_coordinate() or [0] * mesh.ndim)
            index = tuple(slice(None) if axis in axes else place for axis, place in coordinate)
            ranks = frozenset(mesh.mesh[index].flatten().tolist())
        cut = self.cuts.setdefault(ranks, _Cut(groups))
        if len(groups) < len(cut.groups):
            cut.groups = groups
        world = dist.group.WORLD
        if world is not None and len(cut.groups) > 1 and len(ranks) == world.size():
            joint = f"{self._device.type}:" in dist.get_backend_config(world)
            cut.groups = [world] if joint else cut.groups
        return cut

    def norm(self, order: float) -> torch.Tensor:
        """Norm of all of them, on all ranks: 0-d, at least fp32."""
        totals = []
        for cut in self.cuts.values():
            pieces = chain.from_iterable(map(_pieces, cut.slices + cut.separate))
            norms = [
                compat.norms(tensors, order, _wide(dtype)).to(self._device, torch.float64)
                for (_, dtype, _), tensors in _by_kind(pieces).items()
            ]
            totals.append(_reduced(self._joined(norms, order), order, cut.groups))
        return self._joined([total.view(1) for total in totals], order).to(self.dtype)

    def _joined(self, norms: list[torch.Tensor], order: float) -> torch.Tensor:
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms), order)
        return norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a gradient's norm is taken."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def runs_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of `tensors` in fewer tensors: 1-D views of those that are adjacent in a storage.

    A run is at the place of the first of its tensors in `tensors`, so that sums do not depend on addresses.
    """
    places = sorted((each.data_ptr(), each.nbytes, number, each) for number, each in enumerate(tensors))
    runs: list[list[tuple[int, torch.Tensor]]] = []
    end = limit = -1  # of the last run, and of its storage
    for address, nbytes, position, tensor in places:
        if not nbytes:
            continue
        contiguous = tensor.is_contiguous()
        fits = contiguous and address == end and end + nbytes <= limit
        if fits and tensor.dtype is runs[-1][0][1].dtype:
            runs[-1].append((position, tensor))
        else:
            runs.append([(position, tensor)])
            storage = tensor.untyped_storage()
            limit = storage.data_ptr() + storage.nbytes()
        end = address + nbytes if contiguous else -1
    runs.sort(key=lambda run: min(position for position, _ in run))
    joined = []
    for (_, first), *others in runs:
        size = first.numel() + sum(tensor.numel() for _, tensor in others)
        joined.append(first.as_strided((size,), (1,), first.storage_offset()) if others else first)
    return joined


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor in parts that torch sums accurately; none if it is empty."""
    splits = is_cpu(tensor.device) and tensor.numel() > _PIECE
    whole = (tensor,) if tensor.numel() else ()
    return tensor.reshape(-1).split(_PIECE) if splits else whole


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Tensors that one foreach op takes."""
    by_kind: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_kind[type(tensor), tensor.dtype, tensor.device].append(tensor)
    return by_kind


def _reduced(norm: torch.Tensor, order: float, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """The norm over all ranks of `groups`: one all-reduce each, of 8 bytes; of 16 for infinity: MAX may lose a NaN."""
    infinite = math.isinf(order)
    nan = norm.isnan()
    total = torch.stack([torch.where(nan, 0, norm), nan.to(norm.dtype)]) if infinite else norm.pow(order)
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return torch.where(total[1] > 0, math.nan, total[0]) if infinite else total.pow(1 / order)
