"""A mixture of experts that the ranks of a mesh axis divide: `Bank.divide`, before it is sharded."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .layers import Layer

EXPERTS, AXIS = 4, "ep"


class _Gather(torch.autograd.Function):
    """The rows of all ranks; the backward sums gradients of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return _Sum.apply(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over ranks of this rank's rows; the backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return _Gather.apply(grad, ctx.group), None


class Bank(nn.Module):
    """Experts in one tensor, all of them or, once divided, this rank's share."""

    mesh: DeviceMesh | None = None

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, width, width) / width)

    def divide(self, mesh: DeviceMesh) -> None:
        """Leave each rank of an axis its experts, of the rows of all of them."""
        self.mesh, whole = mesh, self.weight
        cut: Any = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        self.weight = nn.Parameter(cut, whole.requires_grad)

    def forward(self, x, gates):
        if self.mesh is None:
            return self._mixed(x, gates, self.weight)
        group = self.mesh.get_group()
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        first = self.mesh.get_local_rank() * len(weight)
        gates = _Gather.apply(gates, group)[..., first : first + len(weight)]
        return _Sum.apply(self._mixed(_Gather.apply(x, group), gates, weight), group)

    def _mixed(self, x, gates, weight):
        return torch.einsum("btd,edf,bte->btf", x, weight, gates)


class Routed(Layer):
    """Each token goes to all experts of a `Bank`, by weights of a router."""

    weight = 0.7

    def __init__(self, width: int):
        super().__init__()
        self.router, self.bank = nn.Linear(width, EXPERTS, bias=False), Bank(width)

    def inner(self, x):
        return torch.tanh(self.bank(x, self.router(x).softmax(-1)))


def is_divided(param: Any) -> bool:
    """Whether ranks of an axis have a parameter's experts."""
    return AXIS in (getattr(getattr(param, "device_mesh", None), "mesh_dim_names", None) or ())
