"""The benchmark harness: the same work for all systems, figures reckoned right, noise and failures handled."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.common import machine, store
from bench.common.ranks import answer, launch
from bench.gpu import convert
from bench.gpu import run as gpu
from bench.report import history, page, sections
from bench.scale import network, parallel, predict
from bench.systems.adapters import SYSTEMS
from bench.systems.workloads import WORKLOADS, batch_of, describe
from bench.times import host, rounds, speed

from ragged_shard.testing import RankError, run_ranks

OURS = ["ours", "ours-lean", "ours-staged", "ours-held", "ours-given-order", "ours-lcm"]


# -- the same work for all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "workload"), [(2, "tiny"), (3, "gate-prime"), (4, "gate-stacked")])
def test_every_system_and_variant_gives_the_losses_of_ddp(ranks, workload):
    request = {
        "workload": workload,
        "systems": ["alone", "ddp", *OURS, "fsdp2"],
        "rounds": 1,
        "steps": 1,
        "check_steps": 3,
    }
    found = run_ranks(ranks, rounds.run, {**request, "options": {"block_policy": "rows:2"}}, timeout=200)[0]
    assert found["skipped"] == {}
    assert found["losses"].pop("alone") != found["losses"]["ddp"]
    for name, losses in found["losses"].items():
        assert losses == pytest.approx(found["losses"]["ddp"], rel=1e-4), name
    assert set(found["samples"]) == {"alone", "ddp", *OURS, "fsdp2"}


def test_a_system_whose_losses_differ_is_dropped_with_both_losses_in_the_reason():
    differ = rounds.compare_losses({"ddp": [2.0, 1.0], "good": [2.0, 1.00001], "bad": [2.0, 1.1]}, 1e-4)
    assert list(differ) == ["bad"]
    assert "[2.0, 1.1]" in differ["bad"]
    assert "[2.0, 1.0]" in differ["bad"]


def test_a_loss_that_is_not_a_number_is_a_difference():
    assert "bad" in rounds.compare_losses({"ddp": [1.0], "bad": [math.nan]}, 1e-4)


def test_a_system_that_cannot_run_says_why():
    request = {"workload": "tiny", "systems": ["fsdp2", "megatron-fsdp", "plain"], "rounds": 1, "steps": 1}
    found = run_ranks(2, rounds.run, request, timeout=200)[0]
    assert "CUDA" in found["skipped"]["megatron-fsdp"]
    assert "not distributed" in found["skipped"]["plain"]


def test_after_its_time_no_further_round_begins():
    request = {"workload": "tiny", "systems": ["fsdp2"], "rounds": 5, "steps": 1, "seconds": 0.0}
    assert len(run_ranks(2, rounds.run, request, timeout=200)[0]["samples"]["fsdp2"]) == 1


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
    request = {"workload": "tiny", "systems": ["plain", "ours", "fsdp2"], "rounds": 2, "steps": 1}
    request["simulate"] = {"ranks": 8, "bandwidth": 1e9, "latency": 1e-5}
    found = run_ranks(1, answer, rounds.run, request, timeout=200)[0]
    assert found["ranks"] == 8
    assert found["skipped"] == {}
    assert {name: len(samples) for name, samples in found["free"].items()} == {
        "plain": 2,
        "ours": 2,
        "fsdp2": 2,
    }


# -- figures ----------------------------------------------------------------------------------------------------------


def sample(wall, cpu=1.0):
    return {
        "wall": wall,
        "cpu": cpu,
        "forward": wall / 3,
        "backward": wall / 2,
        "update": wall / 6,
        "foreign": 0.0,
    }


def raw_figures():
    """Two rounds, the second of which was slow for all: ratios within a round do not see that."""
    samples = {"fsdp2": [sample(2.0), sample(8.0)], "ours": [sample(1.0), sample(4.0)]}
    return {
        "workload": describe(WORKLOADS["tiny"]), "ranks": 2, "optimizer": "adamw", "precision": "float32",
        "losses": {"fsdp2": [1.0], "ours": [1.0]}, "skipped": {"fsdp1": "it is tired"}, "samples": samples,
        "calibration": [0.01, 0.01],
    }  # fmt: skip


def test_ratios_are_taken_within_a_round():
    assert speed.summarise(raw_figures())["ours"]["wall_ratio_fsdp2"] == 2.0


def test_tokens_per_second_count_all_ranks():
    raw = raw_figures()
    assert speed.summarise(raw)["ours"]["tokens_per_second"] == 2 * raw["workload"]["tokens_per_rank"] / 2.5


def test_history_tracks_what_falls_when_things_get_better_and_leaves_a_busy_machine_out():
    from bench.times.history import Speed

    raw = raw_figures()
    raw["samples"]["ddp"] = [sample(0.5), sample(2.0)]
    memory = {"ours": {"start": 123}}
    quiet = {"dense": {**raw, "times": speed.summarise(raw), "memory": memory, "noise": []}}
    assert Speed().track_step_seconds(quiet, "dense", "ours") == 2.5
    assert Speed().track_step_of_ddp(quiet, "dense", "ours") == 2.0
    assert Speed().track_peak_rss_bytes(quiet, "dense", "ours") == 123
    assert math.isnan(Speed().track_peak_rss_bytes(quiet, "dense", "fsdp2"))
    busy = {"dense": {**quiet["dense"], "noise": ["it was busy"]}}
    assert math.isnan(Speed().track_cpu_seconds(busy, "dense", "ours"))


def test_a_planted_slowdown_shows_in_the_ratio():
    raw = raw_figures()
    raw["samples"]["ours"] = [sample(3 * s["wall"]) for s in raw["samples"]["ours"]]
    assert speed.summarise(raw)["ours"]["wall_ratio_fsdp2"] == pytest.approx(2 / 3)


def test_a_busy_machine_is_refused_with_each_reason(tmp_path, monkeypatch, capsys):
    noise = machine.verdict(0.9, [1.0, 2.0, 3.0, 4.0, 5.0], [0.5, 0.5, 0.5])
    assert len(noise) == 3
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    assert store.record("x", {}, noise, keep_noisy=False) == store.TOO_BUSY != 0
    assert not list(tmp_path.iterdir())
    assert "nothing is recorded" in capsys.readouterr().err
    assert store.record("x", {}, noise, keep_noisy=True) == 0
    assert store.load_all("x", tmp_path)[0]["noise"] == noise


def test_a_quiet_machine_is_not_refused():
    assert machine.verdict(0.02, [1.0, 1.01, 1.0, 1.02, 1.0], [0.01, 0.5, 0.0]) == []


def test_a_worker_that_dies_is_an_error_with_its_cause():
    request = {"workload": "no such workload", "systems": [], "rounds": 1, "steps": 1}
    with pytest.raises(RankError, match="no such workload"):
        launch(rounds.run, 1, request, timeout=100)


def test_the_ratio_of_tiny_units_is_taken_within_a_round():
    assert host.units_ratio({"ours": [1.0, 30.0, 1.0], "fsdp2": [2.0, 60.0, 4.0]}) == 0.5


def test_tiny_units_are_measured_for_both_systems():
    samples = host.measure_units(2)
    assert {name: len(found) for name, found in samples.items()} == {"ours": 2, "fsdp2": 2}


# -- scale on paper ---------------------------------------------------------------------------------------------------


def test_communication_that_compute_hides_is_not_exposed():
    layers = [network.Layer(1.0, 2.0, 0.5, 0.5)] * 4
    found = network.step(layers)
    assert found.compute == 12.0
    assert (
        found.total == 12.0 + 0.5 + 0.5
    )  # the first gather and the last reduction have nothing to hide behind


def test_a_slow_wire_bounds_the_step():
    layers = [network.Layer(0.1, 0.2, 5.0, 5.0)] * 4
    assert network.step(layers).total >= 5.0 * (4 + 3 + 4)


def test_without_overlap_everything_adds_up():
    layers = [network.Layer(1.0, 2.0, 0.5, 0.25)] * 3
    assert network.step(layers, overlap=False).total == 9.0 + 3 * 0.75 + 2 * 0.5


def test_one_node_pays_no_network_and_one_gpu_nothing():
    cluster = predict.Cluster()
    assert cluster.gather(1e9, 1) == 0.0
    assert cluster.gather(1e9, 8) == pytest.approx(1e9 * 7 / 8 / 450e9 / 0.85 + 7 * 1.5e-6)


def test_flops_of_a_layer_are_two_for_each_active_weight_and_token():
    from layout_planner import load_model

    model = load_model("llama-3-70b")
    layer = next(group for group in model.groups if group.count == 80)
    weights = sum(entry.numel for entry in layer.tensors if len(entry.shape) == 2)
    attention = 2 * predict.TOKENS * predict.SEQUENCE * 8192
    assert predict.flops_of(layer, 1) == 2 * weights * predict.TOKENS + attention


@pytest.mark.parametrize(
    ("name", "tp", "ep"), [("llama-3-70b", 8, 1), ("gpt-oss-120b", 1, 8), ("deepseek-v3", 1, 64)]
)
def test_shared_matrices_and_experts_hold_every_parameter_once(name, tp, ep):
    from layout_planner import load_model

    model, ours = load_model(name), predict.SYSTEMS[0]
    shared = parallel.Parallel(tp, ep)
    for group in model.groups:
        parts = list(parallel.parts_of(group, ours, 1024, shared))
        assert sum(part.padded * part.stride for part in parts) == pytest.approx(group.numel, rel=0.02)
        assert [part.ranks * part.stride for part in parts] == [1024] * len(parts)
    alone, with_it = (
        predict.predict(model, ours, 1024, predict.Cluster(), 5e14, p) for p in (parallel.Parallel(), shared)
    )
    assert with_it["memory"] < alone["memory"]


def test_fsdp2_cuts_few_experts_by_their_rows_as_torchtitan_asks():
    from layout_planner import load_model

    model, fsdp2 = load_model("gpt-oss-120b"), predict.SYSTEMS[2]
    padding = [predict.predict(model, fsdp2, 4096, predict.Cluster(), 5e14, p)["padding"] for p in (
        parallel.Parallel(), parallel.Parallel(ep=8)
    )]  # fmt: skip
    assert padding[0] > 10
    assert padding[1] < 0.1


# -- reports and formats ----------------------------------------------------------------------------------------------


def test_the_report_of_all_sections_is_written_with_its_pictures(tmp_path):
    raw = raw_figures()
    memory = {name: {"start": 2**30, "steady": 2**29} for name in raw["samples"]}
    store.save("speed-tiny-2", {**raw, "times": speed.summarise(raw), "memory": memory}, folder=tmp_path)
    bars = [{"title": "t", "ticks": ["x"], "series": {"ours": [1.0]}}]
    extra = {"title": "A table", "text": "About it.", "header": ["a", "b"], "rows": [["x", 1]], "bars": bars}
    store.save("extra", {"tables": [extra]}, noise=["it rained"], folder=tmp_path)
    text = page.write(tmp_path).read_text()
    for part in ("2.00", "it is tired", "A table", "it rained", SYSTEMS["fsdp2"].label):
        assert part in text
    linked = [line.split("(")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert all((tmp_path / name).exists() for name in linked)


def test_the_summary_goes_between_its_markers_and_nowhere_else(tmp_path):
    raw = raw_figures()
    store.save("speed-tiny-2", {**raw, "times": speed.summarise(raw), "memory": {}}, folder=tmp_path)
    page.write(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.put_into(readme, tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| tiny" in text


def test_a_readme_without_markers_is_refused(tmp_path):
    page.write(tmp_path)
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(ValueError, match="bench summary"):
        page.put_into(tmp_path / "README.md", tmp_path)


def test_tables_align_numbers_to_the_right():
    lines = store.table(["name", "value"], [["a", "1.5"], ["bcd", "20"]]).splitlines()
    assert lines[1] == "| ---- | ----: |"
    assert lines[2] == "| a    |   1.5 |"


def gpu_content(commit):
    times = {
        "ours": {"wall": 1.0, "forward": 0.3, "backward": 0.5, "update": 0.2, "exposed": 0.1, "spread": 0.0}
    }
    piece = {"times": times, "skipped": {}, "workload": describe(WORKLOADS["gpu-dense"])}
    about = {
        "cpu": "c", "cores": 16, "memory_gb": 128.0, "gpu": "NVIDIA H200", "gpus": 1, "os": "Linux",
        "python": "3.11.7", "torch": "2.11.0", "date": "2026-11-21 10:00 UTC",
    }  # fmt: skip
    figures = {
        "dry_run": False,
        "pieces": {"simulated-gpu-dense-8": piece},
        "seconds": 500.0,
        "tests": {"passed": 3},
    }
    return {"machine": about, "commit": commit, "noise": [], "figures": figures}


def test_gpu_figures_become_results_of_a_machine_of_their_own(tmp_path):
    pytest.importorskip("asv")
    convert.convert(gpu_content("HEAD"), convert.commit_of(gpu_content("HEAD"), None), tmp_path)
    found = history.series(tmp_path)["nvidia-h200-x1"]
    ((_, commit, value),) = found["gpu_history.Gpu.track_exposed_seconds(simulated-gpu-dense-8, ours)"]
    assert value == 0.1
    assert len(commit) == 8
    assert len(found) == 5  # what was not measured is left out


def test_a_regression_planted_in_the_recorded_history_is_listed(tmp_path):
    (machine,) = (path.parent for path in store.FOLDER.glob("cpu-*/machine.json"))
    copied = shutil.copytree(machine, tmp_path / machine.name)
    (lines,) = history.series(tmp_path).values()
    assert max(len(line) for line in lines.values()) >= 8
    newest = max(
        (path for path in copied.glob("*.json") if path.name != "machine.json"),
        key=lambda path: json.loads(path.read_text())["date"],
    )
    content = json.loads(newest.read_text())
    planted = "runtime.Counts.track_wire_bytes"
    content["results"][planted][0][1] *= 1.05
    content |= {"commit_hash": "f" * 40, "date": content["date"] + 1}
    (copied / "planted.json").write_text(json.dumps(content))
    (worse,) = history.series(tmp_path).values()
    added = set(map(str, history.rises(worse))) - set(map(str, history.rises(lines)))
    assert len(added) == 1
    assert f"{planted}(64)" in added.pop()
    assert "f" * 8 in "".join(sections.history_section(tmp_path))


def test_gpu_figures_of_a_changed_tree_need_a_commit_said():
    with pytest.raises(ValueError, match="changed tree"):
        convert.commit_of(gpu_content("abc+"), None)


def test_the_gpu_run_writes_down_a_piece_that_fails_and_goes_on(tmp_path, monkeypatch):
    good = {"workload": "tiny", "systems": ["plain"], "rounds": 1, "steps": 1, "device": "cpu"}
    chosen = [
        gpu.Piece("bad", rounds.run, 1, {**good, "workload": "none"}, 60),
        gpu.Piece("good", rounds.run, 1, good, 60),
    ]
    monkeypatch.setattr(gpu, "pieces", lambda gpus, dry: chosen)
    found = gpu.run(tmp_path, dry=True, budget=200, skip_tests=True)
    assert "KeyError('none')" in found["pieces"]["bad"]["failed"]
    assert "plain" in found["pieces"]["good"]["times"]
    text = gpu.summary({"machine": machine.describe(), "commit": None, "figures": found})
    assert "DRY RUN" in text
    assert "bad failed" in text


def test_pytest_output_is_read_from_its_last_line():
    assert gpu.outcome("...\n== 3 passed, 2 skipped in 1.0s ==\n") == {"passed": 3, "skipped": 2}
