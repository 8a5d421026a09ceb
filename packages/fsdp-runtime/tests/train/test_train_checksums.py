"""Checkpoints that changed on disk are found, named and passed over."""

import random
import shutil

import pytest
from train_helpers import newest, tiny, train, with_changes

from fsdp_runtime.train import TrainError
from fsdp_runtime.train.__main__ import main
from fsdp_runtime.train.checkpoint import find_damage, newest_intact, read_about
from ragged_shard.testing import run_ranks


@pytest.fixture(scope="module")
def config(folder):
    return tiny(folder, steps=6, save_every=3)


@pytest.fixture(scope="module")
def original(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("original")
    run_ranks(2, train, config, out)
    return out


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def test_a_flipped_bit_is_named_by_file_and_resume_takes_the_checkpoint_before(config, run, capsys):
    last = newest(run)
    file = last / "__1_0.distcp"
    flip(file, file.stat().st_size // 2)
    assert main(["verify", str(run)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{last}: __1_0.distcp: damaged"
    assert second.startswith(f"{last.with_name('step-00000003')}: as written")
    summaries = run_ranks(3, train, with_changes(config, resume=True, steps=8), run)  # one rank finds it
    assert [summary["first_step"] for summary in summaries] == [3, 3, 3]


def test_any_flip_cut_or_loss_of_any_file_is_found(original):
    last, draw = newest(original), random.Random(1)
    assert find_damage(last) == []
    for path in sorted(last.iterdir()):
        whole = path.read_bytes()
        for _ in range(12):
            flip(path, draw.randrange(len(whole)))
            assert len(find_damage(last)) == 1, path
            path.write_bytes(whole)
        for changed in (whole[:-1], whole + b"\0", b""):
            path.write_bytes(changed)
            assert len(find_damage(last)) == 1, path
        path.unlink()
        (line,) = find_damage(last)
        assert line.startswith(f"{path.name}: missing")
        path.write_bytes(whole)
    assert [find_damage(last, share, 3) for share in range(3)] == [[], [], []]


def test_where_no_checkpoint_is_intact_every_rank_says_so(config, run):
    for checkpoint in (run / "checkpoints").glob("step-*"):
        (checkpoint / "run.json").write_text("{}")
    messages = run_ranks(2, train, with_changes(config, resume=True), run)
    assert len(set(messages)) == 1
    assert "step-00000006 is damaged: run.json: damaged: 2 bytes, expected " in messages[0]
    with pytest.raises(TrainError, match="is not a checkpoint of this fsdp-train"):
        read_about(newest(run))


@pytest.mark.parametrize("name", [".metadata", "run.json", "sums.json"])
def test_a_checkpoint_that_misses_a_file_is_named_and_never_passed_over_in_silence(run, name, capsys):
    last = newest(run)
    shutil.copytree(last, last.with_name("step-00000009.part"))  # half written,
    last.with_name("latest").unlink()  # before the file that names the newest
    (last / name).unlink()
    line = f"{last}: {name}: missing"
    assert main(["verify", str(run)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == line
    assert main(["verify", str(last)]) == 1
    assert capsys.readouterr().out.splitlines() == [line]
    assert newest_intact(run) == (
        last.with_name("step-00000003"), [f"{last} is damaged: {name}: missing"],
    )  # fmt: skip
