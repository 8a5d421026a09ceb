"""Units that some ranks skip: what they cost, and what is refused. Programs compare their gradients."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import FSDPModule, fully_shard
from ragged_shard.testing import RankError, on_ranks, record_collectives, run_ranks

WIDTH = 7


def inputs(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, parts):
        x = self.first(x)
        for i, expert in enumerate(self.experts):
            if f"experts.{i}" in parts:
                x = x + expert(x).tanh()
        return x


class Model(nn.Module):
    """A tower for some inputs, and blocks in which some experts have no token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.tower = Tower()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, parts):
        h = self.embed(x)
        if "tower" in parts:
            h = h + self.tower(x)
        for block in self.blocks:
            h = block(h, parts)
        return self.head(h)


def sharded(model, **options):
    for layer in model.tower.layers:
        fully_shard(layer, **options)
    fully_shard(model.tower, skippable=True, **options)
    for block in model.blocks:
        for expert in block.experts:
            fully_shard(expert, skippable=True, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def made():
    torch.manual_seed(0)
    return Model()


@on_ranks(2)
def test_a_step_costs_one_small_all_reduce_for_each_unit_around():
    def counted(skippable):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[1], skippable=skippable)
        fully_shard(model)
        for _ in range(2):
            with record_collectives() as record:
                model(torch.ones(2, 4)).sum().backward()
        return sorted(record.kinds), sum(e.bytes_sent for e in record.events if e.kind == "all_reduce")

    plain, declared = counted(False), counted(True)
    assert declared[0] == sorted([*plain[0], "all_reduce"])
    assert declared[1] - plain[1] <= 2 * 2  # a byte for weight and bias


@on_ranks(2)
def test_a_skippable_unit_outside_its_model_is_refused_before_it_communicates():
    model = sharded(made())
    model(inputs(0, 0), ()).sum().backward()
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"tower is skippable: every rank gathers it with Model.*unshard\(\)"
        ):
            model.tower(inputs(0, 0))
    dist.barrier()
    model.tower.unshard()
    for layer in model.tower.layers:
        assert isinstance(layer, FSDPModule)
        layer.unshard()
    if dist.get_rank() == 0:
        with record_collectives() as record:
            model.tower(inputs(0, 0))
        assert record.kinds == []


def undeclared(folder, transport):
    """Rank 1 skips a unit in its second step; each rank notes its error and ends, as a script does."""
    from dbuffer import _patient_calls

    _patient_calls._DOUBT = 0.5
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    mesh = DeviceMesh.from_group(
        dist.new_group(), "cpu"
    )  # after a failed pass, waiting ranks of a group do not ask
    for layer in model:
        fully_shard(layer, mesh=mesh, transport=transport)
    fully_shard(model, mesh=mesh, transport=transport)
    try:
        for step in range(2):
            x = torch.ones(2, 8)
            if step and dist.get_rank():
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
    for rank in (0, 1):
        text = (tmp_path / str(rank)).read_text()
        assert "the ranks do not agree on the order of collectives" in text
        assert "all_gather of 1" in text
        assert "skippable=True" in text
