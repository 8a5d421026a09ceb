"""Units that some ranks skip: no hang, and the gradients of one process that ran every rank's part."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from partial_steps import WIDTH, alone, check, inputs, mean_backward, trained
from runtime_helpers import assert_same_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_runtime import FSDPModule, fully_shard
from ragged_shard.testing import RankError, on_ranks, rank_mesh, record_collectives, run_ranks

PARTS = ("tower", "experts.0", "experts.1")


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
                if "twice" in parts:
                    x = x + expert(x).tanh()
        return x


class Model(nn.Module):
    """A tower for some inputs, and blocks in which some experts have no token."""

    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.tower = Tower()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, parts):
        h = self.embed(x)
        if "tower" in parts:
            h = h + self.tower(x)
        for block in self.blocks:
            h = checkpoint(block, h, parts, use_reentrant=False) if self.recompute else block(h, parts)
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


def made(**options):
    torch.manual_seed(0)
    return Model(**options)


# What each rank runs, step by step; the same on one process for all ranks in turn.
STEPS: list[list[tuple[str, ...]]] = [
    [("tower", "experts.0"), ("experts.0", "experts.1"), ()],
    [(), ("tower", "experts.1", "twice"), ("tower",)],
    [("experts.0",), ("experts.0", "twice"), ()],
    [(), (), ()],
    [PARTS, PARTS, PARTS],
]


def run(steps, ends, *, recompute=False, mesh_shape=None, **options):
    if mesh_shape:
        options["mesh"] = rank_mesh(*mesh_shape, names=("replicate", "shard"))
    model: Any = sharded(made(recompute=recompute), **options)
    return trained(model, steps, ends, model.set_requires_gradient_sync)


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "collectives": {"transport": "collectives"},
    "recomputed blocks": {"recompute": True},
    "accumulated": {},
    "kept after forward": {"reshard_after_forward": False},
    "HSDP": {"mesh_shape": (2, 2)},
}


@pytest.mark.parametrize(
    ("case", "world"),
    [
        *((case, 4 if "mesh_shape" in CASES[case] else 3) for case in CASES),
        *(pytest.param("defaults", world, marks=pytest.mark.long) for world in (2, 4)),
    ],
)
def test_gradients_are_those_of_one_process_and_none_where_no_rank_used_a_parameter(case, world):
    steps = [[*parts, ("tower",)][:world] for parts in STEPS]
    ends = (1, 3, 4) if case == "accumulated" else range(len(STEPS))
    check(run_ranks(world, run, steps, ends, **CASES[case]), alone(made(), steps, ends, world))


@on_ranks(3)
def test_an_evaluation_and_mixed_precision_of_which_some_ranks_skip_parts_follow():
    model, parts = sharded(made()), STEPS[0][dist.get_rank()]
    with torch.no_grad():
        first = model(inputs(0, 0), parts)
        second = model(inputs(0, 0), parts)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, made()(inputs(0, 0), parts))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(made(), mp_policy=policy)
    model(inputs(0, 0), parts).sum().backward()
    assert model.tower.layers[0].weight.grad is not None
    assert model.tower.unused.grad is None


@on_ranks(2)
def test_freezing_what_only_some_ranks_run_next_follows_on_all():
    model, reference = sharded(made()), made()
    for number, (frozen, users) in enumerate(((False, (0, 1)), (True, (0,)), (False, (1,)), (False, (0, 1)))):
        for each in (model, reference):
            each.tower.layers.requires_grad_(not frozen)
            each.zero_grad()
        parts = [("tower", "experts.0") if rank in users else ("experts.1",) for rank in range(2)]
        model(inputs(number, dist.get_rank()), parts[dist.get_rank()]).square().mean().backward()
        mean_backward(reference, number, parts)
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_two_forwards_in_a_backward_reduce_the_same_on_all_ranks():
    model, reference, rank = sharded(made()), made(), dist.get_rank()
    model.set_reduce_scatter_max_input_buffers(100)
    forwards: list[tuple[tuple[str, ...], ...]] = [((), ()), (("tower", "experts.0"), ("tower",))]

    def loss(model, rank):
        return sum(model(inputs(n, rank), parts[rank]).square().mean() for n, parts in enumerate(forwards))

    loss(model, rank).backward()
    for each in (0, 1):
        (loss(reference, each) / 2).backward()
    assert_same_gradients(model, reference)


@on_ranks(4)
def test_after_a_failed_backward_skipping_ranks_agree_with_the_others():
    model, reference, rank = made(), made(), dist.get_rank()
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))
    for block in model.blocks:
        for expert in block.experts:
            fully_shard(expert, mesh=mesh, skippable=True, reshard_after_forward=False)
    fully_shard(model)
    hook: Any = model.head.register_full_backward_hook(lambda *gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs(0, rank), PARTS).sum().backward()
    hook.remove()
    model.zero_grad()
    for step in range(3):
        parts: list[tuple[str, ...]] = [PARTS if each == 2 else ("tower",) for each in range(4)]
        model(inputs(step, rank), parts[rank]).square().mean().backward()
        mean_backward(reference, step, parts)
    assert_same_gradients(model, reference)


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
