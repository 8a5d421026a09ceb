"""Safetensors files into shards, whatever names, dtypes and forms they have, and the whole model as such files."""

import contextlib
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import (
    TwoLayers,
    assert_same_values,
    full,
    full_values,
    loss_of,
    on_meta,
    same_bits,
    seeded,
    shard,
    shard_with_tensor_parallelism,
    tokens,
)
from torch import nn

from dbuffer import DBuffer
from fsdp_runtime import (
    QuantizationPolicy,
    block_policies,
    fully_shard,
    iter_full_params,
    load_safetensors,
    save_safetensors,
    set_full_state_dict,
)
from fsdp_runtime.checkpoint import Rule, loading, read_safetensors
from fsdp_runtime.checkpoint.files import Checkpoint
from fsdp_runtime.checkpoint.runs import Run
from fsdp_runtime.quantization import BlockFP8
from layout_planner import Rows
from ragged_shard.dist import gather_from_ranks
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

safetensors = pytest.importorskip("safetensors.torch")


def write(path, tensors):
    safetensors.save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, path)


def write_once(path, tensors):
    """On ranks: one of them writes."""
    if dist.get_rank() == 0:
        path.parent.mkdir(exist_ok=True)
        write(path, tensors)
    dist.barrier()


def assert_values(model, wanted):
    assert_same_values(full_values(model), wanted)


# -- who reads what ----------------------------------------------------------------------------------------------------


def read_by_all(report):
    return sum(gather_from_ranks(report.bytes_read))


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


@on_ranks(3)
def test_all_ranks_together_read_every_byte_of_the_file_once(tmp_path):
    wanted, model = seeded(width=40), shard(on_meta(width=40))
    write_once(tmp_path / "model.safetensors", wanted.state_dict())
    assert read_by_all(load_safetensors(model, tmp_path)) == bytes_of(wanted.state_dict())
    assert_values(model, wanted.state_dict())
    assert loss_of(model, tokens()).equal(loss_of(wanted, tokens()))


def mapped_bytes(path):
    """Bytes of a file that this process has in memory."""
    about = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(1024 * int(re.findall(r"Rss: +(\d+) kB", one)[0]) for one in about)


def test_pages_of_a_file_that_a_box_does_not_touch_are_not_read(tmp_path):
    path = tmp_path / "m.safetensors"
    write(path, {"a": torch.ones(64, 1 << 16)})  # 16 MiB
    tensor = Checkpoint(path).tensors["a"]
    before = mapped_bytes(path)
    assert tensor[8:16].sum() == 8 << 16
    assert (2 << 20) <= mapped_bytes(path) - before <= (6 << 20)  # whole pages, of up to 2 MiB


@on_ranks(3)
def test_empty_shards_empty_tensors_and_buffers_are_loaded(tmp_path):
    """More ranks than rows, an empty parameter, an ignored one, a buffer."""
    tensors = {
        "tiny": torch.arange(10.0).view(2, 5),
        "none": torch.zeros(0, 3),
        "kept": torch.ones(3),
        "count": torch.tensor(7),
    }
    model: Any = nn.Module()
    for name in ("tiny", "none", "kept"):
        setattr(model, name, nn.Parameter(torch.zeros_like(tensors[name])))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    fully_shard(model, ignored_params={model.kept})
    write_once(tmp_path / "m.safetensors", tensors)
    assert load_safetensors(model, tmp_path).bytes_read >= 3 * 4 + 8
    assert_values(model, tensors)


@on_ranks(2)
def test_values_are_cast_to_the_dtype_of_parameters_and_used_by_the_next_forward(tmp_path):
    bf16, fp32 = torch.bfloat16, torch.float32
    for stored, dtype in ((bf16, fp32), (fp32, bf16)):
        write_once(tmp_path / str(stored) / "m.safetensors", seeded().to(stored).state_dict())
        model = shard(seeded(seed=1).to(dtype), block_policy=block_policies.tiles(4, 4))
        load_safetensors(model, tmp_path / str(stored))
        for name, value in full_values(model).items():
            assert value.dtype == dtype
            assert value.equal(seeded().get_parameter(name).to(stored).to(dtype))
    tmp_path = tmp_path / str(fp32)
    model = shard(seeded(seed=1))
    model.set_reshard_after_forward(False)
    loss_of(model, tokens())
    load_safetensors(model, tmp_path)
    assert loss_of(model, tokens()).equal(loss_of(seeded(), tokens()))


