"""The order of units and collectives."""

import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import assert_same_gradients, loss_of, plain_backward, seeded, shard, tokens

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


@pytest.mark.parametrize(
    ("before", "order", "upcoming"),
    [
        pytest.param([], "ABC", ["", "", ""], id="nothing is expected in a first pass"),
        pytest.param(["ABC"], "ABC", ["BC", "C", ""], id="a second pass expects the order of the first"),
        pytest.param(["ABAC"], "ABAC", ["BAC", "AC", "C", ""], id="a unit that runs twice"),
        pytest.param(["AAB"], "AAB", ["AB", "B", ""], id="a unit that runs twice in a row"),
        pytest.param(["ABCD"], "ACD", ["BCD", "D", ""], id="a skipped unit is passed over"),
        pytest.param(["ABC"], "AXBC", ["BC", "", "C", ""], id="nothing is expected after an unknown unit"),
        pytest.param(["ABC", "CBA"], "CBA", ["BA", "A", ""], id="a new order is what the next pass expects"),
    ],
)
def test_a_pass_expects_the_units_that_followed_in_the_last_one(before, order, upcoming):
    schedule = Schedule[str]()
    for earlier in before:
        run(schedule, earlier)
    assert run(schedule, order) == upcoming


def test_an_order_can_be_given():
    assert run(Schedule(), "CB", expected=list("CBA")) == ["BA", "A"]


def hybrid_steps(max_buffers, late_all_reduce, small):
    """Kinds of collectives in order, while each rank sees completions at random moments."""
    chance = random.Random(dist.get_rank())
    with (
        mock.patch.object(Handle, "completed", property(lambda handle: chance.random() < 0.5)),
        mock.patch.object(_plan, "MIN_CHILD", 1 if small else _plan.MIN_CHILD),
        record_collectives() as record,
    ):
        mesh = rank_mesh(2, 2, names=("replicate", "shard"))
        model, alone = shard(seeded(blocks=6), mesh=mesh), seeded(blocks=6)
        model.set_reduce_scatter_max_input_buffers(max_buffers)
        for step in range(4):
            model.set_requires_all_reduce(not late_all_reduce or step % 2 == 1)
            loss_of(model, tokens(step=step)).backward()
    for step in range(4):
        plain_backward(alone, step)
    assert_same_gradients(model, alone)
    return record.kinds


def all_hybrid_steps():
    """Each pair of choices, by the number of buffers, whether all-reduces are late, and whether children are small."""
    small = {1: (False, True), 2: (True, False), 4: (True, False)}
    cases = [(buffers, late, small[buffers][late]) for buffers in small for late in (False, True)]
    return {case: hybrid_steps(*case) for case in cases}


def test_reductions_and_all_reduces_come_in_the_same_order_on_all_ranks():
    first, *others = run_ranks(4, all_hybrid_steps)
    for case, kinds in first.items():
        assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(kinds), case
        assert all(found[case] == kinds for found in others), case


def meshes_of_units(meshes):
    """A unit after the other on another mesh."""
    model = seeded(blocks=6)
    for index, block in enumerate(model.blocks):
        mesh = (meshes["hybrid"], meshes["flat"], meshes["other way"]["shard"])[index % 3]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=meshes["hybrid"])


def meshes_in_units(meshes):
    """Matrices of each unit on all ranks, vectors with replicas."""
    choose = lambda param: meshes["hybrid"] if param.ndim == 1 else None  # noqa: E731
    return shard(seeded(blocks=6), mesh=meshes["flat"], shard_placement_fn=choose)


def order_on(rank, depth, build):
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
        model = build(meshes)
        model.set_prefetch_depth(depth)
        model.set_reduce_scatter_max_input_buffers(2)
        start = len(simulation.calls)
        for step in range(3):
            loss_of(model, tokens(step, rank=rank)).backward()
    return [(axes[group], nbytes) for group, nbytes in simulation.calls[start:]]


@pytest.mark.filterwarnings("ignore:.*returned a view")
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("build", [meshes_of_units, meshes_in_units])
def test_units_on_several_meshes_communicate_in_the_same_order_on_all_ranks(build, depth):
    first, *others = [order_on(rank, depth, build) for rank in range(4)]
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
