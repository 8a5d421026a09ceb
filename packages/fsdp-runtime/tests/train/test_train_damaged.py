"""Checkpoints that changed on disk are refused, no pickle in them is run: faults that `checks/fuzz.py` has found."""

import collections
import io
import json
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from train_helpers import newest, replace, tiny, train, with_changes, write_about

from fsdp_runtime.checkpoint.convert import Reader
from fsdp_runtime.train import TrainError
from fsdp_runtime.train.checkpoint import check_files, latest, read_about
from fsdp_runtime.train.report import read_metrics
from ragged_shard.testing import run_ranks

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def config(folder):
    return tiny(folder, steps=4, save_every=2)


@pytest.fixture(scope="module")
def original(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("original")
    run_ranks(2, train, config, out)
    return out


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "run.json"])
def test_a_flipped_bit_or_a_missing_file_is_named_on_every_rank(config, run, name):
    path = newest(run) / name
    whole = path.read_bytes()
    resumed = with_changes(config, resume=True, steps=6)
    for damage in (flip, os.unlink):
        damage(path)
        messages = run_ranks(3, train, resumed, run)  # one rank finds it
        assert len(set(messages)) == 1
        assert f"{path} is damaged: " in messages[0]
        path.write_bytes(whole)
    shutil.rmtree(newest(run))
    assert run_ranks(3, train, resumed, run)[0]["first_step"] == 2


class Calls:
    """Unpickled, it is the result of a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class OldPickler(pickle.Pickler):
    """Pickles members of an enum as Python before 3.11.4 does."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, _MEM_FORMAT_ENCODING) else NotImplemented


def test_calls_in_metadata_are_refused_and_not_made(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for call, message in (
        (Calls(getattr, collections.OrderedDict, "fromkeys"), "metadata: damaged"),
        (Calls(os.mkdir, "made"), r"damaged: .* names posix\.mkdir, which is not part of a checkpoint"),
    ):
        replace(newest(run), ".metadata", pickle.dumps(call))
        with pytest.raises(ValueError, match=message):
            Reader(newest(run)).read_metadata()
    assert not (tmp_path / "made").exists()
    with pytest.raises(AttributeError):  # torch's own reader makes the call
        FileSystemReader(newest(run)).read_metadata()
    assert (tmp_path / "made").exists()


def test_metadata_as_python_before_3_11_4_writes_it_is_read(run):
    checkpoint, file = newest(run), io.BytesIO()
    metadata = Reader(checkpoint).read_metadata()
    OldPickler(file).dump(metadata)
    assert b"getattr" in file.getvalue()
    replace(checkpoint, ".metadata", file.getvalue())
    again = Reader(checkpoint).read_metadata()
    assert again.state_dict_metadata == metadata.state_dict_metadata
    assert again.storage_data == metadata.storage_data


def test_a_pickle_among_the_settings_of_an_optimizer_is_not_run(config, run, tmp_path):
    made, checkpoint = tmp_path / "made", newest(run)
    metadata = Reader(checkpoint).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn.endswith(".lr"))
    info = metadata.storage_data[index]
    box = io.BytesIO()
    torch.save(Calls(os.mkdir, str(made)), box)
    path = checkpoint / info.relative_path
    with path.open("ab") as file:
        object.__setattr__(info, "offset", file.tell())
        object.__setattr__(info, "length", file.write(box.getvalue()))
    replace(checkpoint, path.name, path.read_bytes())
    replace(checkpoint, ".metadata", pickle.dumps(metadata))
    (said,) = run_ranks(1, train, with_changes(config, resume=True, steps=6), run)
    assert said.startswith(f"cannot load {checkpoint}: UnpicklingError: Weights only load failed")
    assert not made.exists()


def test_a_run_json_of_another_shape_or_with_options_of_another_type_is_named(run):
    about = read_about(newest(run))
    for change in ({"speed": 1}, {"model": 7}, {"model": {"dim": "8"}}):
        write_about(newest(run), {**about, "config": {**about["config"], **change}})
        with pytest.raises(TrainError, match=r"run\.json is damaged: "):
            check_files(newest(run))
    for text in (b"[" * 9999, b"[]", b"7", b"{}", b'{"about": {}, "digest": ""}', b"\xff"):
        (newest(run) / "run.json").write_bytes(text)
        with pytest.raises(TrainError, match=r"run\.json is damaged: "):
            check_files(newest(run))


def test_lines_of_metrics_that_are_not_entries_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [{"kind": "train", "step": step, "loss": 1.0} for step in range(3)]
    bad = [
        b"\xff\xfe", b"[1]", b"{}", b'{"kind": "train", "step": 1}',
        b'{"kind": "train", "step": "1", "loss": 1.0}',
    ]  # fmt: skip
    bad += [b'{"kind": "train", "step": 1, "loss": "x"}', b"[" * 100_000, b'{"kind": "train", "st']
    lines = [json.dumps(good[0]).encode(), *bad[:4], json.dumps(good[1]).encode(), *bad[4:7]]
    path.write_bytes(b"\n".join([*lines, json.dumps(good[2]).encode(), bad[7]]))
    assert read_metrics(path) == good


def test_a_folder_that_a_killed_run_left_half_written_is_no_checkpoint_and_is_removed(config, run):
    last = newest(run)
    shutil.copytree(last, last.with_name("step-00000009.part"))
    (last.parent / "step-00000008").touch()
    assert latest(run) == last
    (summary,) = run_ranks(1, train, with_changes(config, resume=True, steps=6), run)
    assert summary["first_step"] == 4
    assert not list(last.parent.glob("*.part"))
