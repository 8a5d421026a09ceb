"""Large gathers and reductions over gloo go from rank to rank; how a transport is chosen."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import load, mesh_of, transport_lines

from dbuffer import Collectives, DBuffer, Gather, ReduceScatter
from dbuffer.transport import choice, transport_of
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


def collective_kinds(rows, transport, variable=""):
    with mock.patch.dict("os.environ", DBUFFER_TRANSPORT=variable):
        buffer = build("x", rows, transport=transport)
        Gather([buffer]).start().wait()
        with record_collectives() as record:
            Gather([buffer]).start().wait()
    buffer.release()
    return record.kinds


@pytest.mark.parametrize(
    ("ranks", "choice", "kinds"),
    [
        (2, (16384, "auto"), []),
        (2, (512, "auto"), ["all_gather"]),  # small
        (2, (16384, "collectives"), ["all_gather"]),
        (2, (16384, None, "collectives"), ["all_gather"]),
        (2, (16384, None, "peer_memory"), []),
        pytest.param(8, (16384, "auto"), [], marks=pytest.mark.long),
    ],
)
def test_only_large_exchanges_go_directly_unless_argument_or_variable_say_otherwise(ranks, choice, kinds):
    assert run_ranks(ranks, collective_kinds, *choice) == [kinds] * ranks


@on_ranks(2)
def test_a_group_of_more_ranks_than_were_measured_uses_collectives_and_logs_why():
    full, mine = torch.zeros(LARGE * dist.get_world_size()), torch.ones(LARGE)
    with transport_lines() as lines, mock.patch.object(choice, "MAX_RANKS", 1):
        transport_of(dist.new_group(), "auto").all_gather([(full, mine)], "x").wait()
    assert lines == ["collectives; no peer memory: it has 2 ranks, more than 1"]


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
