"""`load_safetensors`: each rank copies its own blocks from the mapped files into its shard."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard import Box
from ragged_shard.dist import on_all_ranks

from .._torch.tree import local_tensor
from .conversions import equations_of
from .files import SCALES, Checkpoint
from .rules import Equation, Piece, Rule, Shapes
from .targets import Target, adopt_assigned, boxes_of, buffers_without_values, give_memory, targets_of

_INSTEAD = "use model.load_state_dict(read_safetensors(path))"


@dataclass(frozen=True)
class LoadReport:
    """Result of `load_safetensors`.

    Attributes:
        bytes_read: of tensors, by this rank; without scales of FP8.
        missing: names of the model that no file has (`strict=False`); they keep their values.
        unexpected: names of the files that the model does not have (`strict=False`).
        empty: buffers without values, on meta or since `to_empty` (`strict=False`); most are in no file.
        cast: names whose dtype in the files is another than the model's.
        tied: names of each tensor that has several.
        elsewhere: names of tensors on another device than most, such as tables that were made on the CPU.
    """

    bytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    empty: tuple[str, ...]
    cast: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    elsewhere: tuple[str, ...]


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rules: Sequence[Rule] = (),
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a model, sharded or not, on the meta device or not; every rank calls it.

    Each rank reads the byte ranges of its shards from mapped files: all ranks together each byte once (with HSDP once
    for each replica; FP8 scales and tensors that are not sharded on every rank that needs them). Nothing is broadcast:
    a 64-byte all-reduce compares the files that ranks see, another one their errors, and groups on meta issue the
    all-reduce of `fully_shard`.

    Values are cast to the parameters' dtype; FP8 files (`X` in e4m3 with `X_scale_inv`) are read back to values;
    parameters that are kept as codes are quantized. Names, shapes, dtypes and the files' sizes are checked first: if
    one is wrong, nothing is changed. Non-persistent buffers, which no file has, stay as they are.

    Args:
        model: on every rank with the same names.
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`.
        rules: for tensors that have another name or form in the files; the first that fits counts, before rules of
            transformers 5 for its own models.
        strict: raise if names are missing or unexpected, or a buffer would be left without values: compute rotary
            tables first. False: leave them, and report them; parameters on meta must all be there.
        group: the ranks that load. Defaults to all.

    Raises:
        ValueError, TypeError, OSError: missing or unexpected names, a wrong shape or dtype, tied parameters with
            different values, a missing or damaged file, or ranks that see different files; on every rank, by name.
        RuntimeError: a tensor could not be copied after all checks; on every rank, naming the tensor and its files.
            Tensors before it are loaded.
        NotImplementedError: a parameter that is a tensor subclass of another kind.
        ImportError: safetensors is not installed.
    """
    adopt_assigned(model)
    with on_all_ranks("load_safetensors", group) as values:
        checkpoint = Checkpoint(path)
        values[f"the checkpoint at {path}"] = checkpoint.fingerprint
        plan = _Plan(model, checkpoint, rules, strict)
    with on_all_ranks("load_safetensors", group):
        give_memory(model)
        targets = targets_of(model)
        bytes_read = sum(plan.fill(target) for target in targets if target.name in plan.pieces)
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    devices = {name: tensor.device for name, tensor in tensors}
    common = Counter(devices.values()).most_common(1)
    return LoadReport(
        bytes_read,
        missing=tuple(plan.missing),
        unexpected=tuple(plan.unexpected),
        empty=tuple(plan.empty),
        cast=tuple(sorted(plan.cast)),
        tied=tuple((target.name, *target.also) for target in targets if target.also),
        elsewhere=tuple(name for name, device in devices.items() if device != common[0][0]),
    )


