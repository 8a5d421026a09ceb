"""How tensors of a model follow from tensors of files that have other names, or are fused or stacked there.

    Rename   model.layers.0.norm.weight    <-  layers.0.norm.weight
    Fused    qkv_proj.weight               <-  q_proj.weight, k_proj.weight, v_proj.weight, one below the other
             experts.gate_up_proj (E, 2I, H)  <-  experts.{index}.gate_proj.weight, experts.{index}.up_proj.weight
    Split    q_proj.weight                 <-  the first rows of qkv_proj.weight
             experts.{index}.w1.weight     <-  one matrix of a stacked experts.w1

In a pattern `{index}` stands for a number, the number of an expert, and any other `{word}` for whatever is there.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from ragged_shard import Box

from .files import Ints, Stored, whole

Shapes = Mapping[str, Ints]
Source = Mapping[str, Stored]
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Piece:
    """A box of a model's tensor that a box of a stored tensor fills, in the same order of elements.

    Attributes:
        stored: where it is.
        box: in the model's tensor.
        offsets: of the box in the stored tensor, which may have fewer or more leading dimensions, of size 1 in the box.
    """

    stored: Stored
    box: Box
    offsets: Ints

    def in_file(self, part: Box) -> Box:
        """Where a box inside of this one is in the stored tensor."""
        common = min(len(self.offsets), len(part.sizes))
        inside = [o - at for o, at in zip(part.offsets, self.box.offsets, strict=True)]
        extra = len(self.offsets) - common
        moved = [at + by for at, by in zip(self.offsets[extra:], inside[len(inside) - common :], strict=True)]
        return Box((*self.offsets[:extra], *moved), ((1,) * extra + part.sizes[len(part.sizes) - common :]))


class Rule(Protocol):
    """Anything that finds the pieces of a tensor of the model."""

    def find(self, name: str, shapes: Shapes, source: Source) -> list[Piece] | None:
        """The pieces of a tensor of the model. None: the rule does not say, or nothing that it names is there.

        Raises:
            ValueError: some are missing, or of shapes that do not go together; by name.
        """


@dataclass(frozen=True)
class Made:
    """A tensor of the model that tensors of files make up: one row of them, or a row for each element of a stack.

    Args:
        rows: names in the files.
        stacked: whether rows are stacked.
        dim: along which those of a row follow one another; of the files' tensors.
    """

    rows: tuple[tuple[str, ...], ...]
    stacked: bool = False
    dim: int = 0

    def find(self, name: str, shapes: Shapes, source: Source) -> list[Piece] | None:
        """As `Rule.find`."""
        shape, files = shapes[name], [file for row in self.rows for file in row]
        missing = [file for file in files if file not in source]
        if len(missing) == len(files):
            return None
        if missing:
            raise ValueError(f"{name} is made of {len(files)} tensors, of which {missing[0]} is missing")
        if self.stacked and shape[:1] != (len(self.rows),):
            raise ValueError(f"{name} of shape {shape} is a stack, of which {len(self.rows)} are there")
        pieces: list[Piece] = []
        for index, row in enumerate(self.rows):
            lead = (index,) if self.stacked else ()
            pieces += self._one_after_another(name, lead, shape[len(lead) :], [source[file] for file in row])
        return pieces

    def _one_after_another(self, name: str, lead: Ints, shape: Ints, parts: list[Stored]) -> list[Piece]:
        """Pieces that fill the element `lead` of a model's tensor (all of it where that is empty)."""
        pieces, at, several = [], 0, len(parts) > 1
        if several and not 0 <= self.dim < len(shape):
            raise ValueError(f"{name} of shape {shape} has no dimension {self.dim}, which a rule names")
        for stored in parts:
            offsets, expected = [0] * len(shape), list(shape)
            if several and len(stored.shape) == len(shape):
                offsets[self.dim], expected[self.dim] = at, stored.shape[self.dim]
                at += stored.shape[self.dim]
            if stored.shape != tuple(expected):
                raise ValueError(f"{stored.name} has shape {stored.shape}; {name} expects {tuple(expected)}")
            box = Box((*lead, *offsets), (*(1,) * len(lead), *stored.shape))
            pieces.append(Piece(stored, box, (0,) * len(shape)))
        if several and at != shape[self.dim]:
            names = [stored.name for stored in parts]
            raise ValueError(
                f"{names} have {at} together along dimension {self.dim}; {name} expects {shape[self.dim]}"
            )
        return pieces


