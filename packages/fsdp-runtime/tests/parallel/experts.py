"""Expert parallelism: the ranks of a mesh axis divide the experts; tokens are sent to them and back.

    x_SD sorted by expert  --all-to-all-->  pairs of this rank's experts  -- SwiGLU -->  --all-to-all-->  y_SD
    counts_E               --all-to-all-->  how many come from each rank, for each expert

Suffixes as in `fsdp_runtime.train.model`; R ranks, L = E / R experts on each, P pairs of this rank's experts.

    experts = apply_expert_parallel(model, mesh["ep"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["fsdp"], shard_placement_fn=lambda p: mesh["efsdp"] if p in experts else None)
        block.set_gradient_divide_factor(data_parallel_ranks)

The divide factor: an expert's gradient is the sum over the tokens of all ranks of `ep` and `efsdp`, so the average
over `efsdp` alone, the default, would be too large by the size of `ep`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_runtime.train.model import MixtureOfExperts, swiglu_of_experts


def apply_expert_parallel(model: nn.Module, ep_mesh: DeviceMesh) -> set[nn.Parameter]:
    """Divide the experts of every mixture-of-experts layer over the ranks of a 1-D mesh, in place.

    Every rank must hold the same values; nothing is communicated. Afterwards the experts'
    weights are DTensors under the same names, cut over their first dimension: E / R experts on each rank. A layer's
    forward issues three all-to-alls over the axis (int64 counts, 8 E bytes; the pairs' rows, there and back), its
    backward two. Call it before `fully_shard`.

    Returns:
        the experts' parameters, to choose their mesh by.
    """
    params: set[nn.Parameter] = set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is MixtureOfExperts:
                parallel = ParallelMixtureOfExperts(child, ep_mesh)
                setattr(parent, name, parallel)
                params.update(parallel.experts())
    return params


class ParallelMixtureOfExperts(MixtureOfExperts):
    """A mixture of experts of which this rank computes some, for the tokens of all ranks of an axis."""

    def __init__(self, layer: MixtureOfExperts, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.train(layer.training)
        self.top_k, self.num_experts, self.router = layer.top_k, layer.num_experts, layer.router
        self.w_gate = _shared_out(layer.w_gate, mesh)
        self.w_up = _shared_out(layer.w_up, mesh)
        self.w_down = _shared_out(layer.w_down, mesh)
        self._group = mesh.get_group()

    def experts(self) -> list[nn.Parameter]:
        """The experts' parameters."""
        return [self.w_gate, self.w_up, self.w_down]

    def _experts(self, x_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Pairs sorted by expert, each through its expert's SwiGLU, wherever that is."""
        gate_LFD, up_LFD, down_LDF = map(_local, self.experts())
        return through_experts(
            x_SD,
            counts_E,
            self._group,
            lambda x, counts: swiglu_of_experts(x, counts, gate_LFD, up_LFD, down_LDF),
        )


def through_experts(
    x_SD: Tensor, counts_E: Tensor, group: dist.ProcessGroup, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Rows sorted by expert, `counts_E` of each, through experts that the ranks of a process group have shared out.

    Args:
        compute: rows sorted by this rank's experts, and how many of each of them (L,), to as many rows.
    """
    R = group.size()
    if R == 1:
        return compute(x_SD, counts_E)
    come_RL = torch.empty_like(counts_E).view(R, -1)
    dist.all_to_all_single(come_RL, counts_E.view(R, -1), group=group)
    send, receive, order_P = _routes(counts_E.view(R, -1), come_RL)
    x_PD = _AllToAll.apply(x_SD, send, receive, group)
    y_PD = compute(x_PD[order_P], come_RL.sum(0))
    y_PD = torch.empty_like(y_PD).index_copy(0, order_P, y_PD)
    y_SD: Tensor = _AllToAll.apply(y_PD, receive, send, group)
    return y_SD


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _routes(go_RL: Tensor, come_RL: Tensor) -> tuple[list[int], list[int], Tensor]:
    """Numbers of rows to send to and receive from each rank, and the order that sorts received rows by expert."""
    R, L = come_RL.shape
    send, receive = torch.stack((go_RL.sum(1), come_RL.sum(1))).tolist()
    expert_RL = torch.arange(L, device=come_RL.device).repeat(R)
    expert_P = expert_RL.repeat_interleave(come_RL.flatten(), output_size=sum(receive))
    return send, receive, expert_P.argsort(stable=True)


def _shared_out(weight: Any, mesh: DeviceMesh) -> nn.Parameter:
    local: Any = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(local, requires_grad=weight.requires_grad)


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks and back in backward: one `all_to_all_single` each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        """(sum(send), D) in, (sum(receive), D) out."""
        ctx.sizes = send, receive, group
        return _exchanged(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The other way."""
        send, receive, group = ctx.sizes
        return _exchanged(grad, receive, send, group), None, None, None


def _exchanged(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out
