"""`fsdp-convert`: DCP folders to safetensors and back, compared with the tensors that were saved."""

import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime_helpers import assert_same_values, seeded, shard
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_runtime import QuantizationPolicy, get_full_state_dict
from fsdp_runtime.checkpoint import convert_checkpoint
from fsdp_runtime.checkpoint.convert import Reader, main
from fsdp_runtime.quantization import BlockInt8
from ragged_shard.testing import on_ranks, run_ranks

safetensors = pytest.importorskip("safetensors.torch")


alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save_model(folder, system):
    model = seeded()
    if system == "ours":
        shard(model)
    else:
        torch_fully_shard(model)
    dcp.save({**model.state_dict(), "optimizer": {"step": torch.ones(1)}}, checkpoint_id=folder)


@pytest.mark.parametrize("system", ["ours", "FSDP2"])
def test_a_folder_of_three_ranks_becomes_the_full_model(system, tmp_path):
    run_ranks(3, save_model, str(tmp_path / "dcp"), system)
    made = convert_checkpoint(tmp_path / "dcp", tmp_path / "files")
    content, wanted = safetensors.load_file(tmp_path / "files" / "model.safetensors"), seeded().state_dict()
    assert set(made) == wanted.keys()
    assert_same_values(content, wanted)


def saved(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def tensors():
    torch.manual_seed(0)
    return {
        "w": torch.randn(5, 3).T,  # saved with its strides
        "half": torch.randn(4, 4).bfloat16(),
        "number": torch.tensor(3),
        "empty": torch.empty(0, 4),
    }


@alone
@pytest.mark.parametrize("entry", [None, "app.model"])
def test_values_come_back_after_both_conversions(entry, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_runtime.checkpoint.convert._BIN", 24)
    source = saved(tmp_path / "a", {"app": {"model": tensors()}} if entry else tensors())
    convert_checkpoint(source, tmp_path / "b", entry=entry)
    convert_checkpoint(tmp_path / "b", tmp_path / "c", entry=entry)
    again = {name: torch.full_like(tensor, 7) for name, tensor in tensors().items()}
    dcp.load({"app": {"model": again}} if entry else again, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_same_values(again, tensors())


@alone
def test_what_cannot_be_converted_is_refused_before_anything_is_written(tmp_path, capsys):
    safetensors.save_file({"x": torch.ones(3), "y": torch.ones(3)}, tmp_path / "a.safetensors")
    cut = saved(tmp_path / "cut", {"w": torch.randn(64, 64)})
    (file,) = cut.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-9000])
    for source, to, options, message in (
        ("a.safetensors", "", [], "not empty"),
        ("cut", "c", [], "damaged"),
        ("cut", "c", ["--entry", "model"], "no tensors in the entry 'model' of its state dict; it has"),
    ):
        assert main([str(tmp_path / source), str(tmp_path / to), *options]) == 2
        assert message in capsys.readouterr().err
    two = saved(tmp_path / "two", {"a": torch.randn(9), "w": torch.randn(64, 64)})
    (file,) = two.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-200])  # the second file cannot be written
    with pytest.raises(ValueError, match="two: damaged"):
        convert_checkpoint(two, tmp_path / "d", max_file_bytes=100)
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "cut", "two"}


def chunk(row):
    return ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 2]))


def elsewhere(about, w):
    (info,) = about.storage_data.values()
    object.__setattr__(info, "relative_path", "../../run.json")


LIES: list[tuple[Any, str]] = [  # about a tensor of two rows and two columns
    (lambda about, w: setattr(w.properties, "dtype", 1.5), "w has the dtype 1.5"),
    (lambda about, w: setattr(w, "properties", "x"), "w has the dtype None"),
    (lambda about, w: setattr(about, "planner_data", "x"), "planner_data is 'x'"),
    (lambda about, w: about.planner_data.update(w="x"), "planner_data of w is 'x'"),
    (lambda about, w: w.chunks.clear(), "chunks of w have 0 elements; expected 4"),
    (lambda about, w: setattr(w, "size", torch.Size([1 << 40, 2])), r"chunks of w have 4 elements; expected \d+"),
    (lambda about, w: setattr(w, "chunks", [chunk(0), chunk(0)]), r"w has elements of .* \(0, 0\) of .* twice"),
    (lambda about, w: setattr(w, "chunks", [chunk(2)]), r"a chunk of w at \(2, 0\) of .* is not inside"),
    (elsewhere, "damaged: FileNotFoundError"),
]  # fmt: skip


