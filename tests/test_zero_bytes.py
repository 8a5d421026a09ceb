"""Bytes of ZeRO's stages, options of one `fully_shard` (docs/guides/memory.md): counted, and by formula."""

import pytest
import torch
from bench.counts import nbytes_of
from bench.models import WORKLOADS, batch_of, build

from fsdp_runtime import fully_shard
from fsdp_runtime.train.model import losses_of
from ragged_shard.testing import simulated_ranks

RECIPES = {  # name: reshard_after_forward (None: ranks of a node), keeps parameters until they change, reduces once
    "ZeRO-1": (False, True, True),
    "ZeRO-2": (False, True, False),
    "ZeRO-3": (True, False, False),
    "ZeRO-3 with hpZ": (None, False, False),
}


def counted_bytes(name, workload, ranks, node, microbatches):
    """Bytes that a rank receives in a step: over all ranks, and inside its node."""
    reshard, keeps, reduces_once = RECIPES[name]
    with simulated_ranks(ranks) as world:
        model = build(workload.shape)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=node if reshard is None else reshard)
        fully_shard(model)
        model.set_reshard_after_backward(not keeps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            world.calls.clear()
            for number in range(microbatches):
                model.set_requires_gradient_sync(not reduces_once or number + 1 == microbatches)
                losses_of(model, *batch_of(workload, step, number))[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = world.calls[0][0]  # the first gather is over all ranks
        return (
            sum(received for group, received in world.calls if group == whole),
            sum(received for group, received in world.calls if group != whole),
        )


def formula(name, blocks, root, ranks, node, microbatches):
    """The same by formula, from the bytes of parameters in blocks and around them; gradients have as many."""
    reshard, keeps, reduces_once = RECIPES[name]
    times = 1 if keeps else microbatches
    gathers = times * (root + blocks * (2 if reshard else 1))
    reductions = (1 if reduces_once else microbatches) * (root + blocks)
    inside = times * blocks * (node - 1) / node if reshard is None else 0.0
    return (gathers + reductions) * (ranks - 1) / ranks, inside


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_zeros_stages_are_those_of_the_formula_and_padding(name):
    workload, sizes = WORKLOADS["tiny"], (8, 4, 3)
    model = build(workload.shape)
    total, blocks = nbytes_of(model.parameters()), nbytes_of(model.blocks.parameters())
    counted = counted_bytes(name, workload, *sizes)
    assert counted == pytest.approx(formula(name, blocks, total - blocks, *sizes), rel=0.02)
