"""How tensors of a model follow from tensors of files that have other names, or are joined or stacked there.

Rule("{layer}.norm", "model.{layer}.norm")      another name
Rule("qkv", ("q", "k", "v"))                    qkv of the model is q, k and v of the files, one below the other
Rule(("gate", "up"), "gate_up")                 gate of the model is the first rows of gate_up
Rule("experts.down", "experts.{index}.down")    a stack (E, I, H) of the model is E tensors of the files
Rule("experts.{index}.down", "experts.down")    tensors of the model are elements of a stack of the files
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ragged_shard import Box

from .files import Ints

Shapes = Mapping[str, Ints]
Source = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """Tensors of the model, joined along a dimension, are tensors of the files, joined along it.

    In a pattern `{index}` stands for a number, and any other `{word}` for any text, equal on both sides. If only one
    side has `{index}`, the other side's tensor is a stack, whose first dimension counts the elements.

    Args:
        model: pattern of a name in the model, or patterns in order.
        file: pattern of a name in the files, or patterns in order.
        dim: dimension along which tensors are joined, of an element in a stack.
    """

    model: str | Sequence[str]
    file: str | Sequence[str]
    dim: int = 0

    def equation(self, name: str, shape: Ints) -> "Equation | None":
        """The equation of a tensor of the model; None if no pattern matches its name.

        Raises ValueError if the other side has a word that the matching pattern does not have.
        """
        models, files = ((side,) if isinstance(side, str) else side for side in (self.model, self.file))
        match = next(filter(None, (_regex(model).fullmatch(name) for model in models)), None)
        if match is None:
            return None
        words = match.groupdict()
        of_files = any("{index}" in file for file in files)
        stacked, index = of_files and "index" not in words, words.get("index")
        elements: Iterable[int | str | None] = range(*shape[:1] or (0,)) if stacked else (index,)
        return Equation(
            tuple(_filled(model, words) for model in models),
            tuple(tuple(_filled(file, {**words, "index": at}) for file in files) for at in elements),
            stacked,
            None if of_files or index is None else int(index),
            self.dim,
        )


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def group(field: re.Match[str]) -> str:
        word, text = field[1], r"\d+" if field[1] == "index" else ".+"
        again = word in seen
        seen.add(word)
        return f"(?P={word})" if again else f"(?P<{word}>{text})"

    return re.compile(re.sub(r"\\\{(\w+)\\\}", group, re.escape(pattern)))


def _filled(pattern: str, words: Mapping[str, object]) -> str:
    try:
        return pattern.format_map(words)
    except KeyError as error:
        raise ValueError(
            f"rule: {pattern!r} has the word {error}, which the pattern on the other side does not have"
        ) from None


@dataclass(frozen=True)
class Piece:
    """A box of a model's tensor that a box of a file's tensor fills, in the same order of elements."""

    file: str  # name of the file's tensor
    box: Box  # in the model's tensor
    index: Ints  # of the element, if the file's tensor is a stack
    # from a place in the model's tensor, or an element of it if it is a stack, to the place in the file's
    shift: Ints

    def in_file(self, part: Box) -> Box:
        """The box of the file's tensor that fills a box inside of this one."""
        skip, ones = len(part.sizes) - len(self.shift), (1,) * len(self.index)
        moved = Box(part.offsets[skip:], part.sizes[skip:]).moved(self.shift)
        return Box(self.index + moved.offsets, ones + moved.sizes)


@dataclass(frozen=True)
class Equation:
    """A rule for names without patterns."""

    models: tuple[str, ...]  # names in the model, in order
    # names in the files, in order: one row, or a row for each element of a stack in the model
    rows: tuple[tuple[str, ...], ...]
    stacked: bool = False  # whether the model's tensor is such a stack
    index: int | None = None  # the element, if the files' tensor is a stack
    dim: int = 0  # as of `Rule`

    @property
    def files(self) -> list[str]:
        """Names in the files."""
        return [file for row in self.rows for file in row]

    def pieces(self, name: str, shapes: Shapes, source: Source) -> list[Piece]:
        """Pieces of a tensor of the model. Raises ValueError, by name, if one is missing or does not fit."""
        if missing := [file for file in self.files if file not in source]:
            raise ValueError(
                f"{name} is made of {len(self.files)} tensors, and the files have no {missing[0]}"
            )
        if unknown := [model for model in self.models if model not in shapes]:
            raise ValueError(f"{name} is joined in {self.files[0]} with {unknown[0]}, which the model lacks")
        if self.stacked and shapes[name][:1] != (len(self.rows),):
            raise ValueError(f"{name} of shape {shapes[name]} is a stack of {len(self.rows)} in the files")
        return [
            piece
            for number, row in enumerate(self.rows)
            for piece in self._row(name, (number,) if self.stacked else (), row, shapes, source)
        ]

    def _row(
        self, name: str, above: Ints, row: Sequence[str], shapes: Shapes, source: Source
    ) -> Iterator[Piece]:
        """The pieces of a tensor, or of one element of a stack: intersections of boxes in the joined tensor.

        Shapes fit if the intersections cover the model's tensor, and both sides have equally many elements.
        """
        index = () if self.index is None else (self.index,)
        in_files = {file: tuple(source[file].shape) for file in row}
        models = _joined([shapes[model][len(above) :] for model in self.models], self.dim)
        files = _joined([shape[len(index) :] for shape in in_files.values()], self.dim)
        own, covered = models[self.models.index(name)], 0
        fits = {len(box.sizes) for box in (*models, *files)} == {len(own.sizes)}
        fits &= len(models) == len(files) == 1 or 0 <= self.dim < len(own.sizes)
        fits &= not index or all(index < shape[:1] for shape in in_files.values())
        for file, box in zip(row, files, strict=True) if fits else ():
            common = own.intersection(box)
            if common is not None:
                covered += common.numel
                place = common.moved(tuple(-at for at in own.offsets))
                shift = tuple(a - b for a, b in zip(own.offsets, box.offsets, strict=True))
                yield Piece(file, Box(above + place.offsets, (1,) * len(above) + place.sizes), index, shift)
        if not fits or covered != own.numel or sum(b.numel for b in models) != sum(b.numel for b in files):
            element = "".join(f"element {number} of " for number in above + index)
            sides = [[f"{m} {shapes[m]}" for m in self.models], [f"{f} {s}" for f, s in in_files.items()]]
            raise ValueError(
                f"{element}{', '.join(sides[0])} of the model cannot be {', '.join(sides[1])} of the files, joined "
                f"along dimension {self.dim}"
            )


def _joined(shapes: Sequence[Ints], dim: int) -> list[Box]:
    """Boxes of tensors that follow one another along a dimension."""
    boxes, begin = [], 0
    for shape in shapes:
        boxes.append(Box(tuple(begin if d == dim else 0 for d in range(len(shape))), shape))
        begin += sum(shape[dim : dim + 1])
    return boxes
