"""Parameters that only some ranks use: `.grad` is None on every rank if no rank used one, else set on every rank."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import device
from torch import nn

from fsdp_runtime import fully_shard
from fsdp_runtime._grads import missing
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

WIDTH = 7


def inputs(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


BRANCHES = 4


class Layer(nn.Module):
    """Branches of which each batch chooses some; a bias of one element leaves most ranks without any of it."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.scalars = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(BRANCHES))

    def forward(self, x, chosen):
        h = self.always(x)
        for i in chosen:
            h = h + self.scalars[i] * self.branches[i](x).tanh()
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, chosen):
        for layer in self.layers:
            x = layer(x, chosen)
        return self.head(x)


def made():
    torch.manual_seed(0)
    return Model()


def sharded(**options) -> Any:
    model = made()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# Branches that each rank uses, step by step: by one rank, by none, by all but one, by all.
STEPS: list[list[tuple[int, ...]]] = [
    [(0,), (), (1,), ()],
    [(0,), (0, 1), (0, 1, 2), (2,)],
    [(), (), (), ()],
    [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1)],
    [(3,), (3,), (3,), (3,)],
    [(0, 1, 2, 3), (0, 1, 2, 3), (2,), (0, 1, 2, 3)],
]


def backward(model, chosen, step=0):
    model(inputs(step, dist.get_rank()), chosen).square().mean().backward()


@on_ranks(3)
def test_ranks_that_use_different_parameters_send_the_same_collectives():
    model = sharded()
    backward(model, range(BRANCHES))
    records = []
    for chosen in (range(BRANCHES), (dist.get_rank(),), ()):
        with record_collectives() as record:
            backward(model, chosen)
        records.append(record.events)
    assert records[0]
    assert records[1] == records[2] == records[0]


def keys_of_store(mesh_shape=None):
    """Number of keys after each of 24 steps; with HSDP replicas are summed in every second one."""
    store = dist.group.WORLD.get_group_store()
    options = {"mesh": rank_mesh(*mesh_shape, names=("replicate", "shard"))} if mesh_shape else {}
    model, counts = sharded(**options), []
    for step in range(24):
        model.set_requires_all_reduce(step % 2 == 1)
        chosen = STEPS[step % len(STEPS)][dist.get_rank()]
        backward(model, chosen, step)
        model.zero_grad()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


@pytest.mark.parametrize(
    ("ranks", "mesh_shape"), [pytest.param(3, None, marks=pytest.mark.long), (4, (2, 2))]
)
def test_the_store_does_not_grow(ranks, mesh_shape):
    for counts in run_ranks(ranks, keys_of_store, mesh_shape):
        assert len(set(counts[8:])) == 1


@pytest.mark.parametrize(("chosen", "waits"), [(range(BRANCHES), 0), ((0,), 2)])
def test_the_host_waits_only_for_reductions_in_which_it_misses_something(chosen, waits):
    with device("late") as found:
        model = sharded(mesh=rank_mesh(4))
        model(torch.ones(2, WIDTH), chosen).sum().backward()
        with mock.patch.object(found, "wait_on_host", wraps=found.wait_on_host) as wait:
            model(torch.ones(2, WIDTH), chosen).sum().backward()
        assert wait.call_count == waits


@on_ranks(3)
def test_a_store_that_does_not_answer_is_an_error_that_names_the_parameters():
    model = sharded()
    with (
        mock.patch.object(missing.Ledger, "read", side_effect=RuntimeError("no answer")),
        pytest.raises(
            RuntimeError, match=r"scalars.3 of layers.1 got no gradient on .*: no answer.*_unused_params"
        ),
    ):
        backward(model, (0, 1, 2))
