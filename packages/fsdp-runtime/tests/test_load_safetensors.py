"""Files into shards: each rank reads its own bytes, whatever names, dtypes and forms are in the files."""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import (
    TwoLayers,
    full,
    full_values,
    loss_of,
    on_meta,
    seeded,
    shard,
    shard_with_tensor_parallelism,
    tokens,
)
from torch import nn

from fsdp_runtime import QuantizationPolicy, block_policies, fully_shard, load_safetensors, save_safetensors
from fsdp_runtime.checkpoint import Fused, Rename, Split, read_safetensors
from fsdp_runtime.checkpoint.files import Checkpoint
from fsdp_runtime.quantization import BlockFP8, BlockInt8
from layout_planner import Rows
from ragged_shard.testing import on_ranks, rank_mesh, run_ranks

safetensors = pytest.importorskip("safetensors.torch")


def write(path, tensors):
    safetensors.save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, path)


def write_once(path, tensors):
    """On ranks: one of them writes."""
    if dist.get_rank() == 0:
        write(path, tensors)
    dist.barrier()


def assert_values(model, wanted):
    assert all(value.equal(wanted[name]) for name, value in full_values(model).items())


# -- who reads what ----------------------------------------------------------------------------------------------------


def load_on_meta(path, width):
    model = shard(on_meta(width=width))
    report = load_safetensors(model, path)
    wanted = seeded(width=width)
    assert_values(model, wanted.state_dict())
    loss = loss_of(model, tokens())
    loss.backward()
    assert loss.equal(loss_of(wanted, tokens()))
    return report.bytes_read


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_together_read_every_byte_of_the_file_once(ranks, tmp_path):
    write(tmp_path / "model.safetensors", seeded(width=40).state_dict())
    total = sum(t.nbytes for t in seeded(width=40).state_dict().values())
    assert sum(run_ranks(ranks, load_on_meta, tmp_path, 40)) == total


def mapped_bytes(path):
    """Bytes of a file that this process has in memory."""
    about = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(1024 * int(re.findall(r"Rss: +(\d+) kB", one)[0]) for one in about)


def test_pages_of_a_file_that_a_box_does_not_touch_are_not_read(tmp_path):
    path = tmp_path / "m.safetensors"
    write(path, {"a": torch.ones(64, 1 << 16)})  # 16 MiB
    stored = Checkpoint(path).tensors["a"]
    before = mapped_bytes(path)
    assert stored.tensor[8:16].sum() == 8 << 16
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


