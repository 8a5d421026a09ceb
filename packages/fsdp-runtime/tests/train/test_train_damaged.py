"""Damaged files of a run are refused or passed over: faults that `checks/fuzz.py` has found."""

import collections
import functools
import io
import json
import os
import pickle
import shutil
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from train_helpers import TINY, newest, replace, sum_of, text_folder, tiny, train, with_changes

from fsdp_runtime.checkpoint import read_safetensors
from fsdp_runtime.checkpoint.dcp_files import Reader, _Unpickler
from fsdp_runtime.checkpoint.files import Checkpoint
from fsdp_runtime.train import TrainError
from fsdp_runtime.train.__main__ import main
from fsdp_runtime.train.checkpoint import check_same_run, find_damage, latest, read_about
from fsdp_runtime.train.config import RunConfig
from fsdp_runtime.train.data import read_data
from fsdp_runtime.train.report import read_metrics
from fsdp_runtime.train.runs import export, saved_config
from layout_planner import Layout
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


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_metadata_is_not_run(run, tmp_path):
    made = tmp_path / "made"
    checkpoint = newest(run)
    replace(checkpoint, ".metadata", pickle.dumps(Runs(made)))
    with pytest.raises(
        TrainError, match=r"\.metadata: damaged: .* names posix\.mkdir, which is not part of a checkpoint"
    ):
        export(str(checkpoint), str(tmp_path / "model.safetensors"), "fp32")
    assert not made.exists()
    with pytest.raises(AttributeError):  # what torch's own reader does with it
        FileSystemReader(checkpoint).read_metadata()
    assert made.exists()


class GotFrom:
    """Pickled as what `getattr` gives."""

    def __init__(self, owner, name):
        self.got = owner, name

    def __reduce__(self):
        return getattr, self.got


def test_an_enum_as_python_before_3_11_4_pickles_it_is_read_and_no_other_attribute():
    kind = _MEM_FORMAT_ENCODING
    member = pickle.dumps(GotFrom(kind, "TORCH_CONTIGUOUS_FORMAT"))
    assert _Unpickler(io.BytesIO(member)).load() is kind.TORCH_CONTIGUOUS_FORMAT
    other = pickle.dumps(GotFrom(collections.OrderedDict, "fromkeys"))
    with pytest.raises(ValueError, match=r"asks for 'fromkeys' of .*OrderedDict.*, which is not part"):
        _Unpickler(io.BytesIO(other)).load()


def test_a_pickle_among_the_settings_of_an_optimizer_is_not_run(original, run, tmp_path):
    made, checkpoint = tmp_path / "made", newest(run)
    metadata = Reader(checkpoint).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn.endswith(".lr"))
    info = metadata.storage_data[index]
    box = io.BytesIO()
    torch.save(Runs(made), box)
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


def too_large(metadata):
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size([1 << 40, 32])


def elsewhere(metadata):
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../../run.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (too_large, r"model\.embed\.weight of .* does not fit the \d+ bytes of the files"),
        (elsewhere, "is not a file of this folder"),
    ],
)
def test_metadata_of_a_tensor_larger_than_its_file_or_of_files_elsewhere_is_refused(
    run, tmp_path, change, message
):
    checkpoint = newest(run)
    metadata = Reader(checkpoint).read_metadata()
    change(metadata)
    replace(checkpoint, ".metadata", pickle.dumps(metadata))
    with pytest.raises(TrainError, match=message):
        export(str(checkpoint), str(tmp_path / "model.safetensors"), "fp32")


@pytest.mark.parametrize("files", [{"run.json": [1e400, 0]}, {}, {"run.json": [1, 2]}, []])
def test_sums_that_are_something_else_are_damaged(run, files):
    (newest(run) / "sums.json").write_text(json.dumps({"files": files, "sum": sum_of(files)}))
    assert find_damage(newest(run)) == ["sums.json: damaged"]


def test_options_come_from_a_checkpoint_whose_run_json_is_as_written(run, capsys):
    """A flipped digit would be another model, which the older checkpoint is not."""
    path = newest(run) / "run.json"
    path.write_text(path.read_text().replace('"dim": 32', '"dim": 36'))
    assert saved_config(run).model.dim == 32


OTHER_VERSION, OTHER_SHAPE = (
    "has options of another version of fsdp-train: ",
    "is not a checkpoint of fsdp-train",
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": [3]}, OTHER_VERSION + r"TypeError: steps='\(3,\)' is not an option"),
        ({"timeout": "9"}, OTHER_VERSION + "TypeError: timeout='9' is not an option"),
        ({"model": {"dim": "8"}}, OTHER_VERSION + "TypeError: dim='8' is not an option"),
        ({"model": 7}, OTHER_VERSION + "TypeError: model='7' is not an option"),
        ({"resume": 1}, OTHER_VERSION + "TypeError: resume='1' is not an option"),
        ({"speed": 1}, OTHER_VERSION + "TypeError: speed='1' is not an option"),
        *(
            (text, OTHER_SHAPE)
            for text in ('"parameters": {"a": 7}', '"parameters": {"a": [[1], 2]}', '"step": true')
        ),
        ("[" * 9999, OTHER_SHAPE),
    ],
)
def test_run_json_with_an_option_of_another_type_or_of_another_shape_is_named(run, change, says):
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
    with pytest.raises(TrainError, match=says):
        saved_config(run)


