"""The regression gate: our own exact counts are those that are committed, and the counting itself is right.

After a change that is meant to change them: `python -m bench counts --write-expected`, and say why in the commit.
"""

import functools
import json

import pytest
import torch
from bench import counts
from bench.measure import fake_ranks

from dbuffer.transport import transport_of

EXPECTED = json.loads(counts.EXPECTED.read_text())


plain = functools.cache(counts.plain)


@pytest.mark.skipif(
    torch.__version__.split("+")[0] != EXPECTED["torch"],
    reason=f"the counts were committed for torch {EXPECTED['torch']}, whose own ops they include",
)
@pytest.mark.parametrize(("workload", "ranks"), counts.GATE)
def test_our_counts_of_a_step_are_exactly_those_committed(workload, ranks):
    found = counts.compare(workload, ranks, ("ours",), plain(workload))["ours"]
    expected = EXPECTED["figures"][f"{workload} on {ranks} ranks"]
    assert json.loads(json.dumps(found)) == expected


@pytest.mark.parametrize(("workload", "ranks"), counts.GATE)
def test_we_copy_nothing_to_gather_and_each_gradient_once_to_reduce(workload, ranks):
    found = EXPECTED["figures"][f"{workload} on {ranks} ranks"]
    assert found["copied"]["forward"] == 0
    assert found["copied"]["backward"] <= plain(workload)["parameter_bytes"]


def tallied(function):
    with counts.Tally(4) as found, found.part("it"):
        function()
    found.sort_writes()
    return found


A, B = torch.zeros(100), torch.zeros(6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("act", "copied", "written"),
    [
        (lambda: B.copy_(A[:6]), 48, 48),
        (lambda: A[:10].copy_(A[10:20]), 40, 40),  # the slice, not its storage
        (lambda: A.clone(), 400, 400),
        (lambda: A.mul_(2), 0, 400),
        (lambda: (A.view(4, 25).t(), torch.empty(1000)), 0, 0),
    ],
    ids=["copy", "slice", "clone", "arithmetic", "views"],
)
def test_copies_count_with_their_bytes_arithmetic_as_written_and_views_not(act, copied, written):
    part = tallied(act).parts["it"]
    assert (sum(part.copied.values()), sum(part.written.values())) == (copied, written)
    assert sum(part.calls.values()) > 0


def test_the_least_memory_of_ours_is_near_the_floor():
    found = counts.compare("gate", 8, ("ours", "ours-lean"), plain("gate"))
    assert found["ours-lean"]["peak"] < found["ours"]["peak"]
    floor = min(one["floor"] for one in found.values())
    assert floor <= found["ours-lean"]["peak"] <= 1.2 * floor  # gradients of two blocks


def test_collectives_count_by_kind_with_what_a_rank_receives():
    with fake_ranks(4) as mesh:
        whole, own = torch.zeros(16), torch.zeros(4)
        transport = transport_of(mesh.get_group(), "collectives")

        def talk():
            transport.all_gather([(whole, own)], "it")
            transport.reduce_scatter([(own, whole)], "sum", "it")
            transport.all_reduce([whole], "sum", "it")

        found = tallied(talk)
    assert found.parts["it"].collectives == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    assert found.parts["it"].wire_bytes == 48 + 48 + 96


def test_fsdp2_gathers_with_copies_and_so_the_counting_sees_copies():
    found = counts.compare("gate", 8, ("fsdp2",), plain("gate"))["fsdp2"]
    assert found["copied"]["forward"] == plain("gate")["parameter_bytes"] * 9 // 8
    assert found["collectives"] == {"all_gather": 7, "reduce_scatter": 4}
