"""Damaged files of a run are refused or passed over, and no pickle in them is run: what `checks/fuzz.py` has found."""

import collections
import io
import json
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata
from train_helpers import newest, replace, sum_of, text_folder, tiny, train, with_changes

from fsdp_runtime.checkpoint import convert_checkpoint
from fsdp_runtime.checkpoint.convert import Reader
from fsdp_runtime.train import TrainError
from fsdp_runtime.train.__main__ import main
from fsdp_runtime.train.checkpoint import check_same_run, find_damage, latest, read_about
from fsdp_runtime.train.config import RunConfig
from fsdp_runtime.train.report import read_metrics
from fsdp_runtime.train.runs import saved_config
from ragged_shard.testing import run_ranks

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    made = tmp_path_factory.mktemp("fuzzed")
    text_folder(made)
    run_ranks(1, train, tiny(made, steps=4, save_every=2), made / "run")
    return made / "run"


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


class Calls:
    """Unpickled, it is what a call returns."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class OldPickler(pickle.Pickler):
    """Pickles members of an enum as Python before 3.11.4 does."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, _MEM_FORMAT_ENCODING) else NotImplemented


def too_large(metadata):
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size([1 << 40, 32])
    return metadata


def twice(metadata):
    about = metadata.state_dict_metadata["model.embed.weight"]
    half = torch.Size([about.size[0] // 2, about.size[1]])
    about.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), half)] * 2
    return metadata


def outside(metadata):
    about = metadata.state_dict_metadata["model.embed.weight"]
    about.chunks = [ChunkStorageMetadata(torch.Size([1, 0]), about.size)]
    return metadata


def elsewhere(metadata):
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../../run.json")
    return metadata


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (too_large, r"chunks of model\.embed\.weight have 8192 elements; expected \d+"),
        (twice, r"model\.embed\.weight has elements of the chunk at \(0, 0\) of .* twice"),
        (outside, r"a chunk of model\.embed\.weight at \(1, 0\) of .* is not inside"),
        (elsewhere, "damaged: FileNotFoundError"),
        (lambda _: Calls(os.mkdir, "made"), r"damaged: .* names posix\.mkdir, which is not part of a checkpoint"),
        (lambda _: Calls(getattr, collections.OrderedDict, "fromkeys"), "metadata: damaged"),
    ],
    ids=["too large", "twice", "outside", "elsewhere", "mkdir", "getattr"],
)  # fmt: skip
def test_metadata_that_lies_is_refused_and_its_calls_are_not_made(
    run, change, message, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    checkpoint = newest(run)
    replace(checkpoint, ".metadata", pickle.dumps(change(Reader(checkpoint).read_metadata())))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(checkpoint, tmp_path / "model", entry="model")
    assert not (tmp_path / "made").exists()
    if "mkdir" in message:
        with pytest.raises(AttributeError):  # torch's own reader makes the call
            FileSystemReader(checkpoint).read_metadata()
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


def test_a_pickle_among_the_settings_of_an_optimizer_is_not_run(original, run, tmp_path):
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
    config = saved_config(original)
    (said,) = run_ranks(1, train, with_changes(config, resume=True, steps=6), run)
    assert said.startswith(f"cannot load {checkpoint}: UnpicklingError: Weights only load failed")
    assert not made.exists()


@pytest.mark.parametrize("files", [{"run.json": [1e400, 0]}, {}, {"run.json": [1, 2]}, []])
def test_sums_that_are_something_else_are_damaged(run, files):
    (newest(run) / "sums.json").write_text(json.dumps({"files": files, "sum": sum_of(files)}))
    assert find_damage(newest(run)) == ["sums.json: damaged"]


def test_options_come_from_a_checkpoint_whose_run_json_is_as_written(run):
    """A flipped digit would be another model, which the older checkpoint is not."""
    path = newest(run) / "run.json"
    path.write_text(path.read_text().replace('"dim": 32', '"dim": 36'))
    assert saved_config(run).model.dim == 32


@pytest.mark.parametrize(
    "change",
    [
        {"speed": 1}, {"model": 7}, {"model": {"dim": "8"}}, '"parameters": 7', '"step": true', "[" * 9999,
    ],
)  # fmt: skip
def test_run_json_with_options_of_another_type_or_of_another_shape_is_named(run, change):
    checkpoint = newest(run)
    shutil.rmtree(checkpoint.with_name("step-00000002"))
    text = (checkpoint / "run.json").read_text()
    if isinstance(change, dict):
        about = json.loads(text)
        about["config"].update(change)
        text = json.dumps(about)
    else:
        text = text.rstrip()[:-1] + f", {change}" + "}"
    replace(checkpoint, "run.json", text.encode())
    with pytest.raises(TrainError, match="is not a checkpoint of this fsdp-train"):
        saved_config(run)


def test_options_are_the_same_when_read_back():
    config = RunConfig(data=("a",), lr=1.0, out="x", hf_config=None)
    assert RunConfig.from_json(json.loads(json.dumps({**config.to_json(), "data": ["a"]}))) == config


@pytest.mark.parametrize(
    ("change", "data", "says"),
    [
        ({"optimizer": None}, None, "was made with optimizer adamw, this run has torch-adamw"),
        ({}, "other", "was made with data [0-9a-f]+, this run has other"),
    ],
)
def test_a_run_json_of_other_options_or_data_is_of_another_run(run, change, data, says):
    about = read_about(newest(run))
    config, data = saved_config(run), data or about["identity"]["data"]
    about["config"].update(change)
    about["config"] = {name: value for name, value in about["config"].items() if value is not None}
    with pytest.raises(TrainError, match=says):
        check_same_run(newest(run), about, config, data, about["parameters"])


def test_a_device_of_no_kind_is_one_line_also_with_resume(run, capsys):
    assert main(["--device", "rows:2", "--resume", "--out", str(run)]) == 2
    assert capsys.readouterr().err == "fsdp-train: --device 'rows:2': expected one of auto, cpu, cuda\n"


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


@pytest.mark.parametrize("text", ["x" * 5000, "../../other", "/etc", "step-00000004/../step-00000002", ""])
def test_a_name_of_the_latest_checkpoint_that_is_none_is_passed_over(run, text):
    (run / "checkpoints" / "latest").write_text(text)
    assert latest(run) == run / "checkpoints" / "step-00000004"