@pytest.mark.parametrize(
    ("stored", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@on_ranks(2)
def test_values_are_cast_to_the_dtype_of_the_parameters(stored, dtype, tmp_path):
    write_once(tmp_path / "m.safetensors", seeded().to(stored).state_dict())
    model = shard(seeded(seed=1).to(dtype), block_policy=block_policies.tiles(4, 4))
    before = full_values(model)  # gathered once, so that a stale gather would show
    load_safetensors(model, tmp_path)
    for name, t in full_values(model).items():
        assert t.dtype == dtype
        assert not t.equal(before[name]) or name.startswith("norm")
        assert t.equal(safetensors.load_file(tmp_path / "m.safetensors")[name].to(dtype))


@on_ranks(2)
def test_a_forward_after_a_load_gathers_the_new_values(tmp_path):
    write_once(tmp_path / "m.safetensors", seeded().state_dict())
    model = shard(seeded(seed=1))
    model.set_reshard_after_forward(False)
    loss_of(model, tokens())
    load_safetensors(model, tmp_path)
    assert loss_of(model, tokens()).equal(loss_of(seeded(), tokens()))


def load_with_tp(path, replicate):
    mesh = rank_mesh(2, 2, names=("replicate", "shard") if replicate else ("dp", "tp"))
    model = seeded(TwoLayers, seed=1)
    model = (
        fully_shard(model, mesh=mesh) if replicate else shard_with_tensor_parallelism(model, mesh, Rows(2))
    )
    report = load_safetensors(model, path)
    assert_values(model, seeded(TwoLayers).state_dict())
    return report.bytes_read


@pytest.mark.parametrize(("replicate", "copies"), [(False, 1), (True, 2)])
def test_two_dimensional_placements_read_their_own_boxes(replicate, copies, tmp_path):
    tensors = seeded(TwoLayers).state_dict()
    write(tmp_path / "m.safetensors", tensors)
    total = sum(t.nbytes for t in tensors.values())
    replicated = 0 if replicate else tensors["down.bias"].nbytes  # on both ranks of tp
    assert sum(run_ranks(4, load_with_tp, tmp_path, replicate)) == total * copies + replicated


# -- forms of files ----------------------------------------------------------------------------------------------------


def load_values(path):
    model = shard(on_meta())
    load_safetensors(model, path)
    assert_values(model, seeded().state_dict())


@pytest.mark.parametrize("index", [True, False])
def test_several_files_are_loaded_with_and_without_an_index(index, tmp_path):
    tensors = seeded().state_dict()
    names = list(tensors)
    where = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        write(tmp_path / file, {name: tensors[name] for name in names if where[name] == file})
    if index:
        write(tmp_path / "left-over.safetensors", {"other": torch.zeros(3)})
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    run_ranks(2, load_values, tmp_path)


@on_ranks(3)
def test_fp8_files_are_read_back_tile_by_tile(tmp_path):
    quantize = QuantizationPolicy(weights=BlockFP8((8, 16)))
    save_safetensors(shard(seeded(width=20), quantization_policy=quantize), tmp_path, quantized=True)
    # Columns and rows of tiles are cut by these blocks.
    for options in ({"block_policy": block_policies.rows(3)}, {"quantization_policy": quantize}):
        model = shard(on_meta(width=20), **options)
        load_safetensors(model, tmp_path)
        assert_values(model, read_safetensors(tmp_path))


@on_ranks(2)
def test_weights_that_are_kept_as_codes_are_quantized_from_the_file(tmp_path):
    def coded(model):
        model.requires_grad_(False)
        return shard(model, quantization_policy=QuantizationPolicy(at_rest=BlockInt8(8)))

    write_once(tmp_path / "m.safetensors", seeded(width=20).state_dict())
    model = coded(on_meta(width=20))
    load_safetensors(model, tmp_path)
    wanted = full_values(coded(seeded(width=20)))
    assert len(wanted) > len(seeded().state_dict())  # codes and scales
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


RULES: list[Any] = [
    Rename("norm", "model.norm.weight"),
    Fused("qkv", ("q", "k", "v")),
    Split("gate_up", ("gate", "up")),
    Fused("experts", ("experts.{index}.gate", "experts.{index}.up")),
    Split("stacked", ("w.{index}",)),
]


def load_by_rules(path):
    model: Any = fully_shard(Fusing(), block_policy=block_policies.elements(5))
    load_safetensors(model, path, rules=RULES)
    found, given = full_values(model), safetensors.load_file(path / "m.safetensors")
    assert found["norm"].equal(given["model.norm.weight"])
    assert found["qkv"].equal(torch.cat([given["q"], given["k"], given["v"]]))
    assert torch.cat([found["gate"], found["up"]]).equal(given["gate_up"])
    experts = [torch.cat([given[f"experts.{i}.gate"], given[f"experts.{i}.up"]]) for i in range(3)]
    assert found["experts"].equal(torch.stack(experts))
    assert torch.stack([found[f"w.{i}"] for i in range(3)]).equal(given["stacked"])
    return load_safetensors(model, path, rules=RULES).bytes_read


def rule_tensors():
    torch.manual_seed(3)
    shapes = {"model.norm.weight": (6,), "q": (4, 6), "k": (3, 6), "v": (3, 6), "gate_up": (8, 6)}
    shapes.update({f"experts.{i}.{name}": (4, 6) for i in range(3) for name in ("gate", "up")})
    return {name: torch.randn(shape) for name, shape in {**shapes, "stacked": (3, 2, 6)}.items()}


def test_rules_rename_fuse_split_and_stack(tmp_path):
    write(tmp_path / "m.safetensors", rule_tensors())
    total = sum(t.nbytes for t in rule_tensors().values())
    assert sum(run_ranks(3, load_by_rules, tmp_path)) == total


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, r"qkv is made of 3 tensors, of which k is missing"),
        ({"k": (2, 6)}, r"\['q', 'k', 'v'\] have 9 together along dimension 0; qkv expects 10"),
        ({"k": (3, 5)}, r"k has shape \(3, 5\); qkv expects slices of \(10, 6\) along dimension 0"),
        ({"gate_up": (7, 6)}, r"gate of shape \(5, 6\) is a slice of gate_up of shape \(7, 6\); expected \(8, 6\)"),
        ({"stacked": (2, 2, 6)}, r"w.2 of shape .* is a slice of stacked"),
        ({"experts.1.up": None}, r"experts is made of 6 tensors, of which experts.1.up is missing"),
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


def load_tied(path, message):
    model = shard(on_meta(tied=True))
    if message is None:
        load_safetensors(model, path)
        assert full(model.head.weight).equal(seeded(tied=True).embed.weight)
        assert model.head.weight is model.embed.weight
    else:
        with pytest.raises(ValueError, match=message):
            load_safetensors(model, path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("embed.weight",), None),
        (("head.weight",), None),
        (("embed.weight", "head.weight"), None),
        (("embed.weight", "head.weight", "differ"), "embed.weight and head.weight are one parameter"),
    ],
)
def test_a_tied_parameter_is_loaded_under_either_name(names, message, tmp_path):
    tensors = dict(seeded(tied=True).state_dict())
    for name in ("embed.weight", "head.weight"):
        if name not in names:
            del tensors[name]
    if "differ" in names:
        tensors["head.weight"] = tensors["head.weight"] + torch.eye(12, 8)
    write(tmp_path / "m.safetensors", tensors)
    run_ranks(2, load_tied, tmp_path, message)


