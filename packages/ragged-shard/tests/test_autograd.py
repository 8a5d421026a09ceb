"""Gradients through to_local, from_local, redistribute and full_tensor, against plain autograd."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import RaggedDTensor, RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

RAGGED = RaggedShard((0,), (1, 2, 3))
FULL = torch.arange(24.0).view(6, 4)
WEIGHTS = (torch.arange(24.0).view(6, 4) % 5) - 2


def leaf(placements=(RAGGED,), mesh_shape=(3,)):
    mesh = rank_mesh(*mesh_shape)
    return distribute_tensor(FULL.clone().requires_grad_(), mesh, placements)


@on_ranks(3)
def test_backward_of_a_gather_is_local_and_of_summands_a_reduce_scatter():
    tensor = leaf()
    full = tensor.full_tensor()
    with record_collectives() as record:
        full.backward(WEIGHTS)
    assert record.kinds == []
    assert torch.equal(tensor.grad.full_tensor(), WEIGHTS)
    tensor.grad = None
    full = tensor.full_tensor(grad_placements=[Partial()])
    with record_collectives() as record:
        full.backward(WEIGHTS * (dist.get_rank() + 1))
    assert record.kinds == ["all_to_all"]
    assert record.bytes_sent == (24 - tensor.to_local().numel()) * 4
    assert torch.equal(tensor.grad.full_tensor(), WEIGHTS * 6)


@on_ranks(3)
def test_to_local_and_from_local_pass_gradients_on():
    tensor = leaf()
    local = tensor.to_local()
    assert local.requires_grad
    (local * local).sum().backward()
    assert torch.equal(tensor.grad.full_tensor(), 2 * FULL)
    plain = torch.ones(dist.get_rank() + 1, 4, requires_grad=True)
    wrapped = RaggedDTensor.from_local(plain * 3, tensor.device_mesh, tensor.placements, shape=(6, 4))
    (wrapped.full_tensor() * WEIGHTS).sum().backward()
    first, last = RAGGED.unit_range(dist.get_rank())
    assert plain.grad is not None
    assert torch.equal(plain.grad, WEIGHTS[first:last] * 3)


@on_ranks(3)
def test_any_chain_of_redistributions_passes_the_same_gradient():
    targets = [RaggedShard((0,), (3, 2, 1)), RaggedShard((0, 1), (1, 0, 11)), Replicate(), Shard(0), Shard(1)]
    for first, second in itertools.product(targets, repeat=2):
        tensor = leaf()
        moved = (tensor * 2).redistribute(placements=[first]).redistribute(placements=[second])
        (moved.full_tensor() * WEIGHTS).sum().backward()
        assert tensor.grad.placements == tensor.placements
        assert torch.equal(tensor.grad.full_tensor(), 2 * WEIGHTS), (first, second)


@pytest.mark.parametrize("op", ["sum", "avg"])
@on_ranks(3)
def test_each_summand_gets_the_derivative_by_itself(op):
    mesh = rank_mesh(3)
    mine = (FULL * (dist.get_rank() + 1)).requires_grad_()
    pending = RaggedDTensor.from_local(mine, mesh, [Partial(op)], shape=(6, 4))
    settled = pending.redistribute(placements=[RAGGED])
    assert torch.equal(settled.full_tensor(), FULL * (6 if op == "sum" else 2))
    (settled.full_tensor() * WEIGHTS).sum().backward()
    wanted = WEIGHTS if op == "sum" else WEIGHTS / 3
    torch.testing.assert_close(mine.grad, wanted)


@on_ranks(4)
def test_gradients_on_2d_meshes_are_those_of_the_unsharded_tensor():
    for placements in (
        (Replicate(), RaggedShard((0,), (1, 2))),
        (RaggedShard((0,), (1, 2)), Shard(1)),
        (RaggedShard((0,), (2, 1)), Replicate()),
        (StridedRaggedShard((0,), (1, 2), 2), Shard(0)),
        (Shard(1), RaggedShard((0,), (1, 5))),
    ):
        tensor = leaf(placements, (2, 2))
        assert torch.equal(tensor.full_tensor(), FULL)
        (tensor.full_tensor() * WEIGHTS).sum().backward()
        assert tensor.grad.placements == placements
        assert torch.equal(tensor.grad.full_tensor(), WEIGHTS), placements


@on_ranks(3)
def test_pointwise_graphs_with_a_sum_at_the_end_differentiate():
    tensor = leaf()
    reference = FULL.clone().requires_grad_()
    for x in (tensor, reference):
        y = (x * 2 + 1).sigmoid() * x.relu() - x / 7
        (y * y).sum().backward()
    gradient = tensor.grad
    got = gradient.full_tensor()
    torch.testing.assert_close(got, reference.grad)


def rewrapped(x, local, placements):
    return RaggedDTensor.from_local(local, x.device_mesh, placements, shape=x.shape)


SECOND = {
    "pointwise": lambda x: x,
    "full_tensor": lambda x: x.full_tensor(),
    "summands": lambda x: x.full_tensor(grad_placements=[Partial()]),
    "to_local": lambda x: x.to_local(),
    "ragged": lambda x: x.redistribute(placements=[RaggedShard((0, 1), (9, 0, 15))]),
    "shard": lambda x: x.redistribute(placements=[Shard(1)]),
    "from_local": lambda x: rewrapped(x, x.to_local() * 1, x.placements),
    "elsewhere": lambda x: rewrapped(x, x.to_local() * 1, x.placements).redistribute(
        placements=[Replicate()]
    ),
    "average": lambda x: rewrapped(
        x, x.full_tensor(grad_placements=[Partial()]), [Partial("avg")]
    ).redistribute(placements=[RAGGED]),
}


if not SUBCLASSES_DTENSOR:  # torch < 2.12: redistribute to its own Shard has no second derivative
    del SECOND["shard"]


@pytest.mark.parametrize("name", SECOND)
@on_ranks(3)
def test_second_and_third_derivatives_are_those_of_the_unsharded_tensor(name):
    plain = ((FULL + 1) / 10).requires_grad_()
    tensor = distribute_tensor(plain.detach(), rank_mesh(3), [RAGGED]).requires_grad_()

    def derivatives(x, way, share=1.0):
        (first,) = torch.autograd.grad((way(x) ** 3).sum() * share, x, create_graph=True)
        (second,) = torch.autograd.grad((way(first) ** 2).sum() * share, x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        return first, second, third

    share = 1 / 3 if name == "summands" else 1.0  # each rank has a third of the loss
    for got, wanted in zip(
        derivatives(tensor, SECOND[name], share), derivatives(plain, lambda x: x), strict=True
    ):
        assert got.placements == tensor.placements
        torch.testing.assert_close(got.full_tensor(), wanted.detach())
