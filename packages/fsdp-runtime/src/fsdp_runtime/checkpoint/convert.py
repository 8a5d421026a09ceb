"""`convert_checkpoint`, `fsdp-convert`: DCP folders to safetensors and back, without the model.

    DCP (ours, FSDP2's, torchtitan's), safetensors  ->  StoredTensors  ->  rules  ->  boxes in order  ->  files

Boxes of 16 MiB are read from where they are and written in the order of the destination's file.
"""

import argparse
import math
import mmap
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ragged_shard import Box

from .byte_ranges import READ_BYTES, StoredTensors, safetensors_tensors, scratch
from .dcp_files import METADATA, dcp_tensors
from .files import Ints, atomic_write, header_of, pieces_of, whole
from .rules import MIXTRAL_EXPERTS, STACKED_EXPERTS, Fused, Piece, Rule, Split, conversions_of
from .safetensors_export import file_names, split_by_size, write_index

_NAMED = {"stacked-experts": STACKED_EXPERTS, "mixtral-experts": MIXTRAL_EXPERTS}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Converted:
    """A tensor of the destination, whose values are read a box at a time.

    Attributes:
        name, shape, dtype: in the destination.
        pieces: where its values are.
        source: with those.
    """

    name: str
    shape: Ints
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    source: StoredTensors

    @property
    def nbytes(self) -> int:
        """Bytes in the destination."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def boxes(self) -> list[Box]:
        """All of it in boxes that fit into memory, in the order of elements."""
        return list(pieces_of(whole(self.shape), READ_BYTES // self.dtype.itemsize)) if self.nbytes else []

    def read(self, box: Box) -> tuple[torch.Tensor, mmap.mmap | bytearray]:
        """The values of a box, and the memory that they are in."""
        values, memory = scratch(box.sizes, self.dtype)
        for piece in self.pieces:
            common = piece.box.intersection(box)
            if common is not None:
                stored = self.source.read(piece.stored.name, piece.in_file(common))
                values[common.slices(box.offsets)].copy_(stored.view(common.sizes))
        return values, memory


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    rules: Sequence[Rule] = (),
    dtype: torch.dtype | None = None,
    entry: str | None = None,
    to_dcp: bool | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> list[Converted]:
    """Convert a checkpoint in one process: no process group, no GPU, no model.

    Takes the memory of a few boxes of 16 MiB, in both directions.

    Args:
        source: a DCP folder, which any number of ranks of any system may have written; or safetensors files.
        destination: a folder that does not exist, or is empty.
        rules: of names and forms, with the destination as the model and the source as the file.
        dtype: of floating-point tensors in the destination. Defaults to theirs.
        entry: of the DCP state dict that is the model's; see `dcp_tensors`. For a DCP destination it defaults to none:
            the tensors are at the top, as torchtitan and `dcp.save(model.state_dict())` write them.
        to_dcp: write DCP. Defaults to the form that the source does not have.
        max_file_bytes: of one safetensors file; a larger tensor has a file to itself.

    Returns:
        What was written, by tensor.

    Raises:
        FileExistsError: the destination is not empty.
        OSError, ValueError, ImportError: of the source: missing, damaged, of another form; a rule that does not fit; a
            dtype that the destination does not have; by name. Nothing is left under a final name.
    """
    destination = Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} is there and not empty; expected a new folder")
    is_dcp = (Path(source) / METADATA).exists()
    to_dcp = not is_dcp if to_dcp is None else to_dcp
    tensors = dcp_tensors(source, entry) if is_dcp else safetensors_tensors(source)
    converted = converted_tensors(tensors, rules, dtype)
    if to_dcp:
        _write_dcp(converted, destination, entry)
        return converted
    bins = split_by_size([tensor.nbytes for tensor in converted], max_file_bytes)
    files = dict(zip(file_names(len(bins)), bins, strict=True))
    destination.mkdir(parents=True, exist_ok=True)
    try:
        for file, members in files.items():
            write_safetensors(destination / file, [converted[index] for index in members], {})
        if len(files) > 1:
            where = {converted[index].name: file for file, members in files.items() for index in members}
            write_index(destination, where, sum(tensor.nbytes for tensor in converted))
    except BaseException:
        for file in files:
            (destination / file).unlink(missing_ok=True)
        raise
    return converted


def converted_tensors(
    source: StoredTensors, rules: Sequence[Rule] = (), dtype: torch.dtype | None = None
) -> list[Converted]:
    """The destination's tensors, by rules and a dtype. Raises ValueError as `convert_checkpoint`."""
    converted = []
    for name, pieces in conversions_of(source.tensors, rules).items():
        dtypes = {piece.stored.dtype for piece in pieces}
        if len(dtypes) > 1 and dtype is None:
            raise ValueError(
                f"{name} is made of tensors of several dtypes ({sorted(map(str, dtypes))}); pass dtype"
            )
        for stored in dtypes if dtype is not None else ():
            if stored.is_floating_point and stored.itemsize == 1:
                raise ValueError(
                    f"{name} is {stored}, whose scales are another tensor: it is not cast; leave out dtype"
                )
        stored = pieces[0].stored.dtype
        kept = stored if dtype is None or not stored.is_floating_point else dtype
        ends = [[o + n for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True)] for piece in pieces]
        shape = tuple(map(max, zip(*ends, strict=True)))
        converted.append(Converted(name, shape, kept, tuple(pieces), source))
    return converted


def write_safetensors(path: Path, tensors: Sequence[Converted], metadata: dict[str, str]) -> None:
    """Write one file, which has its name when it is complete."""
    header = header_of({t.name: (t.dtype, t.shape) for t in tensors}, {"format": "pt", **metadata})
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for box in tensor.boxes:
                file.write(tensor.read(box)[1])


