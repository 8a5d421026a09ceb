"""The order of units and collectives."""

import random

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import loss_of, seeded, shard, tokens

from dbuffer import Handle
from fsdp_runtime import fully_shard
from fsdp_runtime._plan import group as _plan
from fsdp_runtime._schedule.model import member_of
from fsdp_runtime._schedule.passes import Schedule
from ragged_shard.testing import SimulatedDevice, rank_mesh, record_collectives, run_ranks, simulated_ranks


def run(schedule, order, expected=None):
    """Go through a pass; what was upcoming as each entered."""
    schedule.begin(expected)
    upcoming = []
    for unit in order:
        schedule.enter(unit)
        upcoming.append("".join(schedule.upcoming()))
    schedule.end()
    return upcoming


def test_nothing_is_expected_in_a_first_pass():
    assert run(Schedule(), "ABC") == ["", "", ""]


def test_a_second_pass_expects_the_order_of_the_first():
    schedule = Schedule[str]()
    run(schedule, "ABC")
    assert run(schedule, "ABC") == ["BC", "C", ""]


@pytest.mark.parametrize("order", ["ABAC", "AAB"])
def test_a_unit_that_runs_twice_is_expected_twice(order):
    schedule = Schedule[str]()
    run(schedule, order)
    assert run(schedule, order) == [order[i + 1 :] for i in range(len(order))]


def test_a_skipped_unit_is_passed_over():
    schedule = Schedule[str]()
    run(schedule, "ABCD")
    assert run(schedule, "ACD") == ["BCD", "D", ""]


def test_after_an_unknown_unit_nothing_is_expected_until_a_known_one_runs():
    schedule = Schedule[str]()
    run(schedule, "ABC")
    assert run(schedule, "AXBC") == ["BC", "", "C", ""]


def test_a_new_order_is_what_the_next_pass_expects():
    schedule = Schedule[str]()
    run(schedule, "ABC")
    run(schedule, "CBA")
    assert run(schedule, "CBA") == ["BA", "A", ""]


def test_an_order_can_be_given():
    assert run(Schedule(), "CB", expected=list("CBA")) == ["BA", "A"]


def hybrid_steps(max_buffers, late_all_reduce, small):
    """Kinds of collectives in order, while each rank sees completions at random moments."""
    usual, before = Handle.completed, _plan.MIN_CHILD
    chance = random.Random(dist.get_rank())
    Handle.completed = property(lambda handle: chance.random() < 0.5)  # type: ignore[assignment]
    _plan.MIN_CHILD = 1 if small else before
    try:
        mesh = rank_mesh(2, 2, names=("replicate", "shard"))
        model, alone = shard(seeded(blocks=6), mesh=mesh), seeded(blocks=6)
        model.set_reduce_scatter_max_input_buffers(max_buffers)
        with record_collectives() as record:
            for step in range(4):
                model.set_requires_all_reduce(not late_all_reduce or step % 2 == 1)
                loss_of(model, tokens(step=step)).backward()
    finally:
        Handle.completed, _plan.MIN_CHILD = usual, before
    for step in range(4):
        for rank in range(4):
            (loss_of(alone, tokens(step=step, rank=rank)) / 4).backward()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-6)
    return record.kinds


def all_hybrid_steps():
    """Each pair of choices."""
    cases = [
        (1, False, False),
        (1, True, True),
        (2, False, True),
        (2, True, False),
        (4, False, True),
        (4, True, False),
    ]
    return {case: hybrid_steps(*case) for case in cases}


def test_reductions_and_all_reduces_come_in_the_same_order_on_all_ranks():
    first, *others = run_ranks(4, all_hybrid_steps)
    for case, kinds in first.items():
        assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(kinds), case
        assert all(found[case] == kinds for found in others), case


def order_on(rank, depth):
    """Which mesh axis each collective of some steps is on, and its bytes, while completions come at random moments."""
    chance = random.Random(rank)
    with (
        SimulatedDevice(completes=lambda: chance.random() < 0.5),
        simulated_ranks(4, rank=rank) as simulation,
    ):
        meshes = {
            name: rank_mesh(*shape, names=names)
            for name, shape, names in (
                ("hybrid", (2, 2), ("replicate", "shard")),
                ("flat", (4,), ("shard",)),
                ("other way", (2, 2), ("shard", "replicate")),
            )
        }
        axes: dict[str, str] = {}
        for name, mesh in meshes.items():
            for axis in mesh.mesh_dim_names:
                axes.setdefault(mesh.get_group(axis).group_name, f"{name} {axis}")
        model = seeded(blocks=6)
        for index, block in enumerate(model.blocks):
            fully_shard(
                block, mesh=(meshes["hybrid"], meshes["flat"], meshes["other way"]["shard"])[index % 3]
            )
        fully_shard(model, mesh=meshes["hybrid"])
        model.set_prefetch_depth(depth)
        model.set_reduce_scatter_max_input_buffers(2)
        start = len(simulation.calls)
        for step in range(3):
            loss_of(model, tokens(step, rank=rank)).backward()
    return [(axes[group], nbytes) for group, nbytes in simulation.calls[start:]]


@pytest.mark.filterwarnings("ignore:.*returned a view")
@pytest.mark.parametrize("depth", [1, 3])
def test_units_on_several_meshes_communicate_in_the_same_order_on_all_ranks(depth):
    first, *others = [order_on(rank, depth) for rank in range(4)]
    assert {axis for axis, _ in first} >= {"hybrid replicate", "hybrid shard", "flat shard"}
    assert all(order == first for order in others)


class Recorder:
    """A device layer that notes which events streams wait for."""

    asynchronous = False

    def __init__(self, layer):
        self.layer = layer
        self.waits = []

    def record(self, stream=None):
        return "all that the current stream holds"

    def wait(self, event, stream=None):
        self.waits.append(event)

    def __getattr__(self, name):
        return getattr(self.layer, name)


def gathers_wait_for(assign):
    model = shard(seeded())
    passes = member_of(model).passes
    loss_of(model, tokens())
    with torch.no_grad():
        if assign:
            block = model.blocks[1]
            block.weight = torch.nn.Parameter(block.weight.detach() * 2)
    model.set_post_optim_event("the optimizer's event")
    layer = passes.streams.layer
    passes.streams.layer = recorder = Recorder(layer)
    try:
        model(tokens())
    finally:
        passes.streams.layer = layer
    return recorder.waits


def test_a_gather_after_the_optimizers_event_waits_for_a_parameter_assigned_since_too():
    assert run_ranks(1, gathers_wait_for, False) == [["the optimizer's event"]]
    assert run_ranks(1, gathers_wait_for, True) == [
        ["the optimizer's event", "all that the current stream holds"]
    ]
