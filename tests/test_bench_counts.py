"""The regression gate: our own exact counts are those that are committed, and the counting itself is right.

After a change that is meant to change them: `python -m bench counts --write-expected`, or `calls --write-expected` for
Python calls, and say why in the commit.
"""

import json
import runpy

import pytest
import torch
from bench import calls, counts, host
from bench.measure import fake_ranks

from dbuffer.transport import transport_of

EXPECTED = json.loads(counts.EXPECTED.read_text())


@pytest.fixture(scope="module")
def bases():
    return {workload: counts.plain(workload) for workload, _ in counts.GATE}


@pytest.mark.skipif(
    torch.__version__.split("+")[0] != EXPECTED["torch"],
    reason=f"the counts were committed for torch {EXPECTED['torch']}, whose own ops they include",
)
@pytest.mark.parametrize(("workload", "ranks"), counts.GATE)
def test_our_counts_of_a_step_are_exactly_those_committed(workload, ranks, bases):
    found = counts.compare(workload, ranks, ("ours",), bases[workload])["ours"]
    expected = EXPECTED["figures"][f"{workload} on {ranks} ranks"]
    assert json.loads(json.dumps(found)) == expected


@pytest.mark.parametrize(("workload", "ranks"), counts.GATE)
def test_we_copy_nothing_to_gather_and_each_gradient_once_to_reduce(workload, ranks, bases):
    found = EXPECTED["figures"][f"{workload} on {ranks} ranks"]
    assert found["copied"]["forward"] == 0
    assert found["copied"]["backward"] <= bases[workload]["parameter_bytes"]


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
def test_copies_are_counted_with_the_bytes_that_they_write_arithmetic_as_written_and_views_not(
    act, copied, written
):
    part = tallied(act).parts["it"]
    assert (sum(part.copied.values()), sum(part.written.values())) == (copied, written)
    assert sum(part.calls.values()) > 0


def test_memory_counts_births_deaths_and_resizes_of_storages():
    def life():
        a = torch.zeros(1000)
        storage = a.untyped_storage()
        storage.resize_(0)
        b = torch.zeros(500)
        del b
        storage.resize_(8000)
        a.add_(1)

    found = tallied(life)
    peak, _, _ = found.memory.peak()
    assert peak == 8000
    assert sum(change for _, change in found.memory._events) == 0


@pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="this torch cannot exchange memory"
)
@pytest.mark.parametrize("turned", [False, True])
def test_memory_that_storages_exchange_is_counted_once(turned):
    kept, other = torch.zeros(1000), torch.zeros(0)

    def exchange():
        kept.add_(0)
        one, two = (t.untyped_storage() for t in ((other, kept) if turned else (kept, other)))
        one._swap_data_ptr_(two)  # type: ignore[attr-defined]
        other.add_(0)

    assert tallied(exchange).memory.peak()[0] == 4000


def test_memory_that_a_runtime_keeps_for_later_counts_as_parked():
    parked = [100]
    with counts.Tally(1, lambda: parked[0]) as found, found.part("it"):
        kept = torch.zeros(10)
        parked[0] = 0
        kept.add_(1)
    assert found.memory.peak()[1] == {"parked": 100, "temporaries": 40}


def test_memory_is_booked_under_the_kind_it_turned_out_to_be():
    kept = []

    def life():
        kept.append(torch.zeros(10))
        kept.append(torch.zeros(20))

    with counts.Tally(2) as found:
        life()
        found.mark("state", kept[:1])
    assert found.memory.peak()[1] == {"state": 40, "temporaries": 80}


def test_the_floor_has_one_unit_gathered_one_of_gradients_all_reduced_ones_and_nothing_parked():
    kept: list[torch.Tensor] = []

    def life():
        kept.extend(torch.zeros(size) for size in (100, 10, 300, 50, 20))

    with counts.Tally(2, lambda: 4000) as found:
        life()
        found.mark("gathered", kept[:2])
        found.mark("gradients", kept[2:4])
        found.mark_shards(kept[3:4])
        torch.zeros(1)
    assert found.memory.floor(4 * 60) == 4 * (60 + 60 + 50 + 20 + 1)
    assert found.memory.peak()[0] == 4000 + 4 * (100 + 10 + 300 + 50 + 20 + 1)


