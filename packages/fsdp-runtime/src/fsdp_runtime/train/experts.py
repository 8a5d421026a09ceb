# ruff: noqa: N803, N806  (capitals are dimensions)
"""Expert parallelism: the ranks of a mesh axis share out the experts, and tokens travel to them and back.

    x_SD sorted by expert  --all-to-all-->  pairs of this rank's experts  -- SwiGLU -->  --all-to-all-->  y_SD
    counts_E               --all-to-all-->  how many come from each rank, for each expert

Suffixes as in `model`; R ranks of the axis, L = E / R experts on each, P pairs that this rank's experts get.

    experts = apply_expert_parallel(model, mesh["ep"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["fsdp"], shard_placement_fn=lambda p: mesh["efsdp"] if p in experts else None)
        block.set_gradient_divide_factor(data_parallel_ranks)

The divide factor: an expert's gradient is the sum over the tokens of all ranks of `ep` and `efsdp`, so the average
over `efsdp` alone, the default, would be too large by the size of `ep`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .model import MixtureOfExperts, swiglu_of_experts


def apply_expert_parallel(model: nn.Module, ep_mesh: DeviceMesh) -> set[nn.Parameter]:
    """Have the ranks of a 1-D mesh share out the experts of every mixture-of-experts layer. In place.

    Every rank must hold the same values, on any device or meta; nothing is communicated. Afterwards a layer's `w_gate`,
    `w_up` and `w_down` are DTensors under the same names, cut over their first dimension: E / R experts on each rank.
    A layer's forward issues three all-to-alls over the axis (int64 counts, 8 E bytes; the pairs' rows, there and back)
    and its backward two. Call it before `fully_shard`.

    Returns:
        the experts' parameters, to choose their mesh by.

    Raises:
        ValueError: the mesh has several axes, the model no such layer, or a layer's experts do not divide by R.
    """
    if ep_mesh.ndim != 1:
        raise ValueError(
            f"ep_mesh has {ep_mesh.ndim} axes {ep_mesh.mesh_dim_names}; pass one, such as mesh['ep']"
        )
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is MixtureOfExperts
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no MixtureOfExperts layer to share out")
    ranks = ep_mesh.size()
    for _, name, layer in found:
        if layer.num_experts % ranks:
            raise ValueError(
                f"{name} has {layer.num_experts} experts, which {ranks} ranks of expert parallelism do not divide; "
                "choose a divisor"
            )
    params: set[nn.Parameter] = set()
    for parent, name, layer in found:
        parallel = ParallelMixtureOfExperts(layer, ep_mesh)
        setattr(parent, name, parallel)
        params.update((parallel.w_gate, parallel.w_up, parallel.w_down))
    return params


class ParallelMixtureOfExperts(MixtureOfExperts):
    """A mixture of experts of which this rank computes some, for the tokens of all ranks of an axis."""

    def __init__(self, layer: MixtureOfExperts, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.train(layer.training)
        self.top_k, self.num_experts, self.router = layer.top_k, layer.num_experts, layer.router
        self.sum_counts = layer.sum_counts
        self.w_gate = _shared_out(layer.w_gate, mesh)
        self.w_up = _shared_out(layer.w_up, mesh)
        self.w_down = _shared_out(layer.w_down, mesh)
        self._group, self._ranks = mesh.get_group(), mesh.size()

    def _experts(self, x_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Pairs sorted by expert, each through its expert's SwiGLU, wherever that is."""
        weights = [_local(weight) for weight in (self.w_gate, self.w_up, self.w_down)]
        if self._ranks == 1:
            return swiglu_of_experts(x_SD, counts_E, *weights)
        R = self._ranks
        come_RL = torch.empty_like(counts_E).view(R, -1)
        dist.all_to_all_single(come_RL, counts_E.view(R, -1), group=self._group)
        send, receive = self._row_sizes(counts_E, come_RL, len(x_SD))
        x_PD = _AllToAll.apply(x_SD, send, receive, self._group)
        order_P = _by_expert(come_RL, len(x_PD))
        y_PD = swiglu_of_experts(x_PD[order_P], come_RL.sum(0), *weights)
        y_PD = torch.empty_like(y_PD).index_copy(0, order_P, y_PD)
        y_SD: Tensor = _AllToAll.apply(y_PD, receive, send, self._group)
        return y_SD

    def _row_sizes(self, counts_E: Tensor, come_RL: Tensor, total: int) -> tuple[list[int], list[int]]:
        """How many rows go to each rank and come from each, on the host; without values (meta) as many."""
        R = self._ranks
        if counts_E.is_meta or type(counts_E).__name__ == "FakeTensor":
            even = [total // R + (r < total % R) for r in range(R)]
            return even, even
        send, receive = torch.stack((counts_E.view(R, -1).sum(1), come_RL.sum(1))).tolist()
        return send, receive


def _shared_out(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    mine: Any = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(mine, requires_grad=weight.requires_grad)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _by_expert(come_RL: Tensor, total: int) -> Tensor:
    """The order that sorts rows, which came rank by rank and expert by expert, by expert."""
    R, L = come_RL.shape
    if come_RL.is_meta or type(come_RL).__name__ == "FakeTensor":
        return torch.arange(total, device=come_RL.device)
    expert_P = (
        torch.arange(L, device=come_RL.device)
        .repeat(R)
        .repeat_interleave(come_RL.flatten(), output_size=total)
    )
    return expert_P.argsort(stable=True)


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
