"""How tensors of a model follow from tensors of a file that are named, fused or stacked otherwise.

    Rename   model.layers.0.norm.weight    <-  layers.0.norm.weight
    Fused    qkv_proj.weight               <-  q_proj.weight, k_proj.weight, v_proj.weight, one below the other
             experts.gate_up_proj (E, 2I, H)  <-  experts.{index}.gate_proj.weight, experts.{index}.up_proj.weight
    Split    q_proj.weight                 <-  the first rows of qkv_proj.weight
             experts.{index}.w1.weight     <-  one matrix of a stacked experts.w1

In a pattern `{index}` stands for a number, the number of an expert, and any other `{word}` for whatever is there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from ragged_shard import Box

from .files import Ints, Stored

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

    def reversed(self) -> "Split":
        """The rule from the model to the file."""
        return Split(self.model, self.files, self.dim)

    def shapes_from(self, source: Source) -> dict[str, Ints]:
        """Names and shapes of the tensors that it makes of these, where no model says them."""
        rows: dict[str, dict[int, dict[int, Stored]]] = {}
        for part, pattern in enumerate(self.files):
            for stored, words in _matches(pattern, source):
                name = _fill(self.model, words)
                rows.setdefault(name, {}).setdefault(int(words.get("index", 0)), {})[part] = stored
        shapes: dict[str, Ints] = {}
        stacked = any("{index}" in file for file in self.files)
        for name, by_index in rows.items():
            parts = list(by_index[min(by_index)].values())
            shape = list(parts[0].shape)
            if len(parts) > 1:
                shape[self.dim] = sum(_size(part.name, part.shape, self.dim) for part in parts)
            shapes[name] = (*((max(by_index) + 1,) if stacked else ()), *shape)
        return shapes

    def find(self, name: str, shapes: Shapes, source: Source) -> list[Piece] | None:
        """The pieces of a tensor of the model. None: the rule does not say, or nothing that it names is there.

        Raises:
            ValueError: some are missing, or of shapes that do not go together; by name.
        """
        match = _regex(self.model).fullmatch(name)
        if match is None:
            return None
        shape, words = shapes[name], match.groupdict()
        stacked = any("{index}" in file for file in self.files)
        if stacked and not shape:
            raise ValueError(f"{name} is a number, and the rule {self} stacks tensors to make it")
        rows: list[tuple[Ints, list[str]]] = []
        for index in range(shape[0]) if stacked else (0,):
            words["index"] = str(index) if stacked else words.get("index", "")
            rows.append(((index,) if stacked else (), [_fill(file, words) for file in self.files]))
        wanted = [file for _, files in rows for file in files]
        missing = [file for file in wanted if file not in source]
        if len(missing) == len(wanted):
            return None
        if missing:
            raise ValueError(f"{name} is made of {len(wanted)} tensors, of which {missing[0]} is missing")
        element, pieces = shape[1:] if stacked else shape, []
        for lead, files in rows:
            pieces += one_after_another(name, lead, element, [source[file] for file in files], self.dim)
        return pieces


@dataclass(frozen=True)
class Split:
    """Tensors of the model that follow one another in one tensor of the file.

    Args:
        file: pattern of the file's tensor.
        models: patterns of the model's, in order. With `{index}`: of each matrix of a stacked tensor.
        dim: along which they follow one another; of the model's tensors.
        sizes: of the model's tensors along `dim`, where no model says them and they are not equal.
    """

    file: str
    models: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def reversed(self) -> Fused:
        """The rule from the model to the file."""
        return Fused(self.file, self.models, self.dim)

    def shapes_from(self, source: Source) -> dict[str, Ints]:
        """As `Fused.shapes_from`. Raises ValueError if the tensor has no such parts; by name."""
        shapes: dict[str, Ints] = {}
        for stored, words in _matches(self.file, source):
            stacked = "{index}" not in self.file and any("{index}" in model for model in self.models)
            shape = stored.shape[1:] if stacked else stored.shape
            total, count = _size(stored.name, shape, self.dim), len(self.models)
            sizes = self.sizes or (total // count,) * count
            if len(sizes) != count or sum(sizes) != total:
                raise ValueError(
                    f"{stored.name} has {total} along dimension {self.dim}; {self} cuts it into {count} of {sizes}"
                )
            for index in range(stored.shape[0]) if stacked else (None,):
                more = words if index is None else {**words, "index": str(index)}
                for model, size in zip(self.models, sizes, strict=True):
                    shapes[_fill(model, more)] = (*shape[: self.dim], size, *shape[self.dim + 1 :])
        return shapes

    def find(self, name: str, shapes: Shapes, source: Source) -> list[Piece] | None:
        """As `Fused.find`."""
        matches = [_regex(model).fullmatch(name) for model in self.models]
        position, match = next(((at, match) for at, match in enumerate(matches) if match), (0, None))
        if match is None:
            return None
        words = match.groupdict()
        stored = source.get(_fill(self.file, words))
        if stored is None:
            return None
        names = [_fill(model, words) for model in self.models]
        unknown = [part for part in names if part not in shapes]
        if unknown:
            raise ValueError(
                f"{name} is a slice of {stored.name}, next to {unknown[0]}, which the model does not have"
            )
        lead = (int(words["index"]),) if "index" in words and "{index}" not in self.file else ()
        before = sum(_size(part, shapes[part], self.dim) for part in names[:position])
        shape, total = shapes[name], sum(_size(part, shapes[part], self.dim) for part in names)
        expected = (*shape[: self.dim], total, *shape[self.dim + 1 :])
        inner, stack = stored.shape[len(lead) :], stored.shape[: len(lead)]
        if inner != expected or any(at >= size for at, size in zip(lead, stack, strict=True)):
            raise ValueError(
                f"{name} of shape {shape} is a slice of {stored.name} of shape {stored.shape}; expected "
                f"{('more than ' + str(lead[0]), *expected) if lead else expected}"
            )
        offsets = [0] * len(shape)
        offsets[self.dim] = before
        return [Piece(stored, Box((0,) * len(shape), shape), (*lead, *offsets))]


def Rename(model: str, file: str) -> Fused:  # noqa: N802  # reads as one of the kinds of rules
    """A tensor of the model that has another name in the file."""
    return Fused(model, (file,))


Rule = Fused | Split

#: Experts as transformers 5 stacks them, from files with a tensor for each expert: Qwen-MoE, DeepSeek, GLM, OLMoE ...
STACKED_EXPERTS: tuple[Rule, ...] = (
    Fused(
        "{layer}.mlp.experts.gate_up_proj",
        ("{layer}.mlp.experts.{index}.gate_proj.weight", "{layer}.mlp.experts.{index}.up_proj.weight"),
    ),
    Fused("{layer}.mlp.experts.down_proj", ("{layer}.mlp.experts.{index}.down_proj.weight",)),
)
#: The same for Mixtral and MiniMax, whose files have other names.
MIXTRAL_EXPERTS: tuple[Rule, ...] = (
    Fused(
        "{layer}.mlp.experts.gate_up_proj",
        (
            "{layer}.block_sparse_moe.experts.{index}.w1.weight",
            "{layer}.block_sparse_moe.experts.{index}.w3.weight",
        ),
    ),
    Fused("{layer}.mlp.experts.down_proj", ("{layer}.block_sparse_moe.experts.{index}.w2.weight",)),
    Rename("{layer}.mlp.{rest}", "{layer}.block_sparse_moe.{rest}"),
)


class _Finds(Protocol):
    def find(self, name: str, shapes: Shapes, source: Source) -> list[Piece] | None: ...


def pieces_for(
    name: str, shapes: Shapes, source: Source, rules: Sequence[Rule], own: Mapping[str, _Finds]
) -> list[Piece] | None:
    """What fills a tensor of the model: by the first rule whose tensors are there, else under its own name.

    `own` are rules of the model by its tensors' names, after `rules`.

    None: nothing does.

    Raises:
        ValueError: some of what a rule names is missing, or a shape is wrong; by name.
    """
    for rule in (*rules, *([own[name]] if name in own else [])):
        pieces = rule.find(name, shapes, source)
        if pieces is not None:
            return pieces
    stored = source.get(name)
    return None if stored is None else one_after_another(name, (), shapes[name], [stored], 0)


def conversions_of(source: Source, rules: Sequence[Rule]) -> dict[str, list[Piece]]:
    """The pieces of each converted tensor, where no model says what there is: of all rules that fit the first counts.

    Tensors that no rule names keep name and shape. A rule that says a stored tensor's name without `{word}` reads it
    also if a rule before it has read it: so it has several names, as a tied one has in a model.

    Raises:
        ValueError: some of what a rule names is missing, shapes that do not go together, or two tensors of one name.
    """
    made: dict[str, list[Piece]] = {}
    left = dict(source)
    for rule in rules:
        patterns = (rule.file,) if isinstance(rule, Split) else rule.files
        there = left if any(map(_FIELD.search, patterns)) else source
        shapes = rule.shapes_from(there)
        used = set[str]()
        for name in shapes:
            pieces = rule.find(name, shapes, there)
            if pieces is None or name in made:
                raise ValueError(
                    f"{name} is made twice: by {rule}, and by a rule before it or under its own name"
                )
            made[name] = pieces
            used.update(piece.stored.name for piece in pieces)
        left = {name: stored for name, stored in left.items() if name not in used}
    for name, stored in left.items():
        if name in made:
            raise ValueError(f"{name} is made twice: by a rule, and under its own name; rename one of them")
        made[name] = one_after_another(name, (), stored.shape, [stored], 0)
    return made


def one_after_another(name: str, lead: Ints, shape: Ints, parts: list[Stored], dim: int) -> list[Piece]:
    """Pieces that fill the element `lead` of a model's tensor (all of it where that is empty)."""
    if len(parts) == 1:
        if parts[0].shape != shape:
            raise ValueError(f"{parts[0].name} has shape {parts[0].shape}; {name} expects {shape}")
        return [
            Piece(parts[0], Box((*lead, *(0,) * len(shape)), ((1,) * len(lead) + shape)), (0,) * len(shape))
        ]
    pieces, at = [], 0
    for stored in parts:
        size = _size(stored.name, stored.shape, dim)
        if len(stored.shape) != len(shape) or _without(stored.shape, dim) != _without(shape, dim):
            raise ValueError(
                f"{stored.name} has shape {stored.shape}; {name} expects slices of {shape} along dimension {dim}"
            )
        offsets = [0] * len(shape)
        offsets[dim] = at
        box = Box((*lead, *offsets), (*(1,) * len(lead), *stored.shape))
        pieces.append(Piece(stored, box, (0,) * len(shape)))
        at += size
    if at != shape[dim]:
        names = [stored.name for stored in parts]
        raise ValueError(f"{names} have {at} together along dimension {dim}; {name} expects {shape[dim]}")
    return pieces


def _size(name: str, shape: Ints, dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise ValueError(f"{name} of shape {shape} has no dimension {dim}, which a rule names")
    return shape[dim]


def _without(shape: Ints, dim: int) -> Ints:
    return shape[:dim] + shape[dim + 1 :]


def _matches(pattern: str, source: Source) -> Iterator[tuple[Stored, dict[str, str]]]:
    """Stored tensors whose names fit, with the words that the pattern's fields stand for."""
    for name, stored in source.items():
        if (match := _regex(pattern).fullmatch(name)) is not None:
            yield stored, match.groupdict()


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
