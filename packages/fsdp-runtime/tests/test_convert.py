"""`fsdp-convert`: DCP folders to safetensors and back, compared with the tensors that were saved."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runtime_helpers import assert_same_values, seeded, shard
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_runtime import get_full_state_dict
from fsdp_runtime.checkpoint import STACKED_EXPERTS, Fused, Rename, Split, convert_checkpoint
from fsdp_runtime.checkpoint.byte_ranges import Extent, StoredTensors
from fsdp_runtime.checkpoint.convert import main, parse_rules
from fsdp_runtime.checkpoint.files import Stored
from ragged_shard import Box
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
    assert {tensor.name for tensor in made} == wanted.keys()
    assert_same_values(content, wanted)
    assert made[0].source.left_out == {"optimizer": 1}


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
    monkeypatch.setattr("fsdp_runtime.checkpoint.byte_ranges.READ_BYTES", 16)
    monkeypatch.setattr("fsdp_runtime.checkpoint.convert.READ_BYTES", 24)
    source = saved(tmp_path / "a", {"app": {"model": tensors()}} if entry else tensors())
    convert_checkpoint(source, tmp_path / "b", entry=entry)
    convert_checkpoint(tmp_path / "b", tmp_path / "c", entry=entry)
    again = {name: torch.full_like(tensor, 7) for name, tensor in tensors().items()}
    dcp.load({"app": {"model": again}} if entry else again, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_same_values(again, tensors())


def test_rules_and_their_reverse_give_the_files_that_there_were(tmp_path):
    names = [f"l.mlp.experts.{e}.{part}_proj.weight" for e in range(3) for part in ("gate", "up", "down")]
    content = {name: torch.randn(2, 4) for name in names} | {
        "old.q": torch.randn(4, 2),
        "old.k": torch.randn(1, 2),
    }
    safetensors.save_file(content, tmp_path / "a.safetensors")
    rules = [*STACKED_EXPERTS, Fused("qk", ("old.q", "old.k"))]
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", rules=rules, to_dcp=False)
    fused = safetensors.load_file(tmp_path / "b" / "model.safetensors")
    gate_up = [torch.cat([content[names[3 * e]], content[names[3 * e + 1]]]) for e in range(3)]
    assert torch.equal(fused["l.mlp.experts.gate_up_proj"], torch.stack(gate_up))
    assert torch.equal(fused["qk"], torch.cat([content["old.q"], content["old.k"]]))
    back = [*(rule.reversed() for rule in STACKED_EXPERTS), Split("qk", ("old.q", "old.k"), sizes=(4, 1))]
    convert_checkpoint(tmp_path / "b", tmp_path / "c", rules=back, to_dcp=False)
    again = safetensors.load_file(tmp_path / "c" / "model.safetensors")
    assert_same_values(again, content)


@pytest.mark.parametrize("with_rules", [True, False])
@on_ranks(1)
def test_a_tied_weight_that_files_have_once_loads_into_a_model_with_both_names(with_rules):
    folder = Path(tempfile.mkdtemp())
    wanted = seeded(tied=True).state_dict()
    safetensors.save_file({k: v for k, v in wanted.items() if k != "head.weight"}, folder / "a.safetensors")
    rules = (
        ["--rule", "head.weight=embed.weight", "--rule", "embed.weight=embed.weight"] if with_rules else []
    )
    assert main([str(folder / "a.safetensors"), str(folder / "dcp"), *rules]) == 0
    model = shard(seeded(tied=True, seed=1))
    state = model.state_dict()
    dcp.load(
        state, checkpoint_id=folder / "dcp", planner=DefaultLoadPlanner(allow_partial_load=not with_rules)
    )
    model.load_state_dict(state)
    assert_same_values(get_full_state_dict(model), wanted)
    shutil.rmtree(folder)


def test_rules_of_the_command_line_are_those_of_python():
    texts = ["a.{x}=b.{x}", "{l}.g+{l}.u={l}.gu@1", "q:2+k:1=qk", "{l}.w={l}.{index}.w", "stacked-experts"]
    assert parse_rules(texts) == [
        Rename("a.{x}", "b.{x}"),
        Split("{l}.gu", ("{l}.g", "{l}.u"), 1),
        Split("qk", ("q", "k"), 0, (2, 1)),
        Fused("{l}.w", ("{l}.{index}.w",)),
        *STACKED_EXPERTS,
    ]
    for text in ("a", "a=", "a+b=c+d", "a:x+b=c", "a:1+b=c", "a:1=b", "a=b@x"):
        with pytest.raises(ValueError, match="--rule"):
            parse_rules([text])


@alone
def test_what_cannot_be_converted_is_refused_before_anything_is_written(tmp_path, capsys):
    safetensors.save_file({"x": torch.ones(3), "y": torch.ones(3)}, tmp_path / "a.safetensors")
    cut = saved(tmp_path / "cut", {"w": torch.randn(64, 64)})
    (file,) = cut.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-9000])
    for source, to, rules, message in (
        (
            "a.safetensors",
            "b",
            ["--rule", "n=x+missing"],
            "n is made of 2 tensors, of which missing is missing",
        ),
        ("a.safetensors", "b", ["--rule", "a+b=x"], "x has 3 along dimension 0"),
        ("a.safetensors", "b", ["--rule", "y=x"], "y is made twice"),
        ("a.safetensors", "", [], "not empty"),
        ("cut", "c", [], "damaged"),
    ):
        assert main([str(tmp_path / source), str(tmp_path / to), *rules]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "b").exists()
    two = saved(tmp_path / "two", {"a": torch.randn(9), "w": torch.randn(64, 64)})
    (file,) = two.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-200])  # the second file cannot be written
    with pytest.raises(ValueError, match="w: its chunk is damaged"):
        convert_checkpoint(two, tmp_path / "d", max_file_bytes=100)
    assert not list((tmp_path / "d").iterdir())


@pytest.mark.long
def test_converting_takes_little_memory_in_both_directions(tmp_path):
    (tmp_path / "files").mkdir()
    tensors = {f"w.{number}": torch.randn(1 << 23).bfloat16() for number in range(40)}  # 640 MiB, a box each
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


def test_elements_that_files_have_twice_do_not_stand_for_those_that_are_missing(tmp_path):
    file = tmp_path / "raw"
    file.write_bytes(torch.ones(4).numpy().tobytes())
    twice = [Extent(file, 0, Box((0,), (2,)), (1,))] * 2
    tensor = Stored("w", file, torch.empty(4, device="meta"))
    stored = StoredTensors(file, {"w": tensor}, lambda name: twice)
    with pytest.raises(ValueError, match=r"w has elements from \(0,\) of \(2,\) twice"):
        stored.read("w", Box((0,), (4,)))
