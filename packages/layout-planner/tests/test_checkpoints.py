"""Shapes come from safetensors headers; whatever is wrong with a checkpoint is said with the file's name."""

import json
import re
import struct
import sys

import pytest

from layout_planner.checkpoints import read_checkpoint
from layout_planner.models import ShapeEntry


def write(path, shapes, *, data=True, sparse=False):
    """A safetensors file in float32, written by its specification."""
    header, end = {}, 0
    for name, shape in shapes.items():
        numel = 4
        for size in shape:
            numel *= size
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + numel]}
        end += numel
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if sparse:
            file.truncate(8 + len(text) + end)
        elif data:
            file.write(bytes(end))


def layers(numbers, prefix="model.layers"):
    return {
        f"{prefix}.{number}.{name}": shape
        for number in numbers
        for name, shape in (("mlp.up.weight", (6, 4)), ("norm.weight", (4,)))
    }


def write_index(folder, files):
    for name, shapes in files.items():
        write(folder / name, shapes)
    entries = {tensor: name for name, shapes in files.items() for tensor in shapes}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": entries}))
    return index


ENDS = {"model.embed_tokens.weight": (9, 4), "model.norm.weight": (4,), "lm_head.weight": (9, 4)}
TWO_FILES = {
    "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": (9, 4), **layers(range(7))},
    "model-00002-of-00002.safetensors": {
        **layers(range(7, 12)),
        "model.norm.weight": (4,),
        "lm_head.weight": (9, 4),
    },
}


def summary(model):
    return [(group.name, group.count, len(group.tensors)) for group in model.groups]


def test_layers_are_grouped_by_number_with_embeddings_and_head_apart(tmp_path):
    write(tmp_path / "m.safetensors", {**layers(range(3)), **ENDS})
    model = read_checkpoint(tmp_path / "m.safetensors")
    assert summary(model) == [("embed", 1, 1), ("model.layers.0-2", 3, 2), ("head", 1, 2)]
    assert model.groups[1].tensors == (ShapeEntry("mlp.up.weight", (6, 4)), ShapeEntry("norm.weight", (4,)))


def test_an_index_or_its_folder_reads_all_its_files(tmp_path):
    for path in (write_index(tmp_path, TWO_FILES), tmp_path, str(tmp_path)):
        model = read_checkpoint(path)
        assert summary(model) == [("embed", 1, 1), ("model.layers.0-11", 12, 2), ("head", 1, 2)]
        assert model.numel == 12 * 28 + 76
    assert model.name == tmp_path.name


def test_layers_of_other_shapes_are_groups_of_their_own_in_order_of_number(tmp_path):
    shapes = {**layers([0, 2, 3, 10]), "model.layers.1.norm.weight": (4,)}
    write(tmp_path / "m.safetensors", shapes)
    assert summary(read_checkpoint(tmp_path)) == [("model.layers.0,2-3,10", 4, 2), ("model.layers.1", 1, 1)]


def test_numbers_of_experts_inside_a_layer_are_no_layers(tmp_path):
    write(tmp_path / "m.safetensors", {f"layers.0.mlp.experts.{n}.up.weight": (6, 4) for n in range(3)})
    assert summary(read_checkpoint(tmp_path)) == [("layers.0", 1, 3)]


def test_stacked_experts_are_recognised_and_scalars_are_tensors(tmp_path):
    shapes = {"mlp.experts.down_proj": (3, 6, 4), "conv.weight": (3, 6, 4), "scale": ()}
    write(tmp_path / "m.safetensors", {f"layers.0.{name}": shape for name, shape in shapes.items()})
    entries = read_checkpoint(tmp_path).groups[0].tensors
    assert {entry.name: entry.shape for entry in entries} == shapes
    assert {entry.name: entry.experts for entry in entries if entry.experts > 1} == {
        "mlp.experts.down_proj": 3
    }


def test_only_headers_are_read(tmp_path):
    write(tmp_path / "m.safetensors", {"layers.0.w": (1 << 20, 1 << 12)}, sparse=True)  # 16 GB, none on disk
    assert read_checkpoint(tmp_path).numel == 1 << 32


def refused(path, match):
    with pytest.raises(ValueError, match=match):
        read_checkpoint(path)


def cut_short(path):
    write(path, layers([0]))
    path.write_bytes(path.read_bytes()[:20])


FILE, INDEX = "m.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "make", "match"),
    [
        ("none.safetensors", None, r"none\.safetensors: no such file.*give a \.safetensors file"),
        ("model.bin", lambda path: path.write_bytes(b"weights"), r"unknown kind of file; give a"),
        (FILE, lambda path: path.write_bytes(b""), r"not a complete safetensors file \(0 bytes"),
        (FILE, lambda path: write(path, layers([0]), data=False), "not a complete .*download it again"),
        (FILE, cut_short, r"not a complete safetensors file \(20 bytes"),
        (FILE, lambda path: path.write_bytes(struct.pack("<Q", 8) + b"{]{]{]{]"), r"not a .* \(16 bytes"),
        (FILE, lambda path: write(path, {}), "holds no tensors"),
        (
            FILE,
            lambda path: write(path, {"l.0.w": (3, 0)}),
            r"tensor l\.0\.w of shape \(3, 0\) has no element",
        ),
        (INDEX, lambda path: path.write_text("weights"), "not JSON"),
        (INDEX, lambda path: path.write_text("[" * 100_000), "not JSON"),
        (INDEX, lambda path: path.write_text('{"weight_map": ' + "9" * 100_000 + "}"), "not JSON"),
        (INDEX, lambda path: path.write_text("[]"), "has no weight_map"),
        (INDEX, lambda path: path.write_text("{}"), "has no weight_map"),
        (INDEX, lambda path: path.write_text('{"weight_map": []}'), "has no weight_map"),
        (INDEX, lambda path: path.write_text('{"weight_map": {"w": 3}}'), "has no weight_map"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_by_its_name_and_what_is_wrong(tmp_path, name, make, match):
    if make is not None:
        make(tmp_path / name)
    refused(tmp_path / name, rf"{re.escape(name)}: .*{match}" if make else match)


def test_a_folder_without_a_checkpoint_or_index_is_refused(tmp_path):
    refused(tmp_path, r"holds no \.safetensors and no")
    write(tmp_path / "a.safetensors", layers([0]))
    write(tmp_path / "b.safetensors", layers([1]))
    refused(tmp_path, r"holds 2 files \*\.safetensors \(a\.safetensors, b\.safetensors\)")


def test_a_missing_file_of_an_index_is_refused_with_what_it_should_hold(tmp_path):
    index = write_index(tmp_path, TWO_FILES)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(
        index, r"model-00002-of-00002\.safetensors: missing, but .* says it holds lm_head\.weight and 11 more"
    )


def test_a_tensor_that_no_file_holds_is_refused_by_name(tmp_path):
    index = write_index(tmp_path, TWO_FILES)
    write(tmp_path / "model-00002-of-00002.safetensors", {**layers(range(7, 12)), "lm_head.weight": (9, 4)})
    refused(index, r"model-00002-of-00002\.safetensors: model\.norm\.weight is not in it")


@pytest.mark.parametrize("library", ["safetensors", "numpy"])
def test_a_missing_library_is_named_with_what_installs_it(tmp_path, monkeypatch, library):
    write(tmp_path / "m.safetensors", layers([0]))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}.*pip install safetensors numpy"):
        read_checkpoint(tmp_path)
