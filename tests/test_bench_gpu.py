"""GPU pieces that need more than a system's step: the longest context that fits, and rates of kernels."""

import pytest
import torch
from bench import gpu, kernels, measure
from bench.kernels import CASES
from bench.measure import fake_ranks

from fsdp_runtime.train.model import losses_of
from ragged_shard import CPU
from ragged_shard.testing import RankError

DRY = {piece.name: piece for piece in gpu.pieces(0, dry=True)}


# -- the longest context ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "most", "lengths", "found"),
    [
        (1000, 1 << 20, [16, 32, 64, 128, 256, 512, 1024, 768, 896, 960], (960, 1024)),
        (100, 1 << 20, [16, 32, 64, 128, 96, 112], (96, 112)),
        (3, 1 << 20, [16], (None, 16)),
        (10**6, 40, [16, 32], (32, None)),
    ],
)
def test_the_search_for_a_context_doubles_until_one_does_not_fit_and_halves_the_gap_to_an_eighth(
    limit, most, lengths, found
):
    tried: list[int] = []

    def trial(length):
        tried.append(length)
        return length if length <= limit else None

    assert gpu.search(trial, 16, most) == found
    assert tried == lengths


def test_a_search_that_runs_out_of_time_keeps_what_fits():
    def trial(length):
        if length > 32:
            raise TimeoutError
        return length

    assert gpu.search(trial, 16, 1024) == (32, None)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')", True),
        ("RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED')", True),
        ("RuntimeError('NCCL error: unhandled system error')", False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(cause, expected):
    class Cause(Exception):
        def __repr__(self):
            return cause

    reported = gpu.out_of_memory(RankError("rank 1 of 2 failed", {1: Cause()}))
    assert reported == (cause if expected else None)


@pytest.mark.long
def test_a_side_that_fits_has_its_longest_context_and_its_rate(tmp_path):
    answer = gpu.run_piece(DRY["longest-2-ours"], tmp_path, 300)
    assert answer["longest"]["length"] == 96
    assert answer["longest"]["tokens_per_second"] > 0
    assert [trial["length"] for trial in answer["trials"]] == [16, 32, 64, 128, 96, 112]
    assert "longest that fits 96; does not fit 112" in answer["line"]


@pytest.mark.long
def test_a_side_that_does_not_fit_says_so_as_its_result(tmp_path):
    answer = gpu.run_piece(DRY["longest-2-fsdp2"], tmp_path, 300)
    assert "failed" not in answer
    assert answer["fits"] is False
    assert "pretends that 16 tokens are out of memory" in answer["trials"][0]["out_of_memory"]
    assert "out of memory" in answer["line"]
    assert answer["sizes"]["num_layers"] == 2


@pytest.mark.long
def test_an_error_that_is_not_of_memory_fails_the_piece(tmp_path):
    piece = DRY["longest-2-ours"]
    broken = gpu.Piece("x", piece.worker, 1, {**piece.request, "sizes": {**gpu.TINY, "dim": -1}}, 60)
    assert "dim is -1" in gpu.run_piece(broken, tmp_path, 300)["failed"]


@pytest.mark.parametrize(
    ("side", "matrix", "embedding"), [("fsdp2", 16, 16), ("fsdp2-bf16", 8, 8), ("ours", 6, 12)]
)
def test_a_side_takes_the_bytes_a_parameter_that_it_names(side, matrix, embedding):
    with fake_ranks(1) as mesh:
        model, optimizer = gpu.build_side(gpu.SIDES[side], {**gpu.TINY, "vocab_size": 1024}, CPU.type, mesh)
        losses_of(model, *torch.randint(1024, (2, 1, 16)))[0].backward()
        optimizer.step()
        for name, expected in (("blocks.0.ff.w_up.weight", matrix), ("embed.weight", embedding)):
            param = model.get_parameter(name)
            states = [state for state in optimizer.state[param].values() if state.numel() > 1]
            nbytes = sum(t.numel() * t.element_size() for t in (param, param.grad, *states))
            assert nbytes / param.numel() == pytest.approx(expected, rel=0.03)  # scales of narrow rows


def test_the_model_of_the_longest_context_has_the_size_of_llama_3_8b():
    from fsdp_runtime.train import ModelConfig

    assert ModelConfig(**gpu.SHAPE, tied=False).num_parameters == 8_030_261_248


def test_the_pieces_of_the_longest_context_take_five_minutes_together():
    chosen = [piece for piece in gpu.pieces(1, dry=False, layers=8) if piece.name.startswith("longest-8-")]
    assert [piece.request["side"] for piece in chosen] == list(gpu.SIDES)
    assert sum(piece.limit for piece in chosen) <= 300


# -- rates ------------------------------------------------------------------------------------------------------------


def answer_of(**more):
    """An answer of `measure_rates` with one row."""
    row = {"kernel": "decode", "case": "nf4", "by": "dbuffer", "ms": 1.0, "rate": 2e9, "share": 0.5, **more}
    return {"rates": [row], "missing": {"torchao": "not installed"}}


@pytest.fixture(scope="module")
def tiny_rates():
    """All rates in tiny sizes."""
    return kernels.measure_rates({"device": CPU.type, "tiny": True})


def test_a_rate_is_the_amount_over_the_time_and_a_share_of_its_limit(monkeypatch):
    monkeypatch.setattr(kernels, "medians_ms", lambda times: {"copy": 2.0, "ours": 8.0})
    turns = dict.fromkeys(("copy", "ours"), kernels.Turn(int, 4e6, "copy"))
    copy, ours = kernels.rated("decode", "nf4", turns, CPU.type)
    assert (copy["rate"], ours["rate"], ours["share"]) == (2e9, 5e8, 0.25)


def test_rates_have_newton_schulz_a_step_for_each_compiled_case_and_each_format(tiny_rates):
    cases: dict[str, set[str]] = {}
    for row in tiny_rates["rates"]:
        cases.setdefault(row["kernel"], set()).add(row["case"])
    assert len(cases["Newton-Schulz"]) == len(kernels.STACKS)
    assert cases["8-bit AdamW"] == {case.name for case in CASES if case.tile} - {
        "elements:256 bf16, fp32 gradients",
        "elements:256 bf16, not aligned",
    }
    assert cases["decode"] == {"fp8 128x128", "fp8 32x32", "mxfp8 rows", "mxfp8 columns", "nvfp4", "nf4"}


def test_the_line_of_rates_has_each_kind_of_kernel(tiny_rates):
    parts = tiny_rates["line"].split("; ")
    assert [part.split(" ")[0] for part in parts] == ["Newton-Schulz", "8-bit", "decode", "decode"]


def test_values_that_are_decoded_are_those_that_were_encoded(tiny_rates):
    errors = {row["case"]: row["error"] for row in tiny_rates["rates"] if row["by"] == "dbuffer"}
    assert 0.01 < errors["fp8 128x128"] < 0.03 < errors["nf4"] < 0.1


def test_a_package_that_is_not_installed_is_recorded_so(monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    missing: dict[str, str] = {}
    assert kernels.others("nf4", missing) == {}
    assert missing == {"torchao": "not installed", "bitsandbytes": "not installed"}


def test_a_peer_that_fails_is_recorded_with_its_error_and_the_next_one_runs(monkeypatch):
    def fails():
        raise ValueError("no such kernel")

    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(kernels.PEERS, "nf4", {"torchao": lambda: fails, "bitsandbytes": lambda: int})
    missing: dict[str, str] = {}
    assert list(kernels.others("nf4", missing)) == ["bitsandbytes"]
    assert missing == {"torchao, nf4": "ValueError: no such kernel"}


def test_the_table_of_rates_names_what_was_not_compared():
    table = kernels.rates_table(answer_of(error=0.05))
    assert "torchao: not installed." in table["text"]
    assert table["rows"] == [["decode", "nf4", "dbuffer", "1.000", "2.0 GB/s", "0.50", "0.050"]]


# -- the run ----------------------------------------------------------------------------------------------------------


def test_a_pieces_line_is_printed_and_its_answer_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "launch", lambda *args, **options: {**answer_of(), "line": "nf4 at 2 GB/s"})
    found = gpu.run(tmp_path, dry=True, budget=200, skip_tests=True, only="rates")
    assert capsys.readouterr().out.startswith("rates: nf4 at 2 GB/s (")
    assert (tmp_path / "rates.json").exists()
    tables = gpu.report_tables({"machine": measure.describe(), "figures": found})
    assert tables[-1]["title"] == "Rates of kernels"
