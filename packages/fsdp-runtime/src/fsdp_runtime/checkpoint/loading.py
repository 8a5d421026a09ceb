"""`load_safetensors`: each rank copies its own blocks from the mapped files into its shard."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard import Box, raise_on_all_ranks, same_on_all_ranks

from .._params.empty_buffers import is_empty
from .conversions import rules_of
from .files import Checkpoint, Ints, Stored, pieces_of
from .fp8_files import check_scales, decode, scales_of, tile_in
from .rules import Piece, Rule, pieces_for
from .targets import Target, adopt_assigned, give_memory, targets_of, views_of

_PIECE = 1 << 24  # bytes that are copied at a time, perhaps through another dtype
_CALLER = "load_safetensors"


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        bytes_read: of tensors, by this rank; without scales of FP8.
        missing: names of the model that no file has (`strict=False`); they keep their values.
        unexpected: names of the files that the model does not have (`strict=False`).
        without_values: names of the model's buffers that no file has (`persistent=False`) and that are on meta, or that
            nothing has written since `to_empty`. The first forward refuses the latter.
    """

    bytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    without_values: tuple[str, ...] = ()


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rules: Sequence[Rule] = (),
    strict: bool = True,
    progress: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a model, sharded or not, on the meta device or not; every rank calls it.

    Each rank reads the byte ranges of what it holds: over all ranks the bytes of the files once (with HSDP once for
    each replica; FP8 scales and tensors that are not sharded on every rank that needs them). Nothing is broadcast; two
    all-gathers of small objects let all ranks raise together, and groups on meta issue the 64-byte all-reduce of
    `fully_shard`. Files are mapped, and copied 16 MiB at a time.

    Values are cast to the parameters' dtype. FP8 files (`X` in e4m3 with `X_scale_inv`) are read back to values.
    Parameters that are kept as codes are quantized. Names, shapes, dtypes and the files' sizes are checked first: where
    one is wrong, nothing is changed. Non-persistent buffers stay as they are, also on meta; no file has them.

    Args:
        model: on every rank with the same names.
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`.
        rules: what has another name or form in the files: `Rename`, `Fused`, `Split`; the first that fits counts. After
            them come those of transformers 5 for its own models.
        strict: raise where names are missing or unexpected. False: leave them; parameters on meta must all be there.
        progress: show a bar on the first rank, of what it reads; needs rich.
        group: the ranks that load. Defaults to all.

    Raises:
        ValueError, TypeError: missing, unexpected, a wrong shape or dtype, tied parameters with different values, a
            damaged file, or ranks that see different files; on every rank, by name.
        OSError: a file is missing or is none; on every rank.
        NotImplementedError: a parameter that is a tensor subclass of another kind.
        ImportError: safetensors is not installed; or `progress`, and rich is not.
    """
    adopt_assigned(model)
    problem: Exception | None = None
    checkpoint: Checkpoint | None = None
    plan: _Plan | None = None
    try:
        checkpoint = Checkpoint(path)
        plan = _plan(model, checkpoint, rules, strict)
        bar = _bar(progress, group)
    except Exception as error:  # the other ranks must not wait for this one
        problem = error
    files = {f"the checkpoint at {path}": checkpoint and checkpoint.fingerprint}
    same_on_all_ranks(files, group, error=problem, caller=_CALLER)
    assert checkpoint is not None
    assert plan is not None
    give_memory(model)
    with bar(plan.nbytes) as advance:
        bytes_read = _read(model, plan, checkpoint, advance, group)
    without = [name for name, buffer in model.named_buffers() if buffer.is_meta or is_empty(buffer)]
    return LoadReport(bytes_read, plan.missing, plan.unexpected, tuple(without))


@dataclass
class _Plan:
    """What to read: each tensor with its pieces, under each of its names."""

    work: list[tuple[str, list[Piece]]] = field(default_factory=list)
    # (first name, other name, pieces)
    checks: list[tuple[str, str, list[Piece]]] = field(default_factory=list)
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
        sources = [
            (name, pieces)
            for name in names
            if (pieces := pieces_for(name, shapes, stored, rules, own)) is not None
        ]
        if not sources:
            missing.append(target.name)
            if target.tensor.is_meta and not strict:
                raise ValueError(
                    f"{target.name} is on the meta device, and no tensor of {checkpoint.path} is for it; initialize "
                    "it first, or give a rule"
                )
            continue
        target.refuse_subclass()
        for name, pieces in sources:
            for piece in pieces:
                used.add(piece.stored.name)
                _check_dtype(target, piece.stored, stored, plan)
            if name == sources[0][0]:
                plan.work.append((target.name, pieces))
                plan.nbytes += _nbytes(target, pieces)
            elif pieces != sources[0][1]:
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
        plan.tile = tile_in(checkpoint.folder)
        for name, scales in plan.scales.items():
            check_scales(stored[name], scales, plan.tile)
    return plan


def _few(names: Sequence[str]) -> str:
    return str(list(names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _nbytes(target: Target, pieces: Sequence[Piece]) -> int:
    nbytes = 0
    for box in target.boxes():
        for piece in pieces:
            part = piece.box.intersection(box)
            nbytes += part.numel * piece.stored.dtype.itemsize if part else 0
    return nbytes


def _check_dtype(target: Target, stored: Stored, source: Mapping[str, Stored], plan: _Plan) -> None:
    wanted, stored_dtype = target.tensor.dtype, stored.dtype
    if wanted == stored_dtype:
        return
    if (
        not (wanted.is_floating_point and stored_dtype.is_floating_point)
        or stored_dtype == torch.float4_e2m1fn_x2
    ):
        raise TypeError(f"{stored.name} is {stored_dtype}; {target.name} expects {wanted}")
    if stored_dtype == torch.float8_e4m3fn:
        plan.scales[stored.name] = scales_of(stored, source)


def _read(
    model: nn.Module,
    plan: _Plan,
    checkpoint: Checkpoint,
    advance: Callable[[int], None],
    group: dist.ProcessGroup | None,
) -> int:
    """Fill all tensors; the bytes that were read."""
    problem: Exception | None = None
    reader = _Reader(plan, advance)
    targets = {target.name: target for target in targets_of(model)}
    try:
        with torch.no_grad():
            for name, pieces in plan.work:
                values = targets[name].values()
                reader.fill(values, targets[name].boxes(), pieces)
                targets[name].keep(values)
            for name, other, pieces in plan.checks:
                if not reader.has_values(targets[name], pieces):
                    raise ValueError(
                        f"{name} and {other} are one parameter of the model, and have different values in "
                        f"{checkpoint.path}. The model is partly loaded: load it again"
                    )
    except Exception as error:  # the other ranks must not wait for this one
        problem = error
    raise_on_all_ranks(problem, _CALLER, groups=group)
    return reader.bytes_read


class _Reader:
    """Copies boxes of stored tensors, and counts their bytes."""

    def __init__(self, plan: _Plan, advance: Callable[[int], None]) -> None:
        self._plan, self._advance = plan, advance
        self.bytes_read = 0

    def has_values(self, target: Target, pieces: Sequence[Piece]) -> bool:
        """Whether a tensor has the values of these pieces."""
        boxes, tensor = target.boxes(), target.tensor.detach()
        again = torch.empty_like(target.values())
        self.fill(again, boxes, pieces)
        both = zip(views_of(tensor, boxes), views_of(again, boxes), strict=True)
        return all(torch.equal(value, expected) for (_, value), (_, expected) in both)

    def fill(self, values: torch.Tensor, boxes: list[Box], pieces: Sequence[Piece]) -> None:
        """Read what this rank holds of a tensor."""
        for box, view in views_of(values, boxes):
            for piece in pieces:
                common = piece.box.intersection(box)
                if common is None:
                    continue
                for part in pieces_of(common, _PIECE // piece.stored.dtype.itemsize):
                    to = view[part.slices(box.offsets)]
                    to.copy_(self._values(piece.stored, piece.in_file(part), to.dtype).view(part.sizes))
                    nbytes = part.numel * piece.stored.dtype.itemsize
                    self._advance(nbytes)
                    self.bytes_read += nbytes

    def _values(self, stored: Stored, box: Box, dtype: torch.dtype) -> torch.Tensor:
        scales = self._plan.scales.get(stored.name)
        if scales is None or dtype == stored.dtype:
            return stored.tensor[box.slices()]
        return decode(stored, scales, self._plan.tile, box)


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