# -- what is refused, on all ranks, before anything is changed ---------------------------------------------------------


def refuse(path, message, kind, own=False):
    """`own`: rank 1 has a separate copy."""
    model = shard(seeded(seed=1))
    before = full_values(model)
    with pytest.raises(kind, match=message):
        load_safetensors(model, path / "own" if own and dist.get_rank() == 1 else path)
    assert_values(model, before)
    return dist.get_rank()


def wrong(**change):
    tensors = dict(seeded().state_dict())
    for name, value in change.items():
        name = name.replace("__", ".")
        del tensors[name]
        if value is not None:
            tensors[name] = value
    return tensors


@pytest.mark.parametrize(
    ("change", "message", "kind"),
    [
        ({"norm__bias": None}, r"missing \['norm.bias'\], unexpected \[\]", ValueError),
        ({"norm__bias": torch.zeros(9)}, r"norm.bias has shape \(9,\); norm.bias expects \(8,\)", ValueError),
        ({"norm__bias": torch.zeros(8).int()}, "norm.bias is torch.int32; norm.bias expects", TypeError),
        (
            {"norm__bias": torch.zeros(8).to(torch.float8_e4m3fn)},
            "and there is no norm.bias_scale_inv",
            ValueError,
        ),
    ],
)
def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(change, message, kind, tmp_path):
    write(tmp_path / "m.safetensors", wrong(**change))
    assert run_ranks(2, refuse, tmp_path, message, kind) == [0, 1]


@pytest.mark.parametrize(
    ("damage", "message", "kind"),
    [
        ("cut", r"on rank 1: .*own.m.safetensors: not a safetensors file, or damaged", ValueError),
        ("empty", r"on rank 1: .*own.m.safetensors: not a safetensors file, or damaged", ValueError),
        ("fifo", r"on rank 1: .*own.m.safetensors: a FIFO; expected a file", OSError),
        ("folder", r"on rank 1: .*own.m.safetensors: a folder; expected a file", OSError),
        ("index", r"on rank 1: .*own.m.safetensors.index.json: a FIFO; expected a file", OSError),
        ("none", r"on rank 1: .*own has no \*.safetensors", OSError),
        ("other", "ranks do not agree on the checkpoint at", ValueError),
    ],
)
def test_a_problem_of_one_rank_is_raised_by_all(damage, message, kind, tmp_path):
    write(tmp_path / "m.safetensors", seeded().state_dict())
    own = tmp_path / "own"
    own.mkdir()
    content = (tmp_path / "m.safetensors").read_bytes()
    if damage in ("fifo", "index"):
        os.mkfifo(own / ("m.safetensors" + (".index.json" if damage == "index" else "")))
    elif damage == "folder":
        (own / "m.safetensors").mkdir()
    elif damage != "none":
        (own / "m.safetensors").write_bytes(content[:-1] if damage == "cut" else b"")
    if damage == "other":
        write(own / "m.safetensors", dict(reversed(seeded().to(torch.bfloat16).state_dict().items())))
    assert run_ranks(2, refuse, tmp_path, message, kind, own=True) == [0, 1]


