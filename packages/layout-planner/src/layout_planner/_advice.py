"""Advice on how to pad less, from plans of the alternatives rather than rules of thumb.

Four kinds, at the largest world size of the sweep. In the order in which alternatives are preferred:

    block           those of the sweep, then half of each
    world size      this one, then whole nodes nearby, the nearest first
    shard group     all ranks, then their divisors, the largest first, with the remaining factor as replicas (HSDP)
    merged layers   1, 2 or 4 neighbouring layers gathered as one group: fewer and larger buffers

The first that pads at most 1 % is advised; if there is none, the one that pads least.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from layout_planner._blocks import Rows
from layout_planner._checks import MOST_RANKS
from layout_planner._sweep import BF16, Measure, Options, measure
from layout_planner._table import percent, size
from layout_planner.models import GroupShape, ModelShape, ShapeEntry

_NODE = 8  # ranks; world sizes proposed are whole nodes
_NEARBY = 48  # world sizes tried around the largest one
_FINE = 0.01  # padding too small to be worth a change
_MERGED = (2, 4)  # layers in one group
_SHOWN, _LISTED = 3, 8  # alternatives in a text, and in JSON


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        topic: "world size", "shard group", "block" or "merged layers".
        text: a sentence with the numbers.
        options: the alternatives that were planned, each with its padding ratio, best first.
    """

    topic: str
    text: str
    options: tuple[dict[str, object], ...]

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON values."""
        return {"topic": self.topic, "text": self.text, "options": list(self.options)}


class _Choice(NamedTuple):
    """An alternative: how a text calls it, its measure, and the layers of a group where these are merged."""

    name: str
    measure: Measure
    layers: int | None = None

    def __str__(self) -> str:
        m = self.measure
        return f"{self.name} ({percent(m.padding())}, {size(m.bytes_per_rank)} per rank)"

    def to_dict(self) -> dict[str, object]:
        """The numbers as JSON values."""
        m = self.measure
        numbers: dict[str, object] = {
            "world_size": m.world_size,
            "block": str(m.block),
            "padding_ratio": m.padding(),
            "bf16_bytes_per_rank": m.bytes_per_rank,
        }
        return numbers if self.layers is None else {**numbers, "layers_per_group": self.layers}


def advise(model: ModelShape, measures: Sequence[Measure], options: Options) -> Iterator[Advice]:
    """Advice on a sweep of this model; each piece is yielded as soon as it is ready.

    Args:
        model: the model of the sweep.
        measures: the results of the sweep, at least one.
        options: how it was planned.
    """
    ranks = max(entry.world_size for entry in measures)
    blocks = [entry.block for entry in measures if entry.world_size == ranks]
    halves = [Rows(block.count // 2) for block in blocks if isinstance(block, Rows) and block.count > 1]
    tried = dict.fromkeys([*blocks, *halves])
    choices = [_Choice(str(block), measure(model, ranks, block, options)) for block in tried]
    yield _advice("block", f"block at {ranks} ranks", choices)

    step = max(_NODE, -(-ranks // (2 * _NEARBY) // _NODE) * _NODE)
    first = max(-(-3 * ranks // (4 * _NODE)) * _NODE, _NODE)
    near = range(first, min(5 * ranks // 4, MOST_RANKS) + 1, step)
    near_first = dict.fromkeys([ranks, *sorted(near, key=lambda n: abs(n - ranks))])
    divisors = [n for n in range(ranks, 0, -1) if ranks % n == 0 and (n > 1 or ranks == 1)]
    layers = [1, *(n for n in _MERGED if any(group.count >= n for group in model.groups))]
    for block in blocks:
        choices = [_Choice(str(n), measure(model, n, block, options)) for n in near_first]
        yield _advice("world size", f"world size with {block} near {ranks} ranks", choices)
        choices = [
            _Choice(f"{n} x {ranks // n} replicas", measure(model, n, block, options)) for n in divisors
        ]
        yield _advice("shard group", f"shard group under HSDP with {block} on {ranks} ranks", choices)
        choices = [
            _of_merged(merged(model, n), n, measure(merged(model, n), ranks, block, options)) for n in layers
        ]
        yield _advice("merged layers", f"merged layers with {block} on {ranks} ranks", choices)


def _advice(topic: str, subject: str, choices: Sequence[_Choice]) -> Advice:
    ranked = sorted(choices, key=lambda choice: choice.measure.padding())
    best = next((choice for choice in choices if choice.measure.padding() <= _FINE), ranked[0])
    text = f"{subject}: prefer {best}"
    if others := [choice for choice in choices if choice is not best][:_SHOWN]:
        text += f", compared with {', '.join(map(str, others))}"
    return Advice(topic, f"{text}.", tuple(choice.to_dict() for choice in ranked[:_LISTED]))


def _of_merged(model: ModelShape, layers: int, planned: Measure) -> _Choice:
    gathered = size(BF16 * max(group.numel for group in model.groups))
    groups = "1 layer per group" if layers == 1 else f"{layers} layers per group"
    return _Choice(f"{groups} and {gathered} gathered at once", planned, layers)


def merged(model: ModelShape, layers: int) -> ModelShape:
    """The model with every `layers` neighbouring layers of one shape in one group; the rest form one more."""
    groups: list[GroupShape] = []
    for group in model.groups:
        full, rest = divmod(group.count, layers)
        if group.count == 1 or not full:
            groups.append(group)
            continue
        groups.append(replace(group, count=full, tensors=_side_by_side(group, layers)))
        if rest:
            groups.append(GroupShape(f"{group.name}, the last {rest}", 1, _side_by_side(group, rest)))
    return ModelShape(model.name, tuple(groups))


def _side_by_side(group: GroupShape, layers: int) -> tuple[ShapeEntry, ...]:
    return tuple(
        replace(entry, name=f"{index}.{entry.name}") for index in range(layers) for entry in group.tensors
    )
