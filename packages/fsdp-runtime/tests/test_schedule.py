"""The order of units and collectives, and which gathers run ahead by it."""

import pytest
import torch
from runtime_helpers import Body, Watch, loss_of, seeded, shard, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime._grads.buffer import Full
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks


def gathered(block):
    """Whether all parameters of a block are gathered or on their way."""
    return member_of(block).unit.full is not Full.EMPTY


def ahead(model, **options):
    """For each block, as its forward begins: which blocks have been gathered, or are on their way."""
    seen = []

    def look(index):
        def hook(module, args):
            seen.append([i for i, block in enumerate(model.blocks) if gathered(block)])

        return hook

    handles = [block.register_forward_pre_hook(look(i)) for i, block in enumerate(model.blocks)]
    model(tokens(), **options)
    for handle in handles:
        handle.remove()
    return seen


@on_ranks(2)
def test_the_first_pass_in_an_order_gathers_on_demand_later_ones_ahead():
    model, on_demand = shard(seeded(blocks=4)), [[0], [1], [2], [3]]
    with torch.no_grad():
        assert ahead(model) == on_demand
        assert ahead(model) == [[0, 1], [1, 2], [2, 3], [3]]
        model.set_prefetch_depth(2)
        assert ahead(model) == [[0, 1, 2], [1, 2, 3], [2, 3], [3]]
        model.set_prefetch_depth(0)
        assert ahead(model) == on_demand
        model, order = shard(seeded(blocks=4)), [3, 2, 1, 0]
        ahead(model)
        assert all(index in seen for index, seen in zip(order, ahead(model, order=order), strict=True))
        assert ahead(model, order=order) == [[2, 3], [1, 2], [0, 1], [0]]
        assert ahead(model, order=[3, 1]) == [[2, 3], [0, 1, 2]]  # a unit that is skipped is passed over
        ahead(model, order=[0, 1, 0, 2])
        assert ahead(model, order=[0, 1, 0, 2]) == [[0, 1], [0, 1], [0, 2], [2]]  # one that runs twice
        assert not any(gathered(block) for block in model.blocks)  # what was gathered in vain is freed


class Block(nn.Linear):
    def forward(self, x):
        return super().forward(Watch.apply(x, self.look)) * 1


class Recomputed(Body):
    def forward(self, tokens, order=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_backward_gathers_the_unit_before(reentrant):
    model = seeded(Recomputed if reentrant else Body, blocks=3)
    model.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
    seen = []
    for index, block in enumerate(model.blocks):
        block.look = lambda index=index: seen.append(
            (index, [i for i, other in enumerate(model.blocks) if gathered(other)])
        )
    shard(model)
    for _ in range(3):
        seen.clear()
        loss_of(model, tokens()).backward()
    assert seen == [(2, [1, 2]), (1, [0, 1]), (0, [0])]