def test_options_are_the_same_when_read_back():
    config = RunConfig(data=("a",), lr=1.0, out="x", hf_config=None)
    assert RunConfig.from_json(json.loads(json.dumps({**config.to_json(), "data": ["a"]}))) == config


def test_a_run_json_without_an_optimizer_is_of_another_run(run):
    about = read_about(newest(run))
    config, data = saved_config(run), about["identity"]["data"]
    optimizer = about["config"].pop("optimizer")
    with pytest.raises(TrainError, match="was made with optimizer adamw, this run has torch-adamw"):
        check_same_run(newest(run), about, config, data)
    about["config"].update(optimizer=optimizer, data=[])
    with pytest.raises(TrainError, match="was made with --data the standard library, whose files"):
        check_same_run(newest(run), about, config, "other")
    about["config"]["data"] = [10**30]
    with pytest.raises(TrainError, match="has options of another version"):
        check_same_run(newest(run), about, config, data)


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


def zipped():
    file = io.BytesIO()
    np.savez(file, np.arange(9))
    return file.getvalue()


def npy(head):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + b"\0" * 800


HEAD = b"{'descr': '%s', 'fortran_order': False, 'shape': (%s,), }"
NO_ARRAY = r"(: it is not a \.npy file of plain numbers| holds an archive, expected integer tokens)"
NO_INTEGERS = r" holds .* of shape \(100,\), expected integer tokens"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        *((data, NO_ARRAY) for data in (zipped(), b"", npy(HEAD[:-1] % (b"<u2", b"400") + b"["), npy(b"[" * 500),
                                        npy(HEAD % (b"<u2", b"9" * 99)), npy(b"\xff"))),
        # numpy divides by the size of an element, which may be 0: a signal would end the process.
        *((npy(HEAD % (kind, b"100")), NO_INTEGERS) for kind in (b"|V0", b"<U0", b"|S0", b"<f4")),
    ],
)  # fmt: skip
def test_a_token_array_without_integers_is_named_in_one_line_before_it_is_mapped(data, why, tmp_path):
    path = tmp_path / "tokens.npy"
    path.write_bytes(data)
    with pytest.raises(TrainError, match=rf"tokens\.npy{why}"):
        read_data([str(path)], dtype="uint16", vocab_size=None, held_out=(), seq_len=8)


def test_one_wrong_token_does_not_make_a_vocabulary_of_billions(tmp_path):
    tokens = np.arange(500, dtype=np.uint32)
    tokens[77] = 4_000_000_000
    tokens.tofile(tmp_path / "tokens.bin")
    read = functools.partial(read_data, [str(tmp_path)], dtype="uint32", held_out=(), seq_len=8)
    with pytest.raises(TrainError, match="the largest token of the data is 4000000000: say --vocab-size"):
        read(vocab_size=None)
    assert read(vocab_size=4_000_000_001).vocab_size == 4_000_000_001


@pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "\ud800"])
def test_an_index_with_a_file_that_has_no_such_name_is_refused(name, tmp_path):
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(ValueError, match="which is not a file name"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("config", ["[]", "7", '{"quantization_config": 3}', "[" * 100_000, "{",
                                    *(f'{{"quantization_config": {{"weight_block_size": {size}}}}}'
                                      for size in ("[1]", "[[1], 2]", "[0, 8]", '["4", 8]', "[1.5, 8]"))])  # fmt: skip
def test_a_config_json_without_a_tile_is_refused(config, tmp_path):
    codes = {"w": torch.zeros(8, 16, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 2)}
    save_file(codes, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"not JSON|weight_block_size is"):
        read_safetensors(tmp_path)


def test_a_layout_with_a_huge_value_is_refused_in_a_short_message():
    with pytest.raises(ValueError, match="this is not a layout") as caught:
        Layout.from_json(json.dumps({"format": "9" * 100_000}))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "argv", [["--out", "x" * 5000, "--resume"], ["verify", "y" * 5000], ["9" * 5000], ["--steps", "1\n2"],
             ["export", "a\nb"], ["--bogus\nflag"]],
)  # fmt: skip
def test_whatever_a_command_line_quotes_its_error_is_one_line(argv, capsys):
    assert main(argv if argv[0] in ("verify", "export") or argv[0][0] != "-" else [*TINY, *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fsdp-train: ")
    assert said.count("\n") == 1
    assert len(said) < 2000


@pytest.mark.parametrize("output", ["/", ".", "..", ""])
def test_an_export_to_a_folder_is_refused_in_one_line(run, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), output]) == (2 if output else 0)
    assert capsys.readouterr().err == (
        f"fsdp-train: cannot write {output}: it is a folder\n" if output else ""
    )