@on_ranks(4)
def test_two_dimensional_placements_read_their_own_boxes(tmp_path):
    tensors = seeded(TwoLayers).state_dict()
    write_once(tmp_path / "m.safetensors", tensors)
    model = fully_shard(seeded(TwoLayers, seed=1), mesh=rank_mesh(2, 2, names=("replicate", "shard")))
    assert read_by_all(load_safetensors(model, tmp_path)) == 2 * bytes_of(tensors)
    assert_values(model, tensors)
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    model = shard_with_tensor_parallelism(seeded(TwoLayers, seed=1), mesh, Rows(2))
    twice = tensors["down.bias"].nbytes  # on both ranks of tp
    assert read_by_all(load_safetensors(model, tmp_path)) == bytes_of(tensors) + twice
    assert_values(model, tensors)


# -- forms of files ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_several_files_are_loaded_with_and_without_an_index(tmp_path):
    tensors = seeded().state_dict()
    where = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(where.values())):
        write_once(tmp_path / file, {name: tensors[name] for name in tensors if where[name] == file})
    for index in (False, True):
        if index:
            write_once(tmp_path / "left-over.safetensors", {"other": torch.zeros(3)})
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
            dist.barrier()
        model = shard(on_meta())
        load_safetensors(model, tmp_path)
        assert_values(model, tensors)
        dist.barrier()


@on_ranks(3)
def test_fp8_files_are_read_back_tile_by_tile(tmp_path):
    tensors, wanted = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in seeded(width=20).state_dict().items():
        tensors[name] = wanted[name] = value
        if name.startswith("blocks") and value.ndim == 2:
            codes, scales = value.to(torch.float8_e4m3fn), torch.rand(3, 2) + 1
            spread = scales.repeat_interleave(8, 0).repeat_interleave(16, 1)[:20, :20]
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            wanted[name] = codes.float() * spread
    assert len(tensors) == len(wanted) + 3
    if dist.get_rank() == 0:
        config = {"quantization_config": {"weight_block_size": [8, 16]}}
        (tmp_path / "config.json").write_text(json.dumps(config))
    write_once(tmp_path / "m.safetensors", tensors)
    assert_same_values(read_safetensors(tmp_path), wanted)
    # Columns and rows of tiles are cut by these blocks.
    quantize = QuantizationPolicy(weights=BlockFP8((8, 16)))
    for options in ({"block_policy": block_policies.rows(3)}, {"quantization_policy": quantize}):
        model = shard(on_meta(width=20), **options)
        load_safetensors(model, tmp_path)
        assert_values(model, wanted)


