"""`load_safetensors`: each rank reads the bytes of its own blocks from the files, straight into its shard."""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard import Box, device_layer, is_cpu

from ..safetensors_fp8 import SCALES, tile_in
from .agreement import agree
from .boxes import Ints, pieces_of, runs_of
from .checksums import sum_of
from .conversions import rules_of
from .files import Checkpoint, Stored
from .rules import Piece, Rule, pieces_for
from .targets import Target, give_memory, targets_of, views_of

_STAGED = 1 << 24  # bytes: what is read at a time on the way to another dtype or device
_CALLER = "load_safetensors"


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        bytes_read: of tensors, by this rank.
        missing: names of the model that no file has (`strict=False`); they keep their values.
        unexpected: names of the files that the model does not have (`strict=False`).
        checksums: of every stored tensor that was read, over all ranks; see `checksum_safetensors`. None: not asked.
    """

    bytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    checksums: Mapping[str, int] | None


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rules: Sequence[Rule] = (),
    strict: bool = True,
    checksum: bool = False,
    progress: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a model, sharded or not, on the meta device or not; every rank calls it.

    Each rank reads the byte ranges of what it holds: over all ranks the bytes of the files once (with HSDP once for
    each replica; FP8 scales and tensors that are not sharded on every rank that needs them). Nothing is broadcast; two
    all-gathers of small objects let all ranks raise together, and groups on meta issue the 32-byte all-gather of
    `fully_shard`. Where dtype and device agree, bytes are read into the shard itself; else through 16 MiB.

    Values are cast to the parameters' dtype. FP8 files (`X` in e4m3 with `X_scale_inv`) are read back to values.
    Parameters that are kept as codes are quantized. Names, shapes, dtypes and the files' sizes are checked first: where
    one is wrong, nothing is changed. Non-persistent buffers on meta stay there; no file has them.

    Args:
        model: on every rank with the same names.
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`.
        rules: what has another name or form in the files: `Rename`, `Fused`, `Split`; the first that fits counts. After
            them come those of transformers 5 for its own models.
        strict: raise where names are missing or unexpected. False: leave them; parameters on meta must all be there.
        checksum: sum up what is read; one more all-gather of small objects, and a pass over the bytes.
        progress: show a bar on the first rank, of what it reads; needs rich.
        group: the ranks that load. Defaults to all.

    Raises:
        ValueError, TypeError: missing, unexpected, a wrong shape or dtype, tied parameters with different values, a
            damaged file, or ranks that see different files; on every rank, by name.
        OSError: a file is missing, cut off, or was changed while it was read; on every rank. When this happened while
            reading, the model is partly loaded, and the error says so.
        NotImplementedError: a parameter that is a tensor subclass of another kind.
        ImportError: `progress`, and rich is not installed.
    """
    problem: Exception | None = None
    checkpoint: Checkpoint | None = None
    plan: _Plan | None = None
    try:
        checkpoint = Checkpoint(path)
        plan = _plan(model, checkpoint, rules, strict)
        bar = _bar(progress, group)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    try:
        seen = agree(_CALLER, problem, checkpoint and checkpoint.fingerprint, group)
        assert checkpoint is not None
        assert plan is not None
        if len(set(seen)) > 1:
            other = next(rank for rank, print_ in enumerate(seen) if print_ != seen[0])
            raise ValueError(
                f"{_CALLER}: ranks 0 and {other} see different files at {path}; give all ranks the same checkpoint"
            )
        give_memory(model)
        with bar(plan.nbytes) as advance:
            sums = _read(model, plan, checkpoint, advance, checksum, group)
        return LoadReport(checkpoint.bytes_read, plan.missing, plan.unexpected, sums)
    finally:
        if checkpoint is not None:
            checkpoint.close()


@dataclass
class _Plan:
    """What to read: each tensor with its pieces, under each of its names."""

    work: list[tuple[str, list[Piece]]] = field(default_factory=list)
    checks: list[tuple[str, str, list[Piece]]] = field(
        default_factory=list
    )  # (first name, other name, pieces)
    scales: dict[str, Stored] = field(default_factory=dict)
    tile: tuple[int, int] = (1, 1)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    nbytes: int = 0