class _Plan:
    """Pieces of files for each tensor of a model. Raises as `load_safetensors`; attributes are as in `LoadReport`."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, rules: Sequence[Rule], strict: bool) -> None:
        self._checkpoint, self._used, self.cast = checkpoint, set[str](), set[str]()
        self._decoders: dict[str, Callable[[Box], torch.Tensor]] = {}  # of FP8 tensors of the files
        self.pieces: dict[str, list[Piece]] = {}  # by the first name of the model's tensor
        targets = targets_of(model)
        shapes = {n: tuple(target.tensor.shape) for target in targets for n in (target.name, *target.also)}
        own = equations_of(model, shapes, checkpoint.tensors)
        for target in targets:
            for name in (target.name, *target.also):
                by_rules = [rule.equation(name, shapes[name]) for rule in rules]
                self._find(target, name, [*by_rules, own.get(name), Equation((name,), ((name,),))], shapes)
        self.missing = [target.name for target in targets if target.name not in self.pieces]
        self.unexpected = sorted(checkpoint.tensors.keys() - self._used)
        self.empty = buffers_without_values(model, self.pieces)
        if strict and (self.missing or self.unexpected or self.empty):
            empty = f", buffers without values {_few(self.empty)}" if self.empty else ""
            raise ValueError(
                f"{checkpoint.path}: missing {_few(self.missing)}, unexpected {_few(self.unexpected)}{empty}; pass "
                "rules for names that differ, compute buffers that are in no file first, or pass strict=False to leave "
                "these out"
            )
        for target in targets:
            if target.tensor.is_meta and target.name in self.missing:
                raise ValueError(
                    f"{target.name} is on the meta device, and no tensor of {checkpoint.path} is for it; initialize it "
                    "first, or pass a rule"
                )

    def _find(self, target: Target, name: str, equations: list[Equation | None], shapes: Shapes) -> None:
        """Find a tensor's pieces under one of its names; under each name they must have the same values."""
        tensors = self._checkpoint.tensors
        for equation in filter(None, equations):
            if not tensors.keys().isdisjoint(equation.files):
                break
        else:
            return
        pieces = equation.pieces(name, shapes, tensors)
        target.values(_INSTEAD)  # raises for a tensor subclass
        for file in dict.fromkeys(equation.files):
            self._use(file, target)
        others = self.pieces.setdefault(target.name, pieces)
        same = [piece.box for piece in pieces] == [other.box for other in others]
        pairs = zip(pieces, others, strict=False)
        if not same or not all(a == b or self._read(a, a.box).equal(self._read(b, b.box)) for a, b in pairs):
            raise ValueError(
                f"{target.name} and {', '.join(target.also)} are one parameter of the model, and have different "
                f"values in {self._checkpoint.path}"
            )

    def _use(self, file: str, target: Target) -> None:
        """Check that values of a file's tensor can be cast to the model's dtype."""
        self._used.add(file)
        stored, wanted = self._checkpoint.tensors[file].dtype, target.tensor.dtype
        if wanted == stored:
            return
        self.cast.add(target.name)
        floating = wanted.is_floating_point and stored.is_floating_point
        if not floating or stored == torch.float4_e2m1fn_x2:
            raise TypeError(f"{file} is {stored}; {target.name} expects {wanted}")
        if stored == torch.float8_e4m3fn:
            self._decoders[file] = self._checkpoint.decoder(file)
            self._used.add(file + SCALES)

    def _read(self, piece: Piece, part: Box, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of a box of a piece, for a tensor of this dtype; mapped, and not yet read, unless they are FP8."""
        box, tensor = piece.in_file(part), self._checkpoint.tensors[piece.file]
        decode = self._decoders.get(piece.file)
        values = tensor[box.slices()] if decode is None or dtype == tensor.dtype else decode(box)
        return values.view(part.sizes)

    @torch.no_grad()
    def fill(self, target: Target) -> int:
        """Copy this rank's boxes of a tensor; returns the bytes. Any error is a RuntimeError that names files."""
        nbytes, pieces = 0, self.pieces[target.name]
        try:
            values = target.values(_INSTEAD)
            for box, view in boxes_of(values):
                for piece in pieces:
                    part = piece.box.intersection(box)
                    if part is not None:
                        view[part.slices(box.offsets)].copy_(self._read(piece, part, view.dtype))
                        nbytes += part.numel * self._checkpoint.tensors[piece.file].itemsize
            if values is not target.tensor:  # it is kept as codes
                local_tensor(target.tensor.detach()).copy_(local_tensor(values))
        except Exception as error:
            files = sorted({str(self._checkpoint.files[piece.file]) for piece in pieces})
            raise RuntimeError(
                f"{target.name} could not be loaded from {', '.join(files)}, and the model has some of the values: "
                f"{type(error).__name__}: {error}"
            ) from error
        return nbytes


def _few(names: Sequence[str]) -> str:
    return str(list(names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
