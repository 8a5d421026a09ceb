"""Clipping by the norm of all gradients, on whatever meshes they lie."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .in_backward import is_updated_in_backward


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    copies: bool = False,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clip gradients to a norm, and return their norm before: a plain 0-d tensor, the same on every rank.

    `torch.nn.utils.clip_grad_norm_`, which works on the same parameters, with two differences: that returns a
    distributed tensor, and knows nothing of pipeline stages.

    Parameters may lie on several meshes (dense ones on `fsdp`, experts on `efsdp` and `ep`, others on `dp` and `tp`);
    plain tensors count as the same on all ranks. Issues one all-reduce, of 8 bytes a tensor, for all gradients that are
    cut over the same ranks; where several axes cut them and no process group has just these ranks, one for each axis.
    With `foreach=False` the same for each tensor by itself. Nothing is gathered.

    Some may lie on fewer ranks than others: norms on `dp`, next to matrices on `dp` and `tp`. Whether the other ranks
    hold copies or parameters of their own (experts that are plain tensors) torch's function cannot know, and refuses;
    `copies=True` says it here.

    Args:
        parameters: those whose gradients are clipped; others have none.
        max_norm: the largest norm to leave.
        norm_type: of the p-norm; `inf` for the largest value.
        error_if_nonfinite: raise where the norm is not finite.
        foreach: as in torch's function.
        copies: parameters on fewer ranks than others are copies on the rest, as tensor parallelism leaves them.
        pp_mesh: a 1-D mesh of pipeline stages, each of which calls this with its own parameters. Their norms are joined
            by one more all-reduce, of 8 bytes.

    Raises:
        RuntimeError: the norm is not finite, if asked; or `optimizer_in_backward` has updated the parameters.
        NotImplementedError: gradients on different ranks, without `copies`.
        ValueError: `pp_mesh` has several axes.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if pp_mesh is not None and pp_mesh.ndim != 1:
        raise ValueError(
            f"pp_mesh has {pp_mesh.ndim} axes {pp_mesh.mesh_dim_names}; pass one, such as mesh['pp']"
        )
    if any(is_updated_in_backward(param) for param in params):
        raise RuntimeError(
            "clip_grad_norm_: optimizer_in_backward updates some of these parameters before the norm of all gradients "
            "is known; clip with an optimizer after backward"
        )
    grads = [param.grad for param in params if param.grad is not None]
    if copies:
        by_ranks: dict[frozenset[int], list[torch.Tensor]] = {}
        for grad in grads:
            by_ranks.setdefault(_ranks_of(grad), []).append(grad)
        grads = [
            _plain(nn.utils.get_total_norm(some, norm_type, False, foreach)) for some in by_ranks.values()
        ]
    norm = _plain(nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite and pp_mesh is None, foreach))
    if pp_mesh is not None:
        norm = joined_over_stages(norm, float(norm_type), pp_mesh)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {norm_type} over all pipeline stages is {norm.item()}: not clipped"
            )
    nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def _plain(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _ranks_of(grad: torch.Tensor) -> frozenset[int]:
    """The ranks that a gradient lies on; none for a plain tensor."""
    if not isinstance(grad, DTensor):
        return frozenset()
    ranks: list[int] = grad.device_mesh.mesh.flatten().tolist()
    return frozenset(ranks)


def joined_over_stages(norm: torch.Tensor, order: float, mesh: DeviceMesh) -> torch.Tensor:
    """The norm over all pipeline stages, given this one's: one all-reduce of 8 bytes over a 1-D mesh."""
    if mesh.ndim != 1:
        raise ValueError(f"pp_mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; pass one, such as mesh['pp']")
    device = torch.device(mesh.device_type) if norm.device.type != mesh.device_type else norm.device
    return norm_over(norm.to(device, torch.float64), order, [mesh.get_group()]).to(norm.dtype)


def norm_over(norm: torch.Tensor, order: float, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """The norm of what all ranks of some groups hold, given this rank's: one all-reduce of 8 bytes for each group.

    Of the order infinity 16 bytes: not every backend's MAX keeps a NaN.
    """
    infinite = math.isinf(order)
    nan = norm.isnan()
    total = torch.stack([torch.where(nan, 0, norm), nan.to(norm.dtype)]) if infinite else norm.pow(order)
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return torch.where(total[1] > 0, math.nan, total[0]) if infinite else total.pow(1 / order)
