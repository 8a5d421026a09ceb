"""Collectives of the user's own, and reductions in a process group of their own: the values stay the same."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import BF16, loss_of, same_bits, seeded, shard, tokens

from dbuffer.transport import collectives
from ragged_shard.testing import on_ranks, rank_mesh


class Comm:
    """FSDP2's protocol; notes the dtypes that it is called with."""

    def __init__(self):
        self.dtypes = []

    def allocate(self, size, *, dtype, device):
        return torch.full(size, 7, dtype=dtype, device=device)


class OwnGather(Comm):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.dtypes.append(input_tensor.dtype)
        # A work, although it was asked not to.
        return collectives.compat.all_gather(output_tensor, input_tensor, group=group, async_op=True)


class OwnReduction(Comm):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.dtypes.append(input_tensor.dtype)
        collectives.compat.reduce_scatter(output_tensor, input_tensor, op=op, group=group)


def two_steps(prepare, **options):
    """Losses and local gradients of two steps, the second accumulating into the first."""
    torch.manual_seed(0)
    model = shard(seeded(), **options)
    prepare(model)
    losses = []
    for step in range(2):
        loss = loss_of(model, tokens(step))
        loss.backward()
        losses.append(loss.detach())
    return model, losses + [p.grad.to_local() for p in model.parameters()]


@on_ranks(3)
def test_own_collectives_give_the_same_bits_in_the_dtypes_of_the_policy():
    gather, reduction = OwnGather(), OwnReduction()

    def prepare(model):
        model.blocks[1].set_custom_all_gather(gather)
        model.blocks[1].set_custom_reduce_scatter(reduction)
        model.set_separate_reduce_scatter_group()

    _, expected = two_steps(lambda _: None, mp_policy=BF16)
    assert same_bits(two_steps(prepare, mp_policy=BF16)[1], expected)
    assert gather.dtypes == [torch.bfloat16] * 4  # forward and backward of each step
    assert reduction.dtypes == [torch.float32] * 2


@on_ranks(2)
def test_a_unit_of_several_dtypes_gathers_bytes_in_one_call():
    gather, reduction = OwnGather(), OwnReduction()

    def model():
        made = seeded()
        made.blocks[1].bias.data = made.blocks[1].bias.data.double()
        made.blocks[1].forward = lambda x: x @ made.blocks[1].weight + made.blocks[1].bias.to(x)
        return shard(made)

    found = []
    for own in (False, True):
        made = model()
        if own:
            made.blocks[1].set_custom_all_gather(gather)
            made.blocks[1].set_custom_reduce_scatter(reduction)
        loss_of(made, tokens()).backward()
        found.append([p.grad.to_local() for p in made.parameters()])
    assert same_bits(*found)
    assert gather.dtypes == [torch.uint8] * 2
    assert set(reduction.dtypes) == {torch.float32, torch.float64}


class Short(OwnGather):
    def allocate(self, size, *, dtype, device):
        return torch.empty(1, dtype=dtype)


@on_ranks(2)
def test_what_does_not_keep_to_the_protocol_is_refused():
    with pytest.raises(RuntimeError, match=r"Short.allocate gave 1 elements of torch.float32; expected \d+"):
        two_steps(lambda model: model.blocks[0].set_custom_all_gather(Short()))
    with pytest.raises(TypeError, match=r"set_custom_all_gather got .*; expected an object with alloc"):
        two_steps(lambda model: model.set_custom_all_gather(dist.all_gather_into_tensor))


@on_ranks(4)
def test_reductions_go_through_a_group_of_their_own_while_it_is_asked_for():
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))
    seen, usual = [], collectives.compat.reduce_scatter

    def noted(receive, send, *, group, **options):
        seen.append(group)
        return usual(receive, send, group=group, **options)

    with mock.patch.object(collectives.compat, "reduce_scatter", noted):
        model, expected = two_steps(lambda _: None, mesh=mesh)
        shards = mesh.get_group(mesh.ndim - 1)
        assert set(seen) == {shards}
        seen.clear()
        model, found = two_steps(lambda model: model.set_separate_reduce_scatter_group(), mesh=mesh)
        assert same_bits(found, expected)
        (own,) = set(seen)
        assert own is not shards
        assert dist.get_process_group_ranks(own) == dist.get_process_group_ranks(shards)
        seen.clear()
        model.set_separate_reduce_scatter_group(False)
        model.blocks[0].set_separate_reduce_scatter_group()
        loss_of(model, tokens()).backward()
        assert set(seen) == {shards, own}