class _Planner(DefaultSavePlanner):
    """DCP's planner for tensors that are read when they are written."""

    def __init__(self, tensors: Sequence[Converted], entry: str | None) -> None:
        super().__init__()
        prefix = f"{entry}." if entry else ""
        self._tensors = {prefix + tensor.name: tensor for tensor in tensors}
        self._last: mmap.mmap | bytearray = bytearray()

    def create_local_plan(self) -> SavePlan:
        """One item for each box."""
        items = []
        for name, tensor in self._tensors.items():
            for box in tensor.boxes or [whole(tensor.shape)]:
                index = MetadataIndex(name, torch.Size(box.offsets))
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                about = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of a box, valid until the next call: torch's writer keeps one box of each tensor until the end."""
        assert write_item.tensor_data is not None
        if isinstance(self._last, mmap.mmap):
            self._last.madvise(mmap.MADV_DONTNEED)
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        values, self._last = self._tensors[write_item.index.fqn].read(box)
        return values


def _write_dcp(tensors: Sequence[Converted], folder: Path, entry: str | None) -> None:
    state: dict[str, object] = {t.name: torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors}
    for key in reversed(entry.split(".") if entry else []):
        state = {key: state}
    with warnings.catch_warnings():  # that one process saves is what is meant
        warnings.simplefilter("ignore", UserWarning)
        try:
            writer = FileSystemWriter(
                folder, per_thread_copy_ahead=0
            )  # one box at a time, also where CUDA is
            dcp_save(state, storage_writer=writer, planner=_Planner(tensors, entry), no_dist=True)
        except CheckpointException as error:  # it does not derive from Exception
            cause = error.failures[0][0]
            raise (cause if isinstance(cause, Exception) else RuntimeError(str(error))) from None


def parse_rules(texts: Sequence[str]) -> list[Rule]:
    """Rules from the command line: a name of `_NAMED`, or `NEW=OLD` with `+` between parts and `@DIM` at the end.

    Raises:
        ValueError: another form; with the text.
    """
    rules: list[Rule] = []
    for text in texts:
        if text in _NAMED:
            rules += _NAMED[text]
            continue
        body, _, dim = text.partition("@")
        new, equals, old = body.partition("=")
        made, sizes = zip(*(part.partition(":")[::2] for part in new.split("+")), strict=True)
        files = tuple(old.split("+"))
        numbers = tuple(int(size) for size in sizes if size.isdecimal())
        complete = not any(sizes) or (len(numbers) == len(made) > 1)
        if not (equals and all(made) and all(files) and complete) or not (dim or "0").isdecimal():
            raise ValueError(
                f"--rule {text!r}: expected NEW=OLD, NEW=OLD+OLD, NEW+NEW=OLD or one of {list(_NAMED)}"
            )
        if len(made) > 1 and len(files) > 1:
            raise ValueError(f"--rule {text!r}: has several parts on both sides; give two rules")
        stacked = "{index}" in made[0] and "{index}" not in files[0]
        if len(made) > 1 or stacked:
            rules.append(Split(files[0], made, int(dim or 0), numbers or None))
        else:
            rules.append(Fused(made[0], files, int(dim or 0)))
    return rules


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdp-convert``; returns the exit status: 0, or 2 for an error."""
    parser = argparse.ArgumentParser(
        prog="fsdp-convert",
        description="Convert a checkpoint, torch.distributed.checkpoint <-> safetensors, without the model. Reads "
        "folders of fsdp_runtime, FSDP2 and torchtitan.",
        epilog="Rules: 'a.{x}=b.{x}' renames; '{l}.qkv={l}.q+{l}.k+{l}.v' fuses; '{l}.gate+{l}.up={l}.gate_up' splits, "
        "with sizes where parts differ: '{l}.q:64+{l}.k:16+{l}.v:16={l}.qkv'; '{l}.w={l}.experts.{index}.w' stacks. "
        "'@1' at the end: along dimension 1. 'head=embed' and 'embed=embed': both names, for models that tie them. "
        "Tensors that no rule names keep their names.",
    )
    parser.add_argument("source", help="a DCP folder, or safetensors: a file, an index or a folder")
    parser.add_argument("destination", help="a new folder")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="NEW=OLD", help=f"or {', '.join(_NAMED)}"
    )
    parser.add_argument("--reverse", action="store_true", help="apply all rules from right to left")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating-point tensors (default: theirs)")
    parser.add_argument("--entry", help="of DCP's state dict with the model, such as model or app.model")
    parser.add_argument(
        "--to", choices=("dcp", "safetensors"), help="(default: the form that SRC does not have)"
    )
    options = parser.parse_args(argv)
    try:
        rules = parse_rules(options.rule)
        if options.reverse:
            rules = [rule.reversed() for rule in rules]
        made = convert_checkpoint(
            options.source, options.destination, rules=rules, entry=options.entry,
            dtype=_DTYPES.get(options.dtype), to_dcp=None if options.to is None else options.to == "dcp",
        )  # fmt: skip
    except (OSError, ValueError, ImportError) as error:
        print(f"fsdp-convert: {error}", file=sys.stderr)
        return 2
    print(f"{options.destination}: {len(made)} tensors, {sum(t.nbytes for t in made) / 1e9:.3f} GB")
    for root, count in made[0].source.left_out.items() if made else ():
        print(f"left out: {count} tensors of {root or 'the top of the state dict'}")
    return 0