@alone
@pytest.mark.parametrize(("change", "message"), LIES)
def test_metadata_that_lies_is_refused_by_name(change, message, tmp_path):
    folder = saved(tmp_path / "dcp", {"w": torch.ones(2, 2)})
    metadata = Reader(folder).read_metadata()
    change(metadata, metadata.state_dict_metadata["w"])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(folder, tmp_path / "files")


@alone
def test_floating_point_values_are_cast_and_codes_are_not(tmp_path):
    saved(tmp_path / "a", tensors())
    convert_checkpoint(tmp_path / "a", tmp_path / "b", dtype=torch.float16)
    content = safetensors.load_file(tmp_path / "b" / "model.safetensors")
    wanted = {n: t.half() if t.is_floating_point() else t for n, t in tensors().items()}
    assert_same_values(content, wanted)
    safetensors.save_file({"x": torch.ones(3).to(torch.float8_e4m3fn)}, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"x is .*float8_e4m3fn, whose scales are another tensor"):
        convert_checkpoint(tmp_path / "c.safetensors", tmp_path / "d", dtype=torch.float32)


@on_ranks(3)
def test_weights_at_rest_load_after_conversions_to_another_dtype(tmp_path):
    def model(seed):
        policy = QuantizationPolicy(at_rest=BlockInt8(8))
        return shard(seeded(seed=seed).requires_grad_(False), quantization_policy=policy)

    source, loaded = model(0), model(1)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "a")
    if dist.get_rank() == 0:
        for before, after in ("ab", "bc"):
            assert main([str(tmp_path / before), str(tmp_path / after), "--dtype", "bf16"]) == 0
    dist.barrier()
    entries = loaded.state_dict()
    dcp.load(entries, checkpoint_id=tmp_path / "c")
    loaded.load_state_dict(entries)
    for name, param in source.named_parameters():
        wanted = param.full_tensor()
        coded = f"{name}.codes" in entries
        assert loaded.get_parameter(name).full_tensor().equal(wanted if coded else wanted.bfloat16().float())
    assert any(name.endswith(".codes") for name in entries)


@alone
def test_entries_that_are_no_tensors_are_left_out_and_named(tmp_path, caplog):
    state = {"w": torch.ones(2), "head._extra_state": {"amax": 3}}
    saved(tmp_path / "a", {"model": state, "epoch": 3})
    assert convert_checkpoint(tmp_path / "a", tmp_path / "b") == ["w"]
    (message,) = (r.getMessage() for r in caplog.records if r.name.startswith("fsdp_runtime"))
    assert message.endswith("left out, as files hold tensors only: head._extra_state.amax")


@on_ranks(1)
def test_a_tied_weight_that_files_have_once_loads_into_a_model_with_both_names():
    folder = Path(tempfile.mkdtemp())
    wanted = seeded(tied=True).state_dict()
    safetensors.save_file({k: v for k, v in wanted.items() if k != "head.weight"}, folder / "a.safetensors")
    assert main([str(folder / "a.safetensors"), str(folder / "dcp")]) == 0
    model = shard(seeded(tied=True, seed=1))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / "dcp", planner=DefaultLoadPlanner(allow_partial_load=True))
    model.load_state_dict(state)
    assert_same_values(get_full_state_dict(model), wanted)
    shutil.rmtree(folder)


@pytest.mark.long
def test_converting_takes_little_memory_in_both_directions(tmp_path):
    (tmp_path / "files").mkdir()
    tensors = {f"w.{number}": torch.randn(1 << 23).bfloat16() for number in range(40)}  # 640 MiB
    safetensors.save_file(tensors, tmp_path / "files" / "model.safetensors")
    code = (
        "import resource, sys, torch, torch.distributed.checkpoint, safetensors.torch\n"
        "from fsdp_runtime.checkpoint.convert import main\n"
        "usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = usage(); assert main(sys.argv[1:]) == 0; print(usage() - before)"
    )
    for source, destination in (("files", "dcp"), ("dcp", "again")):
        command = [sys.executable, "-c", code, str(tmp_path / source), str(tmp_path / destination)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(ran.stdout.split()[-1]) / 1024 < 100, destination
    (file,) = (tmp_path / "again").glob("*.safetensors")
    loaded = safetensors.load_file(file)
    assert all(loaded[name].equal(tensor) for name, tensor in tensors.items())
