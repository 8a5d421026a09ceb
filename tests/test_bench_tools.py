"""The benchmark harness: the same work for all systems, figures reckoned right, noise and failures handled."""

import math
import os
from typing import Any

import pytest
from bench import compare, gpu, host, measure
from bench.measure import answer, launch
from bench.models import WORKLOADS, batch_of, describe
from bench.systems import SYSTEMS

from ragged_shard.testing import RankError, run_ranks

OURS = ["ours", "ours-lean", "ours-staged", "ours-held", "ours-given-order", "ours-lcm"]


# -- the same work for all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "workload"),
    [
        pytest.param(2, "tiny", marks=pytest.mark.long),
        (3, "gate-prime"),
        pytest.param(4, "gate-stacked", marks=pytest.mark.long),
    ],
)
def test_every_system_and_variant_gives_the_losses_of_ddp(ranks, workload):
    systems, options = ["alone", "ddp", *OURS, "fsdp2"], {"block_policy": "rows:2"}
    request = {"workload": workload, "systems": systems, "rounds": 1, "steps": 1, "check_steps": 3}
    found, *_ = run_ranks(ranks, compare.rounds, {**request, "options": options}, timeout=200)
    assert found["skipped"] == {}
    assert found["losses"].pop("alone") != found["losses"]["ddp"]
    for name, losses in found["losses"].items():
        assert losses == pytest.approx(found["losses"]["ddp"], rel=1e-4), name
    assert set(found["samples"]) == set(systems)


def test_a_system_whose_losses_differ_is_dropped_with_both_losses_in_the_reason():
    differ = compare.compare_losses({"ddp": [2.0, 1.0], "good": [2.0, 1.00001], "bad": [2.0, 1.1]}, 1e-4)
    assert list(differ) == ["bad"]
    assert "[2.0, 1.1]" in differ["bad"]
    assert "[2.0, 1.0]" in differ["bad"]
    assert "bad" in compare.compare_losses({"ddp": [1.0, 1.0], "bad": [1.0, math.nan]}, 1e-4)


def test_a_system_that_cannot_run_says_why():
    request = {"workload": "tiny", "systems": ["fsdp2", "fsdp1", "plain"], "rounds": 1, "steps": 1}
    found = run_ranks(2, compare.rounds, {**request, "optimizer": "muon"}, timeout=200)[0]
    assert "flat pieces of parameters to muon" in found["skipped"]["fsdp1"]
    assert "not distributed" in found["skipped"]["plain"]


def test_after_its_time_no_further_round_begins():
    request = {"workload": "tiny", "systems": ["fsdp2"], "rounds": 5, "steps": 1, "seconds": 0.0}
    assert len(run_ranks(2, compare.rounds, request, timeout=200)[0]["samples"]["fsdp2"]) == 1


def test_batches_differ_between_ranks_and_steps_and_not_between_calls():
    tiny = WORKLOADS["tiny"]
    assert batch_of(tiny, 3, 1)[0].equal(batch_of(tiny, 3, 1)[0])
    assert not batch_of(tiny, 3, 1)[0].equal(batch_of(tiny, 3, 0)[0])
    assert not batch_of(tiny, 3, 1)[0].equal(batch_of(tiny, 4, 1)[0])


def test_the_workloads_have_the_sizes_that_the_tables_name():
    found = {name: describe(WORKLOADS[name]) for name in ("dense", "counts", "moe")}
    assert (found["dense"]["parameters"], found["dense"]["tensors"]) == (29_893_120, 75)
    assert (found["counts"]["parameters"], found["counts"]["tensors"]) == (31_597_056, 75)
    assert found["moe"]["tensors"] == 603


def test_a_simulated_world_measures_the_same_steps_without_a_delay():
    systems = ["plain", "ours", "fsdp2"]
    request: dict[str, Any] = {"workload": "tiny", "systems": systems, "rounds": 2, "steps": 1}
    request["simulate"] = {"ranks": 8, "bandwidth": 1e9, "latency": 1e-5}
    found = run_ranks(1, answer, compare.rounds, request, timeout=200)[0]
    assert found["ranks"] == 8
    assert found["skipped"] == {}
    assert {name: len(samples) for name, samples in found["free"].items()} == dict.fromkeys(systems, 2)


# -- figures ----------------------------------------------------------------------------------------------------------


def sample(wall):
    parts = {"forward": wall / 3, "backward": wall / 2, "update": wall / 6}
    return {"wall": wall, "cpu": 1.0, "foreign": 0.0, **parts}