def test_the_least_memory_of_ours_is_near_the_floor(bases):
    found = counts.compare("gate", 8, ("ours", "ours-lean"), bases["gate"])
    assert found["ours-lean"]["peak"] < found["ours"]["peak"]
    floor = min(one["floor"] for one in found.values())
    head = 4 * 64 * 512  # too small for a buffer of its own: its gradients wait for the end of backward
    assert floor <= found["ours-lean"]["peak"] <= 1.05 * (floor + head)


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


def test_fsdp2_gathers_with_copies_and_so_the_counting_sees_copies(bases):
    found = counts.compare("gate", 8, ("fsdp2",), bases["gate"])["fsdp2"]
    assert found["copied"]["forward"] == bases["gate"]["parameter_bytes"] * 9 // 8
    assert found["collectives"] == {"all_gather": 7, "reduce_scatter": 4}


def test_what_a_system_does_beyond_the_plain_step_is_a_difference():
    part = {
        "calls": 5,
        "ops": {"a": 5},
        "copied": {"x": 8},
        "written": {"x": 9},
        "wire_bytes": 0,
        "collectives": {},
    }
    others = {
        "calls": 7,
        "ops": {"a": 5, "b": 2},
        "copied": {"y": 10},
        "written": {"y": 12},
        "wire_bytes": 70,
    }
    more = {**part, **others}
    common = {"parameter_bytes": 10, "peak": 1, "floor": 1, "at_peak": {}, "each": {}}
    base = {**common, "ranks": 1, "parts": {"forward": part, "backward": part, "update": part}}
    found = {**common, "ranks": 8, "parts": {"forward": more, "backward": part, "update": part}}
    beyond = counts.outside(found, base)
    assert beyond["calls"] == {"forward": 2, "backward": 0, "update": 0}
    assert beyond["copied"] == {"forward": 2, "backward": 0}
    assert beyond["ops"]["forward"] == {"b": 2}
    assert beyond["padding"] == 7.0


# -- Python calls ------------------------------------------------------------------------------------------------------


def test_calls_are_counted_in_the_folders_asked_for_and_nowhere_else(tmp_path):
    files = [tmp_path / "inside" / "a.py", tmp_path / "b.py"]
    files[0].parent.mkdir()
    for file in files:
        file.write_text("def act(): pass")
    inside, outside_of_it = (runpy.run_path(str(file))["act"] for file in files)
    with calls.Calls([tmp_path / "inside"]) as here:
        inside()
        inside()
        outside_of_it()
    assert here.functions == {("inside/a.py", "act"): 2}
    assert here.figures() == {"calls": 2, "functions": 1, "files": 1, "switches": 1}


def test_wrapping_takes_as_many_calls_for_each_further_unit_however_many_there_are():
    host.wrap("ours", 2)  # what is looked up once
    few, twice, four_times = (host.wrap("ours", layers, count=True)[1] for layers in (8, 16, 32))
    assert four_times - twice == 2 * (twice - few)


def test_a_peer_that_fails_is_named_below_the_table_and_others_are_not_excused(monkeypatch):
    def count(name, job):
        raise ValueError(f"{name} is tired")

    monkeypatch.setattr(counts, "count", count)
    found = counts.compare("tiny", 8, ("deepspeed",), {})
    table, _ = counts.tables("tiny", {"8 simulated": found})
    missing = "DeepSpeed ZeRO-3 on 8 simulated ranks is not in the table: ValueError: deepspeed is tired."
    assert missing in table["text"]
    with pytest.raises(ValueError, match="ours is tired"):
        counts.compare("tiny", 8, ("ours",), {})
