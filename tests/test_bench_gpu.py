"""GPU pieces that need more than a system's step: the longest context that fits."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import gpu, longest

from ragged_shard.testing import RankError

DRY = {piece.name: piece for piece in gpu.pieces(0, dry=True)}


def searched(limit, least=16, most=1 << 20):
    """The lengths that a search tries, and its results, where lengths up to a limit fit."""
    tried = []

    def trial(length):
        tried.append(length)
        return length if length <= limit else None

    return tried, longest.search(trial, least, most)


# -- the longest context ----------------------------------------------------------------------------------------------


def test_the_search_for_a_context_doubles_until_one_does_not_fit_and_halves_the_gap():
    assert searched(100) == ([16, 32, 64, 128, 96, 112], (96, 112))


def test_the_search_ends_where_an_eighth_more_does_not_fit():
    tried, (best, over) = searched(15_000)
    assert best <= 15_000 < over <= best * 9 / 8
    assert len(tried) == 14


def test_a_first_context_that_does_not_fit_ends_the_search():
    assert searched(3) == ([16], (None, 16))


def test_no_context_beyond_the_most_is_tried():
    assert searched(10**6, most=40) == ([16, 32], (32, None))


def test_a_search_that_runs_out_of_time_keeps_what_fits():
    def trial(length):
        if length > 32:
            raise TimeoutError
        return length

    assert longest.search(trial, 16, 1024) == (32, None)


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

    found = longest.out_of_memory(RankError("rank 1 of 2 failed", {1: Cause()}))
    assert found == (cause if expected else None)


@pytest.mark.long
def test_a_side_that_fits_has_its_longest_context_and_its_rate(tmp_path):
    answer = gpu.run_piece(DRY["longest-2-ours"], tmp_path, 60)
    assert answer["longest"]["length"] == 96
    assert answer["longest"]["tokens_per_second"] > 0
    assert [trial["length"] for trial in answer["trials"]] == [16, 32, 64, 128, 96, 112]
    assert "longest that fits 96; does not fit 112" in answer["line"]


@pytest.mark.long
def test_a_side_that_does_not_fit_says_so_as_its_result(tmp_path):
    answer = gpu.run_piece(DRY["longest-2-fsdp2"], tmp_path, 60)
    assert "failed" not in answer
    assert answer["fits"] is False
    assert "pretends that 16 tokens are out of memory" in answer["trials"][0]["out_of_memory"]
    assert "out of memory" in answer["line"]
    assert answer["sizes"]["num_layers"] == 2


@pytest.mark.long
def test_an_error_that_is_not_of_memory_fails_the_piece(tmp_path):
    piece = DRY["longest-2-ours"]
    broken = gpu.Piece("x", piece.worker, 1, {**piece.request, "sizes": {**longest.TINY, "dim": -1}}, 60)
    assert "dim is -1" in gpu.run_piece(broken, tmp_path, 60)["failed"]


def test_the_model_of_the_longest_context_has_the_size_of_llama_3_8b():
    from fsdp_runtime.train import ModelConfig

    assert ModelConfig(**longest.SHAPE, tied=False).num_parameters == 8_030_261_248


def test_the_pieces_of_the_longest_context_take_five_minutes_together():
    chosen = [piece for piece in gpu.pieces(1, dry=False, layers=8) if piece.name.startswith("longest-8-")]
    assert [piece.request["side"] for piece in chosen] == list(longest.SIDES)
    assert sum(piece.limit for piece in chosen) <= 300
