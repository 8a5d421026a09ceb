"""Which text, which batches."""

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from train_helpers import TEXT, text_folder

from fsdp_runtime.train import Batches, read_data
from fsdp_runtime.train.data import permute

CPU = torch.device("cpu")


def read(paths, **changes):
    settings = {"dtype": "uint16", "vocab_size": None, "held_out": (), "seq_len": 32}
    return read_data([str(path) for path in paths], **{**settings, **changes})


def batches(corpus, *, rank=0, world_size=1, accumulate=1, seed=3, batch=12, vocab_size=256):
    return Batches(corpus, 32, batch, accumulate, rank, world_size, seed, vocab_size)


def rows(found):
    return [tuple(row) for tokens, _ in found for row in tokens.tolist()]


def test_without_paths_the_standard_library_is_split_by_file(tmp_path, monkeypatch):
    found = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json", "email", "asyncio"):
        shutil.copytree(found / name, tmp_path / name)
        shutil.copytree(found / "json", tmp_path / "site-packages" / name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    data = read([])
    assert data.vocab_size == 256
    assert data.train.num_tokens > data.held_out.num_tokens > 0
    assert not set(data.train.names) & set(data.held_out.names)
    assert not [name for name in data.train.names if "site-packages" in name or not name.endswith(".py")]


def test_the_split_depends_on_names_below_the_folder_and_not_on_where_it_lies(tmp_path):
    first, second = read([text_folder(tmp_path / "a")]), read([text_folder(tmp_path / "b")])
    assert first.held_out.names == second.held_out.names
    assert first.identity == second.identity


def test_a_single_file_holds_out_its_end(tmp_path):
    (tmp_path / "one.txt").write_text(TEXT)
    data = read([tmp_path / "one.txt"])
    whole = np.concatenate([*data.train.arrays, *data.held_out.arrays]).tobytes()
    assert whole == TEXT.encode()
    assert data.held_out.num_tokens == len(TEXT) // 10


def test_a_link_to_a_held_out_file_is_not_read(tmp_path):
    (tmp_path / "68.txt").write_text(TEXT)  # held out by its name
    (tmp_path / "1.txt").symlink_to("68.txt")
    data = read([tmp_path])
    assert data.train.names == data.held_out.names == ("68.txt",)


def test_held_out_files_can_be_named(tmp_path):
    folder = text_folder(tmp_path)
    data = read([folder], held_out=[str(folder / ".." / "text" / "7.py")])
    assert ("7.py" in data.train.names, data.held_out.names) == (False, ("7.py",))
    (tmp_path / "7.py").write_text(TEXT[:100])
    data = read([folder], held_out=[str(tmp_path / "7.py")])  # of the same name as a training file
    assert (len(data.train.arrays[data.train.names.index("7.py")]), data.held_out.num_tokens) == (4000, 100)


def test_globs_and_token_arrays_are_read(tmp_path):
    tokens = np.arange(5000) % 1000
    tokens.astype(np.uint16).tofile(tmp_path / "b.bin")
    data = read([tmp_path / "*.bin"], vocab_size=1000)
    assert data.train.read(990, 1010).tolist() == tokens[990:1010].tolist()


def test_a_read_goes_across_files(tmp_path):
    data = read([text_folder(tmp_path)])
    start = int(data.train.starts[1]) - 5
    joined = np.concatenate(data.train.arrays)
    assert data.train.read(start, start + 10).tolist() == joined[start : start + 10].tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 97, 1000, 1025])
def test_the_shuffle_is_a_permutation_that_depends_on_the_seed(count):
    one, two = permute(np.arange(count), count, 1), permute(np.arange(count), count, 2)
    assert sorted(one) == sorted(two) == list(range(count))
    if count > 90:
        assert (one != two).any()
        assert (one != np.arange(count)).mean() > 0.9


def test_an_epoch_has_every_window_once_and_the_next_one_another_order(tmp_path):
    corpus = read([text_folder(tmp_path)]).train
    found = batches(corpus, batch=4)
    assert found.num_windows % 4
    numbers = np.concatenate([found.windows(step) for step in range(found.num_windows // 2 + 1)])
    first, second = numbers[: found.num_windows], numbers[found.num_windows : 2 * found.num_windows]
    assert sorted(first) == sorted(second) == list(range(found.num_windows))
    assert (first != second).any()


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (3, 2), (4, 3), (6, 2)])
def test_ranks_and_microbatches_have_the_same_global_batch_between_them(tmp_path, world_size, accumulate):
    corpus = read([text_folder(tmp_path)]).train
    whole = rows(batches(corpus).microbatches(5, CPU))
    parts = [
        row
        for rank in range(world_size)
        for row in rows(
            batches(corpus, rank=rank, world_size=world_size, accumulate=accumulate).microbatches(5, CPU)
        )
    ]
    assert sorted(parts) == sorted(whole)
    assert len(parts) == 12
    ((tokens, targets),) = batches(corpus).microbatches(0, CPU)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