def raw_figures():
    """Two rounds, the second of which was slow for all: ratios within a round do not see that."""
    samples = {"fsdp2": [sample(2.0), sample(8.0)], "ours": [sample(1.0), sample(4.0)]}
    return {
        "workload": describe(WORKLOADS["tiny"]), "ranks": 2, "optimizer": "adamw", "precision": "float32",
        "losses": {"fsdp2": [1.0], "ours": [1.0]}, "skipped": {"fsdp1": "it is tired"}, "samples": samples,
        "calibration": [0.01, 0.01],
    }  # fmt: skip


def test_ratios_are_taken_within_a_round_and_tokens_per_second_count_all_ranks():
    raw = raw_figures()
    ours = compare.summarise(raw)["ours"]
    assert ours["wall_ratio_fsdp2"] == 2.0
    assert ours["tokens_per_second"] == 2 * raw["workload"]["tokens_per_rank"] / 2.5


def test_history_tracks_what_falls_when_things_get_better_and_leaves_a_busy_machine_out():
    from bench.history import Speed

    tracked: Any = Speed()  # the decorator makes its methods
    raw = raw_figures()
    raw["samples"]["ddp"] = [sample(0.5), sample(2.0)]
    memory = {"ours": {"start": 123}}
    quiet = {"dense": {**raw, "times": compare.summarise(raw), "memory": memory, "noise": []}}
    assert tracked.track_step_seconds(quiet, "dense", "ours") == 2.5
    assert tracked.track_step_of_ddp(quiet, "dense", "ours") == 2.0
    assert tracked.track_peak_rss_bytes(quiet, "dense", "ours") == 123
    assert math.isnan(tracked.track_peak_rss_bytes(quiet, "dense", "fsdp2"))
    busy = {"dense": {**quiet["dense"], "noise": ["it was busy"]}}
    assert math.isnan(tracked.track_cpu_seconds(busy, "dense", "ours"))


def test_a_busy_machine_is_refused_with_each_reason(tmp_path, monkeypatch, capsys):
    noise = measure.verdict(0.9, [1.0, 2.0, 3.0, 4.0, 5.0], [0.5, 0.5, 0.5])
    assert len(noise) == 3
    assert measure.verdict(0.02, [1.0, 1.01, 1.0, 1.02, 1.0], [0.01, 0.5, 0.0]) == []
    monkeypatch.setattr(measure, "FOLDER", tmp_path)
    assert measure.record("x", [], noise, keep_noisy=False) == measure.TOO_BUSY != 0
    assert not list(tmp_path.iterdir())
    assert "nothing is recorded" in capsys.readouterr().err
    assert measure.record("x", [], noise, keep_noisy=True) == 0
    assert measure.load_all("x", tmp_path)[0]["noise"] == noise


@pytest.mark.long
def test_a_worker_that_dies_is_an_error_with_its_cause():
    request = {"workload": "no such workload", "systems": [], "rounds": 1, "steps": 1}
    with pytest.raises(RankError, match="no such workload"):
        launch(compare.rounds, 1, request, timeout=100)


def test_the_ratio_of_tiny_units_is_taken_within_a_round():
    assert host.units_ratio({"ours": [1.0, 30.0, 1.0], "fsdp2": [2.0, 60.0, 4.0]}) == 0.5


def test_tiny_units_are_measured_for_both_systems():
    assert {name: len(found) for name, found in host.measure_units(2).items()} == {"ours": 2, "fsdp2": 2}


# -- reports and formats ----------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path):
    """A results folder with one speed result and one table."""
    raw = raw_figures()
    memory = {name: {"start": 2**30, "steady": 2**29} for name in raw["samples"]}
    figures = {**raw, "times": compare.summarise(raw), "memory": memory}
    figures["tables"] = [compare.speed_table(figures)]
    measure.save("speed-tiny-2", figures, folder=tmp_path)
    extra = measure.table_of("A table", "About it.", "a; b", [["x", 1]])
    measure.save("extra", {"tables": [extra]}, noise=["it rained"], folder=tmp_path)
    return tmp_path


def test_the_report_has_every_section_of_the_results(results):
    text = measure.write_report(results).read_text()
    for part in ("2.00", "it is tired", "A table", "it rained", SYSTEMS["fsdp2"].label):
        assert part in text


def test_the_summary_goes_between_its_markers_and_nowhere_else(results):
    readme = results / "README.md"
    readme.write_text(f"before\n{measure.BEGIN}\nold\n{measure.END}\nafter\n")
    measure.put_into(readme, results)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| tiny" in text
    readme.write_text("nothing here")
    with pytest.raises(ValueError, match="bench summary"):
        measure.put_into(readme, results)


def test_tables_align_numbers_to_the_right():
    lines = measure.table(["name", "value"], [["a", "1.5"], ["bcd", "20"]]).splitlines()
    assert lines[1] == "| ---- | ----: |"
    assert lines[2] == "| a    |   1.5 |"


