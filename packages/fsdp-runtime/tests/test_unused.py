"""Parameters that only some ranks use: `.grad` is None on every rank if no rank used one, else set on every rank."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import device
from torch import nn

from fsdp_runtime import fully_shard
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

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


def backward(model, chosen, step=0):
    model(inputs(step, dist.get_rank()), chosen).square().mean().backward()


@on_ranks(3)
def test_ranks_that_use_different_parameters_send_the_same_collectives():
    model = sharded()
    for _ in range(3):  # the order of collectives becomes known
        backward(model, range(BRANCHES))
    records = []
    for chosen in (range(BRANCHES), (dist.get_rank(),), ()):
        with record_collectives() as record:
            backward(model, chosen)
        records.append(record.events)
    assert records[0]
    assert records[1] == records[2] == records[0]


@pytest.mark.parametrize(("chosen", "waits"), [(range(BRANCHES), 0), ((0,), 1)])
def test_the_host_waits_once_and_only_where_it_misses_something(chosen, waits):
    with device() as found:
        model = sharded(mesh=rank_mesh(4))
        model(torch.ones(2, WIDTH), chosen).sum().backward()
        with mock.patch.object(found, "wait_on_host", wraps=found.wait_on_host) as wait:
            model(torch.ones(2, WIDTH), chosen).sum().backward()
        assert wait.call_count == waits