def _plan(model: nn.Module, checkpoint: Checkpoint, rules: Sequence[Rule], strict: bool) -> _Plan:
    targets, stored = targets_of(model), dict(checkpoint.tensors)
    shapes: dict[str, Ints] = {
        name: tuple(target.tensor.shape) for target in targets for name in (target.name, *target.also)
    }
    own = rules_of(model, shapes, stored)
    plan, used, missing = _Plan(), set[str](), []
    for target in targets:
        names = (target.name, *target.also)
        found = [
            (name, pieces)
            for name in names
            if (pieces := pieces_for(name, shapes, stored, rules, own)) is not None
        ]
        if not found:
            missing.append(target.name)
            if target.tensor.is_meta and not strict:
                raise ValueError(
                    f"{target.name} is on the meta device, and no tensor of {checkpoint.path} is for it; initialize "
                    "it first, or give a rule"
                )
            continue
        target.refuse_subclass()
        for name, pieces in found:
            for piece in pieces:
                used.add(piece.stored.name)
                _check_dtype(target, piece.stored, stored, plan)
            if name == found[0][0]:
                plan.work.append((target.name, pieces))
                plan.nbytes += _nbytes(target, pieces)
            elif pieces != found[0][1]:
                plan.checks.append((target.name, name, pieces))
    used.update(scales.name for scales in plan.scales.values())
    unexpected = sorted(stored.keys() - used)
    if strict and (missing or unexpected):
        raise ValueError(
            f"{checkpoint.path}: missing {_few(missing)}, unexpected {_few(unexpected)}; give rules for names that "
            "differ, or strict=False to leave these out"
        )
    plan.missing, plan.unexpected = tuple(missing), tuple(unexpected)
    if plan.scales:
        plan.tile = tile_in(checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent)
        for name, scales in plan.scales.items():
            _check_scales(stored[name], scales, plan.tile)
    return plan


