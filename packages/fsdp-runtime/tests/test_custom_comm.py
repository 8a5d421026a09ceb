"""Collectives of the user's own, and reductions in a process group of their own: the values stay the same."""

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import BF16, loss_of, same_bits, seeded, shard, tokens

from dbuffer.transport import collectives
from ragged_shard.testing import on_ranks


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


def two_dtypes():
    model = seeded()
    model.blocks[1].bias.data = model.blocks[1].bias.data.double()
    model.blocks[1].forward = lambda x: x @ model.blocks[1].weight + model.blocks[1].bias.to(x)
    return model


@on_ranks(3)
def test_own_collectives_give_the_same_bits_in_the_dtypes_of_the_policy_and_several_as_bytes():
    """The gradients of two steps, of which the second adds to the first's."""
    for make, options, gathered, reduced in (
        (seeded, {"mp_policy": BF16}, torch.bfloat16, {torch.float32}),
        (two_dtypes, {}, torch.uint8, {torch.float32, torch.float64}),
    ):
        found, gather, reduction = [], OwnGather(), OwnReduction()
        for own in (False, True):
            model = shard(make(), **options)
            if own:
                model.blocks[1].set_custom_all_gather(gather)
                model.blocks[1].set_custom_reduce_scatter(reduction)
                model.set_separate_reduce_scatter_group()
            for step in range(2):
                loss_of(model, tokens(step)).backward()
            found.append([p.grad.to_local() for p in model.parameters()])
        assert same_bits(*found)
        assert gather.dtypes == [gathered] * 4  # forward and backward of each step
        assert set(reduction.dtypes) == reduced


class Short(OwnGather):
    def allocate(self, size, *, dtype, device):
        return torch.empty(1, dtype=dtype)


@on_ranks(2)
def test_what_does_not_keep_to_the_protocol_is_refused():
    model = shard(seeded())
    model.blocks[0].set_custom_all_gather(Short())
    with pytest.raises(RuntimeError, match=r"Short.allocate gave 1 elements of torch.float32; expected \d+"):
        model(tokens())
    with pytest.raises(TypeError, match=r"set_custom_all_gather got .*; expected an object with alloc"):
        model.set_custom_all_gather(dist.all_gather_into_tensor)
