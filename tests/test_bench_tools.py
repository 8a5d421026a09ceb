"""Benchmarks: all systems do the same work, and a busy machine or a failed piece is said."""

import math

import pytest
from bench import compare, gpu, measure
from bench.models import WORKLOADS, describe

from ragged_shard.testing import run_ranks

OURS = ["ours", "ours-lean", "ours-staged", "ours-given-order", "ours-lcm"]


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


def test_a_report_refuses_uncommitted_code_and_few_rounds_and_leaves_out_rows_that_vary(
    tmp_path, monkeypatch
):
    rows = [["a", "1.0", "3.0%"], ["b", "2.0", "12.0%"]]
    tables = [measure.table_of("Speed: tiny", "Text.", "system; tokens/s; spread", rows)]
    monkeypatch.setattr(measure, "commit", lambda: "abc+")
    measure.save("speed-1", {"samples": {"a": [{}] * 5, "b": [{}] * 4}, "tables": tables}, folder=tmp_path)
    with pytest.raises(ValueError, match=r"speed-1 was measured on abc\+, .*; speed-1 has 4 rounds; .*5"):
        measure.write_report(tmp_path)
    monkeypatch.setattr(measure, "commit", lambda: "abc")
    measure.save("speed-1", {"samples": {"a": [{}] * 5, "b": [{}] * 5}, "tables": tables}, folder=tmp_path)
    text = measure.write_report(tmp_path).read_text()
    assert "Left out for their spread: b (12.0%)." in text
    assert "| b " not in text


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


def test_idle_and_overlapped_are_shares_of_the_time_that_streams_work():
    spans = [(7, 0, 6), (7, 6, 10), (7, 12, 20), (9, 5, 8), (11, 7, 15)]
    events = [
        {"cat": "kernel", "ts": ts, "dur": end - ts, "args": {"stream": stream}} for stream, ts, end in spans
    ]
    work = gpu.steps_work([*events, {"name": "cudaLaunchKernel"}])
    assert (work["kernels"], work["launches"]) == (5, 1)
    assert (work["idle"], work["overlapped"]) == (pytest.approx(2 / 20), pytest.approx(8 / 10))


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
