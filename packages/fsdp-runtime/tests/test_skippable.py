"""Units and parameters that some ranks skip: what they cost, and what is refused. Programs compare their gradients."""

import os
import signal
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import fully_shard
from ragged_shard.testing import RankError, on_ranks, rank_mesh, record_collectives, run_ranks

WIDTH, BRANCHES = 7, 4


class Layer(nn.Module):
    """Branches of which each batch chooses some."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))

    def forward(self, x, chosen):
        return self.always(x) + sum(self.branches[i](x).tanh() for i in chosen)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x, chosen):
        return self.second(self.first(x, chosen), chosen)


def backward(model, chosen):
    model(torch.ones(2, WIDTH), chosen).sum().backward()


def sharded(**options) -> Any:
    torch.manual_seed(0)
    model = Model()
    fully_shard(model.first, **options)
    return fully_shard(model, **options)


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
        backward(model, chosen)
        with mock.patch.object(found, "wait_on_host", wraps=found.wait_on_host) as wait:
            backward(model, chosen)
        assert wait.call_count == waits


@on_ranks(2)
def test_a_skippable_unit_costs_no_collectives_of_its_own():
    def counted(skippable):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[1], skippable=skippable)
        fully_shard(model)
        for _ in range(4):
            with record_collectives() as record:
                model(torch.ones(2, 4)).sum().backward()
        return sorted((event.kind, event.bytes_sent) for event in record.events)

    assert counted(True) == counted(False)


@on_ranks(2)
def test_a_skippable_unit_outside_its_model_is_refused_before_it_communicates():
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    fully_shard(model[1][0])
    fully_shard(model[1], skippable=True)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"1 is skippable: every rank gathers it with Sequential.*unshard\(\)"
        ):
            model[1](torch.ones(2, 4))
    dist.barrier()
    model[1].unshard()
    model[1][0].unshard()
    if dist.get_rank() == 0:
        with record_collectives() as record:
            model[1](torch.ones(2, 4))
        assert record.kinds == []


def undeclared(folder, transport):
    """Rank 1 skips a unit in its third step; each rank notes its error and ends, as a script does."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=5)), "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh, transport=transport)
    fully_shard(model, mesh=mesh, transport=transport)
    try:
        for step in range(3):
            x = torch.ones(2, 8)
            if step == 2 and dist.get_rank():
                model[1].forward = lambda x: x  # as a model that calls its layer under a condition
                model[1]._forward_pre_hooks.clear()
                model[1]._forward_hooks.clear()
            model(x).sum().backward()
    except RuntimeError as error:
        (folder / str(dist.get_rank())).write_text(str(error))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("transport", [pytest.param("collectives", marks=pytest.mark.long), "peer_memory"])
def test_a_unit_that_a_rank_skips_undeclared_is_an_error_on_both_ranks(tmp_path, transport):
    with pytest.raises(RankError):
        run_ranks(2, undeclared, tmp_path, transport)
    waits, departs = ((tmp_path / str(rank)).read_text() for rank in (0, 1))
    for text in (waits, departs):
        assert "the ranks do not agree on the order of collectives" in text
        assert "all_gather of 1" in text
        assert "skippable=True" in text