def header(entries, data=b"\0" * 64, text=None):
    text = json.dumps(entries).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + data


def entry(shape=(4,), dtype="F32", offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        header({"a": entry(offsets=(0, 12))}),
        header({"a": entry(offsets=(60, 76))}),
        header({"a": entry(), "b": entry(offsets=(8, 24))}),
        header({"a": entry(dtype="F4")}),
        header({"a": entry(shape=(-4,))}),
        header({"a": entry(shape=(True,) * 4)}),
        header({"a": entry(shape=[10**4000] * 1000)}),
        header({"a": [1]}),
        header(None, text=b"[1, 2]"),
        header(None, text=b"{"),
        header(None, text=b"{" * 100000),
        (1 << 62).to_bytes(8, "little") + b"{}",
        b"abc",
    ],
)
def test_a_header_that_lies_is_refused_in_a_short_message_that_names_the_file(content, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(content)
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"m.safetensors: not a safetensors file, or damaged: .") as caught:
        load_safetensors(model, tmp_path)
    assert len(str(caught.value)) < 1000


def test_changed_bytes_of_a_file_are_an_error_or_other_values_and_never_a_crash(tmp_path):
    generator = torch.Generator().manual_seed(0)
    write(tmp_path / "m.safetensors", seeded().state_dict())
    content = (tmp_path / "m.safetensors").read_bytes()
    before, ends = seeded(seed=1).state_dict(), Counter[str]()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for begin, end in [(0, header_bytes), (0, len(content)), (header_bytes, len(content))] * 70:
        changed = bytearray(content)
        for at in torch.randint(begin, end, (3,), generator=generator).tolist():
            changed[at] = int(torch.randint(256, (), generator=generator))
        (tmp_path / "m.safetensors").write_bytes(changed[: len(changed) - int(changed[0] % 2)])
        model = seeded(seed=1)
        try:
            load_safetensors(model, tmp_path)
            ends["loaded"] += 1
        except (ValueError, TypeError, OSError):
            ends["refused"] += 1
            assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert ends["loaded"] > 20
    assert ends["refused"] > 20


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not JSON"),
        ('{"weight_map": [1]}', "no weight_map"),
        ('{"weight_map": {"a": "../m.safetensors"}}', "outside of the index's folder"),
        ('{"weight_map": {"b": "m.safetensors"}}', "b is not in it, but the index lists it there"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
    ],
)
def test_an_index_that_lies_is_refused(index, message, tmp_path):
    write(tmp_path / "m.safetensors", {"a": torch.zeros(4)})
    (tmp_path / "m.safetensors.index.json").write_text(index)
    with pytest.raises((ValueError, OSError), match=message):
        load_safetensors(nn.Linear(2, 2), tmp_path)


def test_not_strict_leaves_what_is_missing_and_says_so(tmp_path):
    write(tmp_path / "m.safetensors", {**wrong(norm__bias=None), "more": torch.zeros(2)})
    model = seeded(seed=1)
    model.norm.bias.data.fill_(5)
    report = load_safetensors(model, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("norm.bias",), ("more",))
    assert model.norm.bias.eq(5).all()
    assert model.head.weight.equal(seeded().head.weight)
    with pytest.raises(ValueError, match=r"norm.bias is on the meta device, and no tensor of .* is for it"):
        load_safetensors(on_meta(), tmp_path, strict=False)


def test_progress_is_shown_where_it_is_asked_for(tmp_path, capsys):
    pytest.importorskip("rich")
    write(tmp_path / "m.safetensors", seeded().state_dict())
    load_safetensors(seeded(), tmp_path)
    assert not capsys.readouterr().out
    load_safetensors(seeded(), tmp_path, progress=True)
    assert "loading" in capsys.readouterr().out


def test_a_bar_without_rich_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "m.safetensors", seeded().state_dict())
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match="progress=True needs rich"):
        load_safetensors(seeded(), tmp_path, progress=True)
