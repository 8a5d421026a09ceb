"""Sequences that end with their documents: ranks have different numbers of tokens, and the curve is that of one."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from train_helpers import MODELS, assert_curve_of_one, losses, text_folder, tiny, train_each, with_changes

from fsdp_runtime.train import Batches, Trainer, read_data
from fsdp_runtime.train.data import IGNORED, windows_of_documents
from ragged_shard.testing import run_ranks

CPU = torch.device("cpu")
NEWLINE = 10


def made(folder, model="dense", **changes):
    settings = {"steps": 4, "eval_every": 4, "eval_batches": 2, "end_token": NEWLINE, **changes}
    return tiny(folder, model=MODELS[model], documents=True, **settings)


def read(train, held_out, seq_len):
    held = [] if held_out is None else [str(held_out)]
    found = read_data([str(train)], dtype="uint16", vocab_size=None, held_out=held, seq_len=seq_len)
    return found.train


def test_every_token_that_follows_one_of_its_document_is_a_target_once(tmp_path):
    texts = ["abcdefg", "xy", "1\n23456789ab\n\ncd"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "held.out").write_text("held out")
    corpus = read(tmp_path / "*.txt", tmp_path / "held.out", 4)
    for end, documents in ((None, texts), (NEWLINE, ["abcdefg", "xy", "1\n", "23456789ab\n", "\n", "cd"])):
        windows = windows_of_documents(corpus, 4, end)
        number = len(windows.starts)
        batches = Batches(corpus, 4, number, 1, 0, 1, None, 256, documents=windows)
        ((tokens, targets),) = batches.microbatches(0, CPU)
        kept = targets != IGNORED
        pairs = list(zip(tokens[kept].tolist(), targets[kept].tolist(), strict=True))
        assert pairs == [(ord(a), ord(b)) for each in documents for a, b in pairwise(each)]
        assert kept.sum(1).tolist() == windows.lengths.tolist()
        assert max(windows.lengths) == 4


@pytest.mark.parametrize("end", [None, NEWLINE])
def test_ranks_have_the_targets_of_one_between_them(tmp_path, end):
    corpus = read(text_folder(tmp_path), None, 32)
    windows = windows_of_documents(corpus, 32, end)

    def part(rank=0, ranks=1, accumulate=1):
        batches = Batches(corpus, 32, 12, accumulate, rank, ranks, 5, 256, documents=windows)
        return [torch.stack(pair) for pair in batches.microbatches(3, CPU)]

    (whole,) = part()
    assert (whole[1] == IGNORED).any() or end is None
    parts = [torch.cat(part(rank, 3, 2), 1) for rank in range(3)]
    found = torch.cat(parts, 1).transpose(0, 1).flatten(1)
    assert sorted(found.tolist()) == sorted(whole.transpose(0, 1).flatten(1).tolist())


def plain_loss(config, out):
    """Of the first batch, token by token, by a model that nothing has wrapped."""
    trainer = Trainer(with_changes(config, system="one"), out, quiet=True)
    ((tokens, targets),) = trainer.batches.microbatches(0, CPU)
    with torch.no_grad():
        log = trainer.model(tokens)[0].float().log_softmax(-1)
    kept = targets != IGNORED
    return -log[kept].gather(-1, targets[kept][:, None]).double().mean().item(), kept


def test_ranks_with_different_numbers_of_tokens_have_the_curve_of_one(folder, tmp_path):
    """`test_train_splits.py` has it beside other parallelisms."""
    runs = {"dense": made(folder), "accumulated": made(folder, accumulate=2), "moe": made(folder, "moe")}
    expected, kept = plain_loss(runs["dense"], tmp_path)
    counts = kept.sum(1).double().view(3, -1).sum(1)
    assert counts.max() > 1.1 * counts.min()  # else any average would do
    one = {name: with_changes(config, system="one", accumulate=1) for name, config in runs.items()}
    (alone,) = run_ranks(1, train_each, one, str(tmp_path / "one"))
    found = run_ranks(3, train_each, runs, str(tmp_path / "several"))
    for name in runs:
        curve, held_out = losses(tmp_path / "one" / name), alone[name]["held_out_loss"]
        assert_curve_of_one(tmp_path / "several" / name, [rank[name] for rank in found], curve, held_out)
    assert losses(tmp_path / "one" / "dense")[0] == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_has_the_same_curve_and_refuses_other_documents(folder, tmp_path):
    run = made(folder, save_every=2, warmup=0, min_lr=1.0)
    runs = {"whole": run, "part": with_changes(run, steps=2)}
    run_ranks(1, train_each, runs, str(tmp_path))
    (found,) = run_ranks(
        1, train_each, {"part": with_changes(run, resume=True, end_token=None)}, str(tmp_path)
    )
    assert found["part"].endswith("was made with end_token 10, this run has None")
    run_ranks(1, train_each, {"part": with_changes(run, resume=True)}, str(tmp_path))
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_token_arrays_have_documents_too(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 6, 0, 7, 0, 8, 9, 9, 0], dtype=np.int32))
    np.save(tmp_path / "b.npy", np.arange(9))
    corpus = read(tmp_path / "a.npy", tmp_path / "b.npy", 2)
    windows = windows_of_documents(corpus, 2, 0)
    assert windows.starts.tolist() == [0, 3, 5, 7]
    assert windows.lengths.tolist() == [2, 1, 2, 1]
