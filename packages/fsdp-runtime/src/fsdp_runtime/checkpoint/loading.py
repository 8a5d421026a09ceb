"""`load_safetensors`: each rank copies its own blocks from the mapped files into its shard."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard import Box
from ragged_shard.dist import same_on_all_ranks

from .._params.empty_buffers import is_empty
from .conversions import rules_of
from .files import Checkpoint, Stored
from .fp8_files import SCALES, decoder
from .rules import Piece, Rule, Shapes, pieces_for
from .targets import Target, adopt_assigned, give_memory, targets_of, views_of


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
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a model, sharded or not, on the meta device or not; every rank calls it.

    Each rank reads the byte ranges of what it holds: over all ranks the bytes of the files once (with HSDP once for
    each replica; FP8 scales and tensors that are not sharded on every rank that needs them). Files are mapped, and
    nothing is broadcast: a 64-byte all-reduce compares the files that ranks see, and groups on meta issue that of
    `fully_shard`.

    Values are cast to the parameters' dtype. FP8 files (`X` in e4m3 with `X_scale_inv`) are read back to values.
    Parameters that are kept as codes are quantized. Names, shapes, dtypes and the files' sizes are checked first: where
    one is wrong, nothing is changed. Non-persistent buffers stay as they are, also on meta; no file has them.

    Args:
        model: on every rank with the same names.
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`.
        rules: what has another name or form in the files: `Rename`, `Fused`, `Split`; the first that fits counts. After
            them come those of transformers 5 for its own models.
        strict: raise where names are missing or unexpected. False: leave them; parameters on meta must all be there.
        group: the ranks that load. Defaults to all.

    Raises:
        ValueError, TypeError: missing, unexpected, a wrong shape or dtype, tied parameters with different values, a
            damaged file, or ranks that see different files; on every rank, by name.
        OSError: a file is missing or is none; on every rank.
        NotImplementedError: a parameter that is a tensor subclass of another kind.
        ImportError: safetensors is not installed.
    """
    adopt_assigned(model)
    problem: Exception | None = None
    checkpoint: Checkpoint | None = None
    plan: _Plan | None = None
    try:
        checkpoint = Checkpoint(path)
        plan = _Plan(model, checkpoint, rules, strict)
    except Exception as error:  # the other ranks must not wait for this one
        problem = error
    files = {f"the checkpoint at {path}": checkpoint and checkpoint.fingerprint}
    same_on_all_ranks(files, group, error=problem, caller="load_safetensors")
    assert plan is not None
    give_memory(model)
    with torch.no_grad():
        bytes_read = sum(map(plan.fill, targets_of(model)))
    without = [name for name, buffer in model.named_buffers() if buffer.is_meta or is_empty(buffer)]
    return LoadReport(bytes_read, tuple(plan.missing), tuple(plan.unexpected), tuple(without))


class _Plan:
    """Pieces of files for each tensor of a model. Raises as `load_safetensors`.

    Attributes:
        missing, unexpected: names, as of `LoadReport`.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, rules: Sequence[Rule], strict: bool) -> None:
        self._checkpoint, self._used = checkpoint, set[str]()
        self._decoders: dict[str, Callable[[Box], torch.Tensor]] = {}  # of FP8 tensors of the files
        self._pieces: dict[str, list[Piece]] = {}  # by the first name of the model's tensor
        targets = targets_of(model)
        shapes = {n: tuple(target.tensor.shape) for target in targets for n in (target.name, *target.also)}
        own = rules_of(model, shapes, checkpoint.tensors)
        for target in targets:
            self._find(target, shapes, rules, own)
        self.missing = [target.name for target in targets if target.name not in self._pieces]
        self.unexpected = sorted(checkpoint.tensors.keys() - self._used)
        if strict and (self.missing or self.unexpected):
            raise ValueError(
                f"{checkpoint.path}: missing {_few(self.missing)}, unexpected {_few(self.unexpected)}; give rules for "
                "names that differ, or strict=False to leave these out"
            )
        for target in targets:
            if target.tensor.is_meta and target.name in self.missing:
                raise ValueError(
                    f"{target.name} is on the meta device, and no tensor of {checkpoint.path} is for it; initialize it "
                    "first, or give a rule"
                )

    def _find(self, target: Target, shapes: Shapes, rules: Sequence[Rule], own: dict[str, Rule]) -> None:
        """Find a tensor's pieces under each of its names; they must have the same values."""
        for name in (target.name, *target.also):
            pieces = pieces_for(
                name, shapes, self._checkpoint.tensors, [*rules, *filter(None, [own.get(name)])]
            )
            if pieces is None:
                continue
            target.refuse_subclass()
            for piece in pieces:
                self._use(piece.stored, target)
            if not self._same_values(pieces, self._pieces.setdefault(target.name, pieces)):
                raise ValueError(
                    f"{target.name} and {', '.join(target.also)} are one parameter of the model, and have different "
                    f"values in {self._checkpoint.path}"
                )

    def _use(self, stored: Stored, target: Target) -> None:
        """Check that a stored tensor's dtype is one that the model's can be cast from."""
        self._used.add(stored.name)
        wanted = target.tensor.dtype
        if wanted == stored.dtype:
            return
        floating = wanted.is_floating_point and stored.dtype.is_floating_point
        if not floating or stored.dtype == torch.float4_e2m1fn_x2:
            raise TypeError(f"{stored.name} is {stored.dtype}; {target.name} expects {wanted}")
        if stored.dtype == torch.float8_e4m3fn:
            self._decoders[stored.name] = decoder(stored, self._checkpoint)
            self._used.add(stored.name + SCALES)

    def _same_values(self, pieces: list[Piece], others: list[Piece]) -> bool:
        return pieces == others or (
            [piece.box for piece in pieces] == [other.box for other in others]
            and all(
                torch.equal(self._read(a, a.box), self._read(b, b.box))
                for a, b in zip(pieces, others, strict=True)
            )
        )

    def _read(self, piece: Piece, part: Box, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of a box of a piece, for a tensor of this dtype; mapped, and not yet read, unless they are FP8."""
        box, decode = piece.in_file(part), self._decoders.get(piece.stored.name)
        if decode is None or dtype == piece.stored.dtype:
            return piece.stored.tensor[box.slices()].view(part.sizes)
        return decode(box).view(part.sizes)

    def fill(self, target: Target) -> int:
        """Copy the boxes that this rank holds of a tensor; the bytes that were read."""
        if target.name not in self._pieces:
            return 0
        nbytes, boxes, values = 0, target.boxes(), target.values()
        for box, view in views_of(values, boxes):
            for piece in self._pieces[target.name]:
                part = piece.box.intersection(box)
                if part is not None:
                    view[part.slices(box.offsets)].copy_(self._read(piece, part, view.dtype))
                    nbytes += part.numel * piece.stored.dtype.itemsize
        target.keep(values)
        return nbytes


def _few(names: Sequence[str]) -> str:
    return str(list(names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
