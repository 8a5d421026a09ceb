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

from block_optim.core._torch_compat import local_of
from block_optim.core.holding import cutting_axes
from block_optim.core.params import Param
from ragged_shard.dist import DISTRIBUTED, movable


def cut_groups(params: Sequence[Param]) -> list[dist.ProcessGroup]:
    """The process groups over whose ranks some parameter, or the work on it, is cut, in a fixed order."""
    result: dict[str, dist.ProcessGroup] = {}
    for param in params:
        axes = cutting_axes(param.mesh, param.placements)
        mesh = param.mesh if axes else param.replicas
        if mesh is not None:
            groups = [mesh.get_group(axis) for axis in axes or range(mesh.ndim) if mesh.size(axis) > 1]
            result.update({group.group_name: group for group in groups})
    return list(result.values())


def agreed(flag: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The largest of all ranks' flags: one all_reduce of its 4 bytes over each process group in turn."""
    for group in groups:
        flag = movable(flag, group)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return flag


def norm_is_finite(norm: torch.Tensor | float) -> bool:
    """Whether the gradients' total norm, the same on every rank, is finite.

    A DTensor whose reduction is pending (torch's `clip_grad_norm_` returns one for DTensors) is reduced here, by
    one all-reduce; a plain, a Replicate or a ragged norm costs nothing.
    """
    if isinstance(norm, DISTRIBUTED):
        pending = any(isinstance(p, Partial) for p in norm.placements)
        norm = norm.full_tensor() if pending else local_of(norm)
    return math.isfinite(float(norm))


def non_finite(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A 0-d fp32 tensor on ``device``: 0 where all of this rank's gradients are finite, else 1.

    Reads every gradient once and writes none: a maximum, which unlike a sum does not overflow, by one multi-tensor
    kernel for each dtype.
    """
    present = [g for g in grads if g.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float32, device=device)
    return get_total_norm(present, math.inf).to(device).isfinite().logical_not().to(torch.float32)
