"""Gathers ahead follow the recorded order, as deep as asked, and fall back when the order changes."""

import torch
from runtime_helpers import Watch, loss_of, seeded, shard, tokens
from torch import nn

from fsdp_runtime._params.unit import UnitState
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import run_ranks


def gathered(block):
    """Whether all parameters of a block are gathered or on their way."""
    return member_of(block).unit.state in (UnitState.UNSHARDED, UnitState.GATHERING)


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


def depths():
    model = shard(seeded(blocks=4))
    with torch.no_grad():
        first, second = ahead(model), ahead(model)
        model.set_prefetch_depth(2)
        deeper = ahead(model)
        model.set_prefetch_depth(0)
        none = ahead(model)
    return first, second, deeper, none


def test_the_first_pass_gathers_on_demand_and_later_ones_as_deep_as_asked():
    first, second, deeper, none = run_ranks(2, depths)[0]
    on_demand = [[0], [1], [2], [3]]
    assert first == none == on_demand
    assert second == [[0, 1], [1, 2], [2, 3], [3]]
    assert deeper == [[0, 1, 2], [1, 2, 3], [2, 3], [3]]


def changes():
    model = shard(seeded(blocks=4))
    with torch.no_grad():
        ahead(model)
        backwards = ahead(model, order=[3, 2, 1, 0])
        again = ahead(model, order=[3, 2, 1, 0])
        shorter = ahead(model, order=[3, 1])
        left = [gathered(block) for block in model.blocks]
    return backwards, again, shorter, left


def test_another_order_is_gathered_on_demand_and_known_the_next_time():
    backwards, again, shorter, left = run_ranks(2, changes)[0]
    assert [set(seen) & {i} for i, seen in zip([3, 2, 1, 0], backwards, strict=True)] == [{3}, {2}, {1}, {0}]
    assert again == [[2, 3], [1, 2], [0, 1], [0]]
    assert shorter[0] == [2, 3]
    assert not any(left)  # what was gathered in vain is freed


class Block(nn.Linear):
    def forward(self, x):
        return super().forward(Watch.apply(x, self.look)) * 1


def in_backward():
    model = seeded(blocks=3)
    model.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
    seen = []
    for index, block in enumerate(model.blocks):
        block.look = lambda index=index: seen.append(
            (index, [i for i, other in enumerate(model.blocks) if gathered(other)])
        )
    shard(model)
    for _ in range(2):
        seen.clear()
        loss_of(model, tokens()).backward()
    return seen


def test_backward_gathers_the_unit_before():
    assert run_ranks(2, in_backward)[0] == [(2, [1, 2]), (1, [0, 1]), (0, [0])]
