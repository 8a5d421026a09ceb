"""The shape of a model from its checkpoint: safetensors headers only, never the weights.

    model.safetensors  |  model.safetensors.index.json and its files  |  a folder with either
        ->  every tensor's name and shape  ->  groups by layer number  ->  ModelShape

Stored dtypes are ignored: a plan is for the dtype of training, and every tensor counts as a parameter of it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from layout_planner._checks import shortened
from layout_planner.models import GroupShape, ModelShape, ShapeEntry

Shape = tuple[int, ...]
_ALLOWED = "a .safetensors file, a .safetensors.index.json, or a folder with one of these"


def read_checkpoint(path: str | Path) -> ModelShape:
    """The shape of the model in a checkpoint, its tensors grouped by the layer number in their names.

    A tensor whose name contains a number (`model.layers.12.mlp.up_proj.weight`) belongs to that layer, one with
    "embed", "wte" or "wpe" in its name to the embeddings, and all others (final norm, head) form one more group.
    Layers with equal names and shapes are one group with a count. If there is an index, it decides which tensors
    count.

    Args:
        path: a `.safetensors` file, a `.safetensors.index.json`, or a folder with one of these.

    Raises:
        ValueError: nothing there, or it cannot be read; names the file and its content.
        ImportError: safetensors or numpy is not installed; the message says how to install them.
    """
    path = Path(path)
    source = _in_folder(path) if path.is_dir() else path
    if not source.is_file():
        raise ValueError(f"{path}: no such file or folder; give {_ALLOWED}")
    if source.suffix == ".json":
        shapes = _read_index(source)
    elif source.suffix == ".safetensors":
        shapes = _read_file(source)
    else:
        raise ValueError(f"{path}: unknown kind of file; give {_ALLOWED}")
    if not shapes:
        raise ValueError(f"{source}: holds no tensors, so there is nothing to plan")
    name = path.resolve().name if path.is_dir() else path.name
    return ModelShape(name, tuple(_groups(source, shapes)))


def _in_folder(folder: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        files = sorted(folder.glob(pattern))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
            raise ValueError(
                f"{folder}: holds {len(files)} files {pattern} ({names}) and not exactly one index; "
                "name the file to read"
            )
    raise ValueError(f"{folder}: holds no .safetensors and no .safetensors.index.json; give {_ALLOWED}")


def _read_index(index: Path) -> dict[str, Shape]:
    """Shapes of all tensors that the index lists, read from the files it names."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{index}: not JSON ({shortened(error)}); a safetensors index is JSON with a weight_map"
        ) from None
    entries = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
        raise ValueError(f"{index}: has no weight_map from tensors to files, as a safetensors index has")
    shapes: dict[str, Shape] = {}
    for name in sorted(set(entries.values())):
        if len(name) > 255 or not name.isprintable():
            raise ValueError(f"{index}: weight_map names {name[:100]!r}, which is not a file name")
        file = index.parent / name
        listed = sorted(tensor for tensor, place in entries.items() if place == name)
        if not file.is_file():
            raise ValueError(
                f"{file}: missing, but {index.name} says it holds {listed[0][:200]} and "
                f"{len(listed) - 1} more; download it again or fix the index"
            )
        stored = _read_file(file)
        missing = [tensor for tensor in listed if tensor not in stored]
        if missing:
            raise ValueError(
                f"{file}: {missing[0][:200]} is not in it, but {index.name} lists it there "
                f"({len(missing)} of {len(listed)} are missing); index and files belong to different checkpoints"
            )
        shapes.update((tensor, stored[tensor]) for tensor in listed)
    return shapes


def _read_file(file: Path) -> dict[str, Shape]:
    try:
        from safetensors import SafetensorError, safe_open

        import_module("numpy")  # safe_open needs it, but safetensors does not declare it
    except ImportError as error:
        raise ImportError(
            f"reading a checkpoint needs safetensors and numpy ({error}): pip install safetensors numpy"
        ) from None
    try:
        with safe_open(str(file), framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{file}: not a complete safetensors file ({file.stat().st_size} bytes; {shortened(error)}); expected a "
            "header length, a JSON header and all data that it lists: download it again"
        ) from None


def _groups(source: Path, shapes: Mapping[str, Shape]) -> Iterable[GroupShape]:
    """Embeddings, then layers in the order of their numbers with equal ones together, then the rest."""
    layers: dict[tuple[str, int], list[ShapeEntry]] = {}
    outside: dict[str, list[ShapeEntry]] = {"embed": [], "head": []}
    for name in sorted(shapes):
        shape = shapes[name]
        if 0 in shape:
            raise ValueError(
                f"{source}: tensor {name[:200]} of shape {shape} has no elements; expected sizes of at least 1"
            )
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), None)
        if at is not None:
            entry = ShapeEntry(".".join(parts[at + 1 :]), shape, _experts(name, shape))
            layers.setdefault((".".join(parts[:at]), int(parts[at])), []).append(entry)
        else:
            place = "embed" if re.search(r"embed|wte|wpe", name) else "head"
            outside[place].append(ShapeEntry(name, shape, _experts(name, shape)))
    equal: dict[tuple[str, tuple[ShapeEntry, ...]], list[int]] = {}
    for (prefix, number), entries in sorted(layers.items(), key=lambda item: item[0]):
        equal.setdefault((prefix, tuple(entries)), []).append(number)
    if outside["embed"]:
        yield GroupShape("embed", 1, tuple(outside["embed"]))
    for (prefix, tensors), numbers in equal.items():
        yield GroupShape(f"{prefix}.{_ranges(numbers)}".lstrip("."), len(numbers), tensors)
    if outside["head"]:
        yield GroupShape("head", 1, tuple(outside["head"]))


def _experts(name: str, shape: Shape) -> int:
    """How many experts a tensor stacks along dimension 0, judged by a name such as `experts.down_proj`."""
    return shape[0] if re.search(r"\bexperts\.[a-z_]+$", name) and len(shape) >= 2 else 1


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