def _few(names: Sequence[str]) -> str:
    return str(list(names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _nbytes(target: Target, pieces: Sequence[Piece]) -> int:
    found = 0
    for box in target.boxes():
        for piece in pieces:
            part = piece.box.intersection(box)
            found += part.numel * piece.stored.dtype.itemsize if part else 0
    return found


def _check_dtype(target: Target, stored: Stored, source: Mapping[str, Stored], plan: _Plan) -> None:
    wanted, given = target.tensor.dtype, stored.dtype
    if wanted == given:
        return
    if not (wanted.is_floating_point and given.is_floating_point):
        raise TypeError(f"{stored.name} is {given}; {target.name} expects {wanted}")
    if given == torch.float8_e4m3fn:
        scales = source.get(stored.name + SCALES)
        if scales is None:
            raise ValueError(
                f"{stored.name} is e4m3, and there is no {stored.name}{SCALES} to multiply it with"
            )
        plan.scales[stored.name] = scales


def _check_scales(stored: Stored, scales: Stored, tile: tuple[int, int]) -> None:
    if len(stored.shape) < 2:
        raise ValueError(f"{stored.name} of shape {stored.shape} has scales; expected a matrix")
    rows, columns = stored.shape[-2:]
    expected = (*stored.shape[:-2], -(-rows // tile[0]), -(-columns // tile[1]))
    if scales.shape != expected or not scales.dtype.is_floating_point:
        raise ValueError(
            f"{scales.name} is {scales.dtype} of shape {scales.shape}; expected {expected} for tiles of {tile}"
        )


def _read(
    model: nn.Module,
    plan: _Plan,
    checkpoint: Checkpoint,
    advance: Callable[[int], None],
    checksum: bool,
    group: dist.ProcessGroup | None,
) -> dict[str, int] | None:
    """Fill all tensors; what was read summed up over the ranks, if asked."""
    problem: Exception | None = None
    reader = _Reader(checkpoint, plan, advance, {} if checksum else None)
    targets = {target.name: target for target in targets_of(model)}
    try:
        with torch.no_grad():
            for name, pieces in plan.work:
                reader.fill(targets[name], pieces)
            for name, other, pieces in plan.checks:
                reader.compare(targets[name], other, pieces)
            if checksum and (not dist.is_initialized() or dist.get_rank(group) == 0):
                reader.sum_scales()
        checkpoint.check_unchanged()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = (
            type(error)(f"{error}. The model is partly loaded: load it again") if _plain(error) else error
        )
    sums = agree(_CALLER, problem, reader.sums, group)
    if not checksum:
        return None
    total: dict[str, int] = {}
    for found in sums:
        for name, value in found.items():
            total[name] = (total.get(name, 0) + value) & ((1 << 64) - 1)
    return total


def _plain(error: Exception) -> bool:
    return type(error) in (OSError, ValueError, RuntimeError)


class _Reader:
    """Brings boxes of stored tensors into memory, and counts and sums what it reads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: _Plan,
        advance: Callable[[int], None],
        sums: dict[str, int] | None,
    ) -> None:
        self._checkpoint, self._plan, self._advance, self.sums = checkpoint, plan, advance, sums
        self._staging: torch.Tensor | None = None
        self._pinned = False
        self._summing = False

    def fill(self, target: Target, pieces: Sequence[Piece]) -> None:
        """Read what this rank holds of a tensor."""
        values = target.values()
        self._summing = self.sums is not None and target.is_first_copy
        self._fill(values, target.boxes(), pieces)
        target.keep(values)

    def compare(self, target: Target, other: str, pieces: Sequence[Piece]) -> None:
        """Raise ValueError where a tied tensor has other values under its other name."""
        values = target.values()
        self._summing = self.sums is not None and target.is_first_copy
        again = torch.empty_like(values)
        self._fill(again, target.boxes(), pieces)
        for (_, one), (_, two) in zip(
            views_of(target.tensor.detach(), target.boxes()), views_of(again, target.boxes()), strict=True
        ):
            if not torch.equal(one, two):
                raise ValueError(
                    f"{target.name} and {other} are one parameter of the model, and have different values in "
                    f"{self._checkpoint.path}"
                )

    def sum_scales(self) -> None:
        """Sum the scales of FP8 weights, which ranks read more than once."""
        for scales in self._plan.scales.values():
            self._summing = True
            self._read(scales, Box((0,) * len(scales.shape), scales.shape), bytearray(_size_of(scales)))

    def _fill(self, values: torch.Tensor, boxes: list[Box], pieces: Sequence[Piece]) -> None:
        for box, view in views_of(values, boxes):
            for piece in pieces:
                common = piece.box.intersection(box)
                if common is None:
                    continue
                for part in pieces_of(common, _STAGED // piece.stored.dtype.itemsize):
                    self._bring(view[part.slices(box.offsets)], piece, part)
                    self._advance(part.numel * piece.stored.dtype.itemsize)

    def _bring(self, to: torch.Tensor, piece: Piece, part: Box) -> None:
        stored, box = piece.stored, piece.in_file(part)
        if to.dtype == stored.dtype and is_cpu(to.device) and to.is_contiguous():
            self._read(stored, box, _bytes_of(to))
            torch.autograd.graph.increment_version(to)  # torch does not see the write
            return
        staged = self._stage(to.device, part.numel, stored.dtype)
        self._read(stored, box, _bytes_of(staged))
        scales = self._plan.scales.get(stored.name) if to.dtype != stored.dtype else None
        if scales is not None:
            staged = self._read_back(staged.view(box.sizes), box, scales)
        to.copy_(staged.view(part.sizes))

    def _stage(self, device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
        pinned = device_layer(device).asynchronous
        if self._staging is None or self._pinned != pinned:
            self._staging = torch.empty(_STAGED, dtype=torch.uint8, pin_memory=pinned)
            self._pinned = pinned
        return self._staging[: numel * dtype.itemsize].view(dtype)

    def _read_back(self, codes: torch.Tensor, box: Box, scales: Stored) -> torch.Tensor:
        """Codes of a box times the scales of its tiles, in fp32."""
        tile = self._plan.tile
        starts = [o // t for o, t in zip(box.offsets[-2:], tile, strict=True)]
        stops = [-(-(o + n) // t) for o, n, t in zip(box.offsets[-2:], box.sizes[-2:], tile, strict=True)]
        sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
        of = Box((*box.offsets[:-2], *starts), (*box.sizes[:-2], *sizes))
        factors = torch.empty(of.sizes, dtype=scales.dtype)
        summing, self._summing = self._summing, False  # `sum_scales` does
        self._read(scales, of, _bytes_of(factors))
        self._summing = summing
        spread = factors.float().repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
        row, column = (o % t for o, t in zip(box.offsets[-2:], tile, strict=True))
        return codes.float().mul_(spread[..., row : row + box.sizes[-2], column : column + box.sizes[-1]])

    def _read(self, stored: Stored, box: Box, into: Any) -> None:
        memory, done = memoryview(into), 0
        for first, count in runs_of(stored.shape, box):
            run = memory[done : done + count * stored.dtype.itemsize]
            self._checkpoint.read(stored, first, run)
            if self._summing and self.sums is not None:
                total = self.sums.get(stored.name, 0) + sum_of(run, first * stored.dtype.itemsize)
                self.sums[stored.name] = total & ((1 << 64) - 1)
            done += len(run)


def _size_of(stored: Stored) -> int:
    return torch.Size(stored.shape).numel() * stored.dtype.itemsize


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory. Not through numpy, which would forbid to resize the storage ever after."""
    buffer = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return memoryview(buffer).cast("B")


def _bar(
    progress: bool, group: dist.ProcessGroup | None
) -> Callable[[int], AbstractContextManager[Callable[[int], None]]]:
    """What shows a progress bar, or nothing. Raises ImportError where it is asked for and rich is not installed."""
    if not progress:
        return lambda total: nullcontext(lambda nbytes: None)
    try:
        from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
    except ImportError:
        raise ImportError("progress=True needs rich: pip install rich, or leave it out") from None
    if dist.is_initialized() and dist.get_rank(group) != 0:
        return lambda total: nullcontext(lambda nbytes: None)

    @contextmanager
    def shown(total: int) -> Any:
        with Progress("loading", BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
            task = bar.add_task("loading", total=total)
            yield lambda nbytes: bar.advance(task, nbytes)

    return shown