class Fusing(nn.Module):
    """Names and forms that differ from those in the file."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(6))
        self.qkv = nn.Parameter(torch.zeros(10, 6))
        self.gate, self.up = nn.Parameter(torch.zeros(5, 6)), nn.Parameter(torch.zeros(3, 6))
        self.experts = nn.Parameter(torch.zeros(3, 8, 6))
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(2, 6)) for _ in range(3)])


RULES = [
    Rule("norm", "model.norm.weight"),
    Rule("qkv", ("q", "k", "v")),
    Rule(("gate", "up"), "gate_up"),
    Rule("experts", ("experts.{index}.gate", "experts.{index}.up")),
    Rule("w.{index}", "stacked"),
]


def rule_tensors():
    torch.manual_seed(3)
    shapes = {"model.norm.weight": (6,), "q": (4, 6), "k": (3, 6), "v": (3, 6), "gate_up": (8, 6)}
    shapes.update({f"experts.{i}.{name}": (4, 6) for i in range(3) for name in ("gate", "up")})
    return {name: torch.randn(shape) for name, shape in {**shapes, "stacked": (3, 2, 6)}.items()}


@on_ranks(3)
def test_rules_rename_fuse_split_and_stack(tmp_path):
    given = rule_tensors()
    model: Any = fully_shard(Fusing(), block_policy=block_policies.elements(5))
    write_once(tmp_path / "m.safetensors", given)
    assert read_by_all(load_safetensors(model, tmp_path, rules=RULES)) == bytes_of(given)
    found = full_values(model)
    assert found["norm"].equal(given["model.norm.weight"])
    assert found["qkv"].equal(torch.cat([given["q"], given["k"], given["v"]]))
    assert torch.cat([found["gate"], found["up"]]).equal(given["gate_up"])
    experts = [torch.cat([given[f"experts.{i}.gate"], given[f"experts.{i}.up"]]) for i in range(3)]
    assert found["experts"].equal(torch.stack(experts))
    assert torch.stack([found[f"w.{i}"] for i in range(3)]).equal(given["stacked"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, r"qkv is made of 3 tensors, and the files have no k"),
        ({"k": (2, 6)}, r"qkv \(10, 6\) of the model cannot be q \(4, 6\), k \(2, 6\), v \(3, 6\) of the files"),
        ({"k": (3, 5)}, r"qkv \(10, 6\) of the model cannot be .*k \(3, 5\)"),
        ({"gate_up": (7, 6)}, r"gate \(5, 6\), up \(3, 6\) of the model cannot be gate_up \(7, 6\)"),
        ({"gate_up": (6, 8)}, r"gate \(5, 6\), up \(3, 6\) of the model cannot be gate_up \(6, 8\)"),
        ({"stacked": (2, 2, 6)}, r"element 2 of w.2 \(2, 6\) of the model cannot be stacked \(2, 2, 6\)"),
        ({"experts.1.up": None}, r"experts is made of 6 tensors, and the files have no experts.1.up"),
        ({"experts.1.up": (4, 3)}, r"element 1 of experts \(3, 8, 6\) of the model cannot be .*up \(4, 3\)"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_is_an_error_by_name(change, message, tmp_path):
    tensors = rule_tensors()
    for name, shape in change.items():
        del tensors[name]
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    write(tmp_path / "m.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        load_safetensors(Fusing(), tmp_path, rules=RULES)


# -- tied parameters ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_tied_parameter_is_loaded_by_either_name_and_refused_if_both_differ(tmp_path):
    tensors = seeded(tied=True).state_dict()
    for left_out in ({"head.weight"}, {"embed.weight"}, set()):
        path = tmp_path / "-".join(("m", *left_out))
        write_once(path / "m.safetensors", {n: t for n, t in tensors.items() if n not in left_out})
        model = shard(on_meta(tied=True))
        assert load_safetensors(model, path).tied == (("embed.weight", "head.weight"),)
        assert full(model.head.weight).equal(tensors["embed.weight"]), left_out
        assert model.head.weight is model.embed.weight
    differ = {**tensors, "head.weight": tensors["head.weight"] + torch.eye(12, 8)}
    write_once(tmp_path / "differ" / "m.safetensors", differ)
    with pytest.raises(ValueError, match=r"embed.weight and head.weight are one parameter"):
        load_safetensors(shard(on_meta(tied=True)), tmp_path / "differ")


# -- what is refused, on all ranks, before anything is changed ---------------------------------------------------------


def refuse(path, message):
    model = shard(seeded(seed=1))
    before = full_values(model)
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        load_safetensors(model, path)
    assert_values(model, before)


@on_ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(tmp_path):
    for number, (value, message) in enumerate((
        (None, r"missing \['norm.bias'\], unexpected \[\]"),
        (torch.zeros(9), r"norm.bias \(8,\) of the model cannot be norm.bias \(9,\) of the files"),
        (torch.zeros(8).int(), "norm.bias is torch.int32; norm.bias expects"),
        (torch.zeros(8).to(torch.float8_e4m3fn), "and there is no norm.bias_scale_inv"),
    )):  # fmt: skip
        path = tmp_path / str(number)
        tensors = {**seeded().state_dict(), "norm.bias": value}
        write_once(path / "m.safetensors", {n: t for n, t in tensors.items() if t is not None})
        refuse(path, message)


DAMAGES: Any = {  # what is done to the file of rank 1, and what all ranks say
    "cut": (lambda file, content: file.write_bytes(content[:-1]), "not a safetensors file, or damaged"),
    "empty": (lambda file, content: file.write_bytes(b""), "not a safetensors file, or damaged"),
    "folder": (lambda file, _: file.mkdir(), "m.safetensors: not a safetensors file, or damaged"),
    "none": (lambda *_: None, r"has no \*.safetensors"),
}


@on_ranks(2)
def test_a_problem_of_one_rank_is_raised_by_all(tmp_path):
    whole, rank = tmp_path / "whole", dist.get_rank()
    write_once(whole / "m.safetensors", seeded().state_dict())
    for name, (damage, message) in DAMAGES.items():
        own = tmp_path / name
        if rank == 1:
            own.mkdir()
            damage(own / "m.safetensors", (whole / "m.safetensors").read_bytes())
        refuse(own if rank == 1 else whole, rf"on rank 1: .*{name}.*{message}")
    other = seeded().to(torch.bfloat16).state_dict()
    write_once(tmp_path / "other" / "m.safetensors", dict(reversed(other.items())))
    refuse(tmp_path / "other" if rank == 1 else whole, "ranks do not agree on the checkpoint at")


@on_ranks(2)
def test_memory_that_one_rank_does_not_get_is_an_error_on_every_rank(tmp_path):
    weights = seeded().state_dict()
    write_once(tmp_path / "m.safetensors", weights)
    for load in (lambda model: load_safetensors(model, tmp_path), lambda m: set_full_state_dict(m, weights)):
        model, allocate = on_meta(), DBuffer._allocate
        model.blocks[0].bias.requires_grad_(False)  # two groups, the first of which gets none
        shard(model)
        calls: list[DBuffer] = []

        def fail(buffer, pin, allocate=allocate, calls=calls):
            calls.append(buffer)
            if dist.get_rank() == 1 and len(calls) == 2:
                raise MemoryError("none left")
            allocate(buffer, pin)

        with (
            mock.patch.object(DBuffer, "_allocate", fail),
            pytest.raises(RuntimeError, match="on rank 1: MemoryError: none left"),
        ):
            load(model)


@on_ranks(2)
def test_a_read_that_fails_on_one_rank_after_the_checks_is_an_error_on_every_rank(tmp_path):
    write_once(tmp_path / "m.safetensors", seeded().state_dict())
    model, read = shard(on_meta()), loading._Plan._read

    def fail(plan, piece, *arguments):
        if dist.get_rank() == 1 and piece.file == "head.weight":
            raise OSError("input/output error")
        return read(plan, piece, *arguments)

    with mock.patch.object(loading._Plan, "_read", fail):
        message = r"on rank 1: head.weight could not be loaded from .*m.safetensors,.*OSError: input/output"
        with pytest.raises(RuntimeError, match=message):
            load_safetensors(model, tmp_path)
    load_safetensors(model, tmp_path)
    assert_values(model, seeded().state_dict())


def test_not_strict_leaves_what_is_missing_and_says_so(tmp_path):
    tensors = {name: value for name, value in seeded().state_dict().items() if name != "norm.bias"}
    write(tmp_path / "m.safetensors", {**tensors, "more": torch.zeros(2)})
    model = seeded(seed=1).to(torch.bfloat16)
    model.head.float()
    model.norm.bias.data.fill_(5)
    model.register_buffer("table", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(
        ValueError, match=r"missing .*norm.*unexpected .*more.*buffers without values .*table"
    ):
        load_safetensors(model, tmp_path)
    report = load_safetensors(model, tmp_path, strict=False)
    assert (report.missing, report.unexpected, report.empty) == (("norm.bias",), ("more",), ("table",))
    assert {*report.cast} == {name for name in tensors if not name.startswith("head.")}
    assert (report.tied, report.elsewhere) == ((), ("table",))
    assert model.norm.bias.eq(5).all()
    assert model.head.weight.equal(seeded().head.weight)
    with pytest.raises(ValueError, match=r"norm.bias is on the meta device, and no tensor of .* is for it"):
        load_safetensors(on_meta(), tmp_path, strict=False)


def save(folder, options, tied=False):
    model = shard(seeded(tied=tied))
    return [str(path) for path in save_safetensors(model, folder, **options)]


@pytest.mark.parametrize("tied", [False, True])
def test_one_file_holds_the_full_model_and_a_tied_parameter_once(tied, tmp_path):
    (found,) = run_ranks(3, save, str(tmp_path), {}, tied=tied)[-1]
    assert found == str(tmp_path / "model.safetensors")
    content, wanted = safetensors.load_file(found), seeded(tied=tied).state_dict()
    assert content.keys() == wanted.keys() - ({"head.weight"} if tied else set())
    assert all(torch.equal(content[key], wanted[key]) for key in content)


def test_several_files_have_an_index_and_the_dtype_asked_for(tmp_path):
    files = run_ranks(2, save, str(tmp_path), {"max_file_bytes": 400, "dtype": torch.bfloat16})[0]
    assert len(files) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    wanted = seeded().state_dict()
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in wanted.values())
    for key, name in index["weight_map"].items():
        assert torch.equal(safetensors.load_file(tmp_path / name)[key], wanted[key].bfloat16())
    assert not list(tmp_path.glob("*.unfinished"))


@on_ranks(2)
def test_an_earlier_export_into_the_folder_is_not_read_for_the_new_one(tmp_path):
    for seed, limit in enumerate((10**9, 400, 900, 10**9)):
        model, loaded = shard(seeded(seed=seed)), shard(seeded(seed=9))
        files = save_safetensors(model, tmp_path, max_file_bytes=limit)
        load_safetensors(loaded, tmp_path)
        assert same_bits(full_values(loaded).values(), full_values(model).values())
        dist.barrier()
        assert {path.name for path in tmp_path.glob("*.safetensors")} == {path.name for path in files}
        dist.barrier()


@on_ranks(2)
def test_ranks_leave_an_export_together_where_one_has_no_memory(tmp_path):
    model = shard(seeded())
    failing = mock.patch.object(Run, "own", side_effect=MemoryError("none left"))
    for export in (lambda: list(iter_full_params(model)), lambda: save_safetensors(model, tmp_path)):
        here = failing if dist.get_rank() == 0 else nullcontext()
        with here, pytest.raises((RuntimeError, OSError), match="MemoryError: none left"):
            export()


@on_ranks(2)
def test_an_export_that_cannot_write_gathers_no_further_tensors(tmp_path):
    def sent():
        with record_collectives() as record, contextlib.suppress(OSError):
            save_safetensors(model, tmp_path, bucket_bytes=1)
        return sum(event.bytes_sent for event in record.events if event.kind != "all_reduce")

    model = shard(seeded(width=128, blocks=4))
    whole = sent()
    with mock.patch("fsdp_runtime.checkpoint.files._write_tensor", side_effect=OSError("disk full")):
        part = sent()
    assert dist.get_rank() == 0 or part < whole / 2  # rank 0 only receives


@on_ranks(3)
def test_what_cannot_be_written_is_raised_by_name_on_every_rank_and_leaves_nothing(tmp_path):
    rank = dist.get_rank()
    (tmp_path / f"file{rank}").write_text("")
    with pytest.raises(OSError, match=r"rank 0 could not write to .*file0"):
        save(tmp_path / "file0", {})
    out = tmp_path / "out"
    model = seeded()
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(OSError, match=r"phases is torch.complex128, which safetensors files do not have"):
        save_safetensors(model, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(OSError, match=r"pip install safetensors"):
            save_safetensors(seeded(), out)
    assert not out.exists()
