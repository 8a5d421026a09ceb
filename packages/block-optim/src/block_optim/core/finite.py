"""The check for non-finite gradients, with the same result on every rank.

    known already        `step(grad_norm=...)`                                   no collective
    one rank             this rank's own check, or GradScaler's `found_inf`      no collective
    several              either, then MAX over each process group that cuts      4 bytes, one all_reduce for each
                         a parameter, one after another

Ranks along a Replicate axis hold the same gradients, so those axes are not asked, unless they divide the work on the
parameter: they then must take the same steps.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial
from torch.nn.utils import get_total_norm

from block_optim.core import device as devices
from block_optim.core._torch_compat import local_of, multiply_by_one_checked
from block_optim.core.holding import cutting_axes
from block_optim.core.params import Param
from block_optim.core.runs import Run, find_runs, is_dense
from ragged_shard import DISTRIBUTED

MANY_RUNS = 16  # from here on one call that checks a list beats a sum for each run


def cut_groups(params: Sequence[Param]) -> list[dist.ProcessGroup]:
    """The process groups over whose ranks some parameter, or the work on it, is cut, in a fixed order."""
    result: dict[str, dist.ProcessGroup] = {}
    for param in params:
        for axis in cutting_axes(param.mesh, param.placements):
            assert param.mesh is not None
            group = param.mesh.get_group(axis)
            result.setdefault(group.group_name, group)
        mesh = param.replicas
        if mesh is not None and not cutting_axes(param.mesh, param.placements):
            groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
            result.update({group.group_name: group for group in groups})
    return list(result.values())


def agreed(flag: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The largest of all ranks' flags, in place: one all_reduce of its 4 bytes over each process group in turn."""
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return flag


def norm_is_finite(norm: torch.Tensor | float) -> bool | torch.Tensor:
    """Whether the gradients' total norm, the same on every rank, is finite; where it is on a device, a 0-d tensor.

    A DTensor whose reduction is pending (torch's `clip_grad_norm_` returns one for DTensors) is reduced here, by
    one all-reduce; a plain, a Replicate or a ragged norm costs nothing.
    """
    if isinstance(norm, DISTRIBUTED):
        pending = any(isinstance(p, Partial) for p in norm.placements)
        norm = norm.full_tensor() if pending else local_of(norm)
    if isinstance(norm, torch.Tensor) and devices.runs_ahead(norm.device):
        return norm.isfinite()
    return math.isfinite(float(norm))


def largest_is_not_finite(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A 0-d bool on ``device``, for which nothing waits: whether some gradient is not finite.

    Reads every gradient once and writes none: a maximum, which unlike a sum does not overflow, by one multi-tensor
    kernel for each dtype.
    """
    present = [g for g in grads if g.numel()]
    if not present:
        return torch.zeros((), dtype=torch.bool, device=device)
    return get_total_norm(present, math.inf).to(device).isfinite().logical_not()


class GradientCheck:
    """This rank's own check: one pass over the local gradients, a handful of calls however many there are.

    On a device it is the largest magnitude, which is only read. On CPU it is sums: that of a run of gradients is finite
    unless one of them is not (NaN and infinity stay what they are in sums), or unless it overflows, or something in a
    gap between the gradients is not; so only a sum that is not finite is looked into, gradient by gradient.
    """

    def __init__(self) -> None:
        self._version = -1
        self._many = False
        self._runs: list[Run] = []
        self._loose: list[int] = []
        self._dense: list[int] = []
        self._cells: list[torch.Tensor] = []
        self._sums = torch.empty(0)
        self._flag: torch.Tensor | None = None

    def __call__(self, grads: Sequence[torch.Tensor], version: int, device: torch.device) -> torch.Tensor:
        """A 0-d fp32 tensor on ``device``: 0 where all gradients are finite, else 1."""
        if self._flag is None or self._flag.device != device:
            self._flag = torch.zeros((), dtype=torch.float32, device=device)
        flag = self._flag
        flag.zero_()
        if devices.runs_ahead(device):
            return flag.copy_(largest_is_not_finite(grads, device))
        if version != self._version:
            self._loose = [i for i, g in enumerate(grads) if not is_dense(g)]  # as autograd's expanded ones
            self._dense = [i for i, g in enumerate(grads) if is_dense(g)]
            self._runs = find_runs([grads[i] for i in self._dense])
            self._many = len(self._runs) > MANY_RUNS
            self._sums = torch.zeros(len(self._runs), dtype=torch.float32)
            self._cells = list(self._sums.unbind())
            self._version = version
        dense = [grads[i] for i in self._dense] if self._loose else grads
        if self._many:
            for dtype in {g.dtype for g in dense}:
                multiply_by_one_checked([g for g in dense if g.dtype == dtype], flag)
        for run, cell in zip(() if self._many else self._runs, self._cells, strict=False):
            torch.sum(run.view(dense), 0, dtype=torch.float32, out=cell)
        loose = sum(float(torch.sum(grads[i], dtype=torch.float32)) for i in self._loose)
        if not math.isfinite(sum(self._sums.tolist()) + loose):
            flag.fill_(float(not all(bool(torch.isfinite(g).all()) for g in grads)))
        return flag