@pytest.mark.long
def test_the_gpu_run_writes_down_a_piece_that_fails_and_goes_on(tmp_path, monkeypatch):
    good = {"workload": "tiny", "systems": ["plain"], "rounds": 1, "steps": 1, "device": "cpu"}
    chosen = [
        gpu.Piece("bad", compare.rounds, 1, {**good, "workload": "none"}, 60),
        gpu.Piece("good", compare.rounds, 1, good, 60),
    ]
    monkeypatch.setattr(gpu, "pieces", lambda *_: chosen)
    found = gpu.run(tmp_path, dry=True, budget=200, skip_tests=True, only="bad,go")
    assert "KeyError('none')" in found["pieces"]["bad"]["failed"]
    assert "plain" in found["pieces"]["good"]["times"]
    content = {"machine": measure.describe(), "commit": None, "figures": found}
    found["tables"] = gpu.report_tables(content)
    text = gpu.summary(content)
    assert "DRY RUN" in text
    assert "bad failed" in text


def test_a_gpu_run_resumes_with_what_failed(tmp_path, monkeypatch):
    ran = []

    def launch(worker, ranks, request, timeout):
        ran.append(request["number"])
        return {"failed": "no"} if len(ran) == 1 else {"skipped": {}}

    chosen = [gpu.Piece(f"p{number}", compare.footprint, 1, {"number": number}, 60) for number in range(3)]
    monkeypatch.setattr(gpu, "pieces", lambda *_: chosen)
    monkeypatch.setattr(gpu, "launch", launch)
    gpu.run(tmp_path, dry=True, budget=200, skip_tests=True)
    found = gpu.run(tmp_path, dry=True, budget=200, skip_tests=True, resume=True)
    assert ran == [0, 1, 2, 0]
    assert found["pieces"] == {f"p{number}": {"skipped": {}} for number in range(3)}


@pytest.mark.long
def test_a_gpu_tests_failure_is_in_the_log_before_pytest_ends(tmp_path, monkeypatch):
    tests = tmp_path / "packages" / "some"
    tests.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tests / "test_it.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_a():\n    assert 1 == 2, 'here it is'\ndef test_b():\n    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{measure.ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert gpu.run_tests("some", tmp_path, 60)["failed"] == "pytest ended with 3; see tests-some.log"
    assert "here it is" in (tmp_path / "tests-some.log").read_text()


def test_work_of_a_step_is_counted_in_a_profile():
    spans = [("kernel", 7, 0, 10), ("kernel", 7, 5, 10), ("kernel", 7, 25, 5), ("gpu_memcpy", 9, 0, 30)]
    events = [{"cat": c, "name": "x", "ts": ts, "dur": dur, "args": {"stream": s}} for c, s, ts, dur in spans]
    work = gpu.steps_work([*events, {"name": "cudaLaunchKernel", "cat": "cuda_runtime"}, {"ph": "M"}])
    assert work == {"kernels": 3, "copies": 1, "launches": 1, "idle": pytest.approx(1 / 3)}


def test_pytest_output_is_read_from_its_last_line():
    assert gpu.outcome("...\n== 3 passed, 2 skipped in 1.0s ==\n") == {"passed": 3, "skipped": 2}


@pytest.mark.long
def test_two_hosts_train_alike_over_a_link_and_quantized_wires_send_a_third_or_less():
    try:
        with compare.hosts(1000.0):
            pass
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    raw = compare.on_hosts(1000.0, "gate", 1)
    assert raw["skipped"] == {}
    assert raw["losses"]["ours"] == pytest.approx(raw["losses"]["fsdp2"], rel=1e-5)
    assert raw["losses"]["ours-quantized"] == pytest.approx(raw["losses"]["fsdp2"], rel=0.05)
    sent = {name: runs[0]["sent"] for name, runs in raw["samples"].items()}
    assert sent["ours"] < 1.1 * sent["fsdp2"]
    assert 3 * sent["ours-quantized"] < sent["fsdp2"]


def test_the_arithmetic_of_a_wire():
    assert compare.arithmetic("bf16", 2, 2) == ["bf16", "47.2", "0.94", "7,875"]


def test_the_plot_of_networks_has_every_system_of_the_recorded_figures(tmp_path):
    pytest.importorskip("matplotlib")
    (recorded,) = measure.load_all("network")
    compare.plot(recorded["figures"], tmp_path / "network.svg")
    text = (tmp_path / "network.svg").read_text()
    for name in compare.LINKED:
        assert f"<!-- {SYSTEMS[name].label} -->" in text
    assert "<!-- Mbit/s between two hosts -->" in text