@dataclass(frozen=True)
class Fused:
    """A tensor of the model that several tensors of the file make up.

    Args:
        model: pattern of its name.
        files: patterns of theirs, in order. With `{index}`: a stack, of as many as the first dimension has.
        dim: along which they follow one another; of the file's tensors.
    """

    model: str
    files: tuple[str, ...]
    dim: int = 0

    def find(self, name: str, shapes: Shapes, source: Source) -> list[Piece] | None:
        """As `Rule.find`."""
        match = _regex(self.model).fullmatch(name)
        if match is None:
            return None
        words = match.groupdict()
        stacked = "index" not in words and any("{index}" in file for file in self.files)
        count = shapes[name][0] if stacked and shapes[name] else 0
        indices = map(str, range(count)) if stacked else [words.get("index", "")]
        rows = tuple(
            tuple(_fill(file, {**words, "index": index}) for file in self.files) for index in indices
        )
        return Made(rows, stacked, self.dim).find(name, shapes, source)


@dataclass(frozen=True)
class Split:
    """Tensors of the model that follow one another in one tensor of the file.

    Args:
        file: pattern of the file's tensor.
        models: patterns of the model's, in order. With `{index}`: of each matrix of a stacked tensor.
        dim: along which they follow one another; of the model's tensors.
    """

    file: str
    models: tuple[str, ...]
    dim: int = 0

    def find(self, name: str, shapes: Shapes, source: Source) -> list[Piece] | None:
        """As `Rule.find`."""
        matches = [_regex(model).fullmatch(name) for model in self.models]
        position, match = next(((at, match) for at, match in enumerate(matches) if match), (0, None))
        if match is None:
            return None
        words = match.groupdict()
        stored = source.get(_fill(self.file, words))
        if stored is None:
            return None
        names, shape, dim = [_fill(model, words) for model in self.models], shapes[name], self.dim
        unknown = [part for part in names if part not in shapes or not 0 <= dim < len(shapes[part])]
        if unknown:
            raise ValueError(
                f"{name} is a slice of {stored.name}, as is {unknown[0]}, which the model does not have, or without a "
                f"dimension {dim}"
            )
        sizes = [shapes[part][dim] for part in names]
        lead = (int(words["index"]),) if "index" in words and "{index}" not in self.file else ()
        expected = (*stored.shape[: len(lead)], *shape[:dim], sum(sizes), *shape[dim + 1 :])
        if stored.shape != expected or (lead and lead[0] >= stored.shape[0]):
            raise ValueError(
                f"{name} of shape {shape} is a slice of {stored.name} of shape {stored.shape}; expected "
                f"{('more than ' + str(lead[0]), *expected[1:]) if lead else expected}"
            )
        offsets = [0] * len(shape)
        offsets[dim] = sum(sizes[:position])
        return [Piece(stored, whole(shape), (*lead, *offsets))]


def Rename(model: str, file: str) -> Fused:  # noqa: N802  # reads as one of the kinds of rules
    """A tensor of the model that has another name in the file."""
    return Fused(model, (file,))


def pieces_for(name: str, shapes: Shapes, source: Source, rules: Sequence[Rule]) -> list[Piece] | None:
    """What fills a tensor of the model: by the first rule whose tensors are there, else under its own name.

    None: nothing does. Raises ValueError as the rules.
    """
    for rule in (*rules, Made(((name,),))):
        pieces = rule.find(name, shapes, source)
        if pieces is not None:
            return pieces
    return None


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    seen: set[str] = set()
    parts, end = [], 0
    for field in _FIELD.finditer(pattern):
        word = field[1]
        parts.append(re.escape(pattern[end : field.start()]))
        kind = r"\d+" if word == "index" else ".+"
        parts.append(f"(?P={word})" if word in seen else f"(?P<{word}>{kind})")
        seen.add(word)
        end = field.end()
    return re.compile("".join(parts) + re.escape(pattern[end:]))


def _fill(pattern: str, words: Mapping[str, str]) -> str:
    try:
        return _FIELD.sub(lambda field: words[field[1]], pattern)
    except KeyError as error:
        raise ValueError(
            f"rule: {pattern!r} has the word {error}, which the pattern on the other side does not have"
        ) from None
