"""Large gathers and reductions over gloo go from rank to rank; how a transport is chosen."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import load, mesh_of, transport_lines

from dbuffer import Collectives, DBuffer, Gather, ReduceScatter
from dbuffer.transport import choice, transport_of
from dbuffer.transport.peer import direct
from layout_planner import TensorSpec, plan
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

LARGE = 1 << 18  # elements of fp32: a MiB


def build(name, rows=16384, **options):
    specs = [TensorSpec(f"{name}.a", (rows, 61)), TensorSpec(f"{name}.b", (7,))]
    return DBuffer(plan(specs, dist.get_world_size()), mesh_of(), dtype=torch.float32, **options)


def fill(buffer, seed):
    generator = torch.Generator().manual_seed(seed)
    names = {spec.name: torch.randn(spec.shape, generator=generator) for spec in buffer.layout.tensors}
    load(buffer, names)


def collective_kinds(rows, transport):
    buffer = build("x", rows, transport=transport)
    Gather([buffer]).start().wait()
    with record_collectives() as record:
        Gather([buffer]).start().wait()
    buffer.release()
    return record.kinds


@pytest.mark.parametrize(
    ("ranks", "rows", "transport", "kinds"),
    [
        (2, 16384, "auto", []),
        (2, 512, "auto", ["all_gather"]),  # small
        (2, 16384, "collectives", ["all_gather"]),
        pytest.param(8, 16384, "auto", [], marks=pytest.mark.long),
    ],
)
def test_only_large_exchanges_go_directly(ranks, rows, transport, kinds):
    assert run_ranks(ranks, collective_kinds, rows, transport) == [kinds] * ranks


def by_variable(value):
    with mock.patch.dict("os.environ", DBUFFER_TRANSPORT=value):
        return collective_kinds(16384, None)


def test_the_environment_variable_chooses_where_no_argument_does():
    assert run_ranks(2, by_variable, "collectives") == [["all_gather"]] * 2
    assert run_ranks(2, by_variable, "peer_memory") == [[]] * 2


@on_ranks(2)
def test_a_transport_of_the_callers_is_made_once_for_a_process_group():
    made = []

    def make(group):
        made.append(group.size())
        return Collectives(group)

    buffers = [build(name, transport=make) for name in ("a", "b")]
    for buffer in buffers:
        Gather([buffer]).start().wait()
    assert made == [2]


@on_ranks(2)
def test_a_prepared_call_may_have_a_transport_and_a_group_of_its_own():
    """Prepared calls take a transport and a group that are not the buffers'."""
    made = []

    def make(group):
        made.append(group)
        return Collectives(group)

    buffer = build("x", 512)
    fill(buffer, 0)
    Gather([buffer], transport=make).start().wait()
    expected = {name: view.clone() for name, view in buffer.views.items()}
    Gather([buffer]).start().wait()
    for name, view in buffer.views.items():
        assert torch.equal(view, expected[name])
    own = dist.new_group()
    ReduceScatter([buffer], op="sum", transport=make, group=own).start().wait()
    assert made == [buffer.mesh_view.group, own]
    half = dist.new_group([0])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"group has ranks \[0\], the shard axis \[0, 1\]"):
            ReduceScatter([buffer], group=half)


def logged(transport, most=choice.MAX_RANKS):
    group = dist.new_group()
    full, mine = torch.zeros(LARGE * dist.get_world_size()), torch.ones(LARGE)
    with transport_lines() as lines, mock.patch.object(choice, "MAX_RANKS", most):
        for _ in range(2):
            transport_of(group, transport).all_gather([(full, mine)], "x").wait()
    return lines


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["auto"], "peer_memory for large exchanges"),
        (["peer_memory"], "peer_memory for large exchanges, as chosen"),
        (["auto", 1], "collectives; no peer memory: it has 2 ranks, more than 1"),
    ],
)
def test_the_choice_is_one_log_line_that_says_why_not_the_better_one(given, line):
    assert run_ranks(2, logged, *given) == [[line]] * 2


@on_ranks(2)
def test_an_exchange_that_cannot_start_says_which_and_why():
    """A rank that is gone when the others meet for the first large exchange."""

    def fails(group):
        raise RuntimeError("Connection closed by peer")

    group = dist.new_group()
    choice._chosen[group] = {"auto": direct.Direct(group, "auto", fails)}
    buffer = build("unit 7")
    choice._chosen[buffer.mesh_view.group] = choice._chosen[group]
    try:
        with pytest.raises(RuntimeError) as caught:
            Gather([buffer]).start()
    finally:
        del choice._chosen[buffer.mesh_view.group]
    assert buffer.in_flight is None
    assert str(caught.value) == "all_gather of unit 7.a could not start: Connection closed by peer"
