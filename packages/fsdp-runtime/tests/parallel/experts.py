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

    Layers are `MixtureOfExperts`, and the experts of transformers' models that are stacked as Qwen3-MoE's: a module
    with `act_fn` and the parameters `gate_up_proj` (E, 2 F, D) and `down_proj` (E, D, F) alone.

    Every rank must hold the same values, on any device or meta; nothing is communicated. Afterwards the experts'
    weights are DTensors under the same names, cut over their first dimension: E / R experts on each rank. A layer's
    forward issues three all-to-alls over the axis (int64 counts, 8 E bytes; the pairs' rows, there and back), its
    backward two. Call it before `fully_shard`.

    Returns:
        the experts' parameters, to choose their mesh by.

    Raises:
        ValueError: the mesh has several axes, the model no such layer, or a layer's experts do not divide by R.
    """
    if ep_mesh.ndim != 1:
        raise ValueError(
            f"ep_mesh has {ep_mesh.ndim} axes {ep_mesh.mesh_dim_names}; pass one, such as mesh['ep']"
        )
    layers = [
        (parent, name, f"{path}.{name}" if path else name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is MixtureOfExperts or _is_stacked(child)
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer of experts that can be shared out")
    ranks = ep_mesh.size()
    for _, _, path, layer in layers:
        if _num_experts(layer) % ranks:
            raise ValueError(
                f"{path} has {_num_experts(layer)} experts, which {ranks} ranks of expert parallelism do not divide; "
                "choose a divisor"
            )
    params: set[nn.Parameter] = set()
    for parent, name, _, layer in layers:
        kind: Any = (
            ParallelMixtureOfExperts if isinstance(layer, MixtureOfExperts) else ParallelStackedExperts
        )
        parallel = kind(layer, ep_mesh)
        setattr(parent, name, parallel)
        params.update(parallel.experts())
    return params


def _num_experts(layer: nn.Module) -> int:
    return layer.num_experts if isinstance(layer, MixtureOfExperts) else len(layer.gate_up_proj)  # type: ignore[arg-type]


def _is_stacked(module: nn.Module) -> bool:
    """True for experts of transformers that are stacked as Qwen3-MoE's."""
    params = dict(module.named_parameters())
    if params.keys() != {"gate_up_proj", "down_proj"}:
        return False
    gate_up, down = params["gate_up_proj"], params["down_proj"]
    stacked = (len(down), 2 * down.shape[-1], down.shape[-2])
    return gate_up.shape == stacked and callable(getattr(module, "act_fn", None))


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


class ParallelStackedExperts(nn.Module):
    """`ParallelMixtureOfExperts` for experts of transformers, whose router is outside."""

    def __init__(self, layer: Any, mesh: DeviceMesh) -> None:
        super().__init__()
        self.train(layer.training)
        self.num_experts, self.act_fn = _num_experts(layer), layer.act_fn
        self.gate_up_proj = _shared_out(layer.gate_up_proj, mesh)
        self.down_proj = _shared_out(layer.down_proj, mesh)
        self._group = mesh.get_group()

    def experts(self) -> list[nn.Parameter]:
        """The experts' parameters."""
        return [self.gate_up_proj, self.down_proj]

    def forward(self, x_ND: Tensor, chosen_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
        """(N, D) in and out; each row through its k experts, times their weights."""
        gate_LFD, up_LFD = _local(self.gate_up_proj).chunk(2, dim=1)
        down_LDF = _local(self.down_proj)
        order_S = chosen_Nk.flatten().argsort(stable=True)
        token_S = order_S // chosen_Nk.shape[-1]
        counts_E = order_S.new_zeros(self.num_experts)
        counts_E = counts_E.scatter_add(0, chosen_Nk.flatten(), torch.ones_like(order_S))
        y_SD = through_experts(
            x_ND[token_S],
            counts_E,
            self._group,
            lambda x, counts: self._computed(x, counts, gate_LFD, up_LFD, down_LDF),
        )
        y_SD = y_SD * weight_Nk.flatten()[order_S, None].to(y_SD.dtype)
        return torch.zeros_like(x_ND).index_add(0, token_S, y_SD)

    def _computed(self, x_PD: Tensor, counts_L: Tensor, *weights_LXX: Tensor) -> Tensor:
        parts = zip(x_PD.split(counts_L.tolist()), *(weight.unbind() for weight in weights_LXX), strict=True)
        return torch.cat([self.act_fn(x @ g.t()) * (x @ u.t()) @ d.t() for x, g, u, d in parts])


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
    send, receive, order_P = _routes(counts_E.view(R, -1), come_RL, len(x_SD))
    x_PD = _AllToAll.apply(x_SD, send, receive, group)
    y_PD = compute(x_PD[order_P], come_RL.sum(0))
    y_PD = torch.empty_like(y_PD).index_copy(0, order_P, y_PD)
    y_SD: Tensor = _AllToAll.apply(y_PD, receive, send, group)
    return y_SD


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _routes(go_RL: Tensor, come_RL: Tensor, total: int) -> tuple[list[int], list[int], Tensor]:
    """Numbers of rows to send to and receive from each rank, and the order that sorts received rows by expert.

    Without values (meta) as many from each rank, in their order.
    """
    R, L = come_RL.shape
    if go_RL.is_meta or type(go_RL).__name__ == "FakeTensor":
        even = [total // R + (r < total % R) for r in range(R)]
        return even, even, torch.arange(total, device=go_RL.device)
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
