"""Advice on how to pad less, from plans of the alternatives rather than rules of thumb.

Four kinds of alternatives, each with its numbers, at the largest world size of the sweep:

* other world sizes nearby,
* smaller shard groups under HSDP: divisors of the world size, with the remaining factor as replicas,
* other block sizes,
* several neighbouring layers gathered as one group, which means fewer and larger buffers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from layout_planner._blocks import Block, Rows
from layout_planner._checks import MOST_RANKS
from layout_planner._sweep import BF16, Measure, Options, measure
from layout_planner._table import percent, size
from layout_planner.models import GroupShape, ModelShape, ShapeEntry

_NODE = 8  # ranks; world sizes proposed are whole nodes
_NEARBY = 48  # world sizes tried around the largest one
_FINE = 0.01  # padding too small to be worth a change
_MERGED = (2, 4)  # layers in one group


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


def advise(model: ModelShape, measures: Sequence[Measure], options: Options) -> Iterator[Advice]:
    """Advice on a sweep of this model; each piece is yielded as soon as it is ready.

    Args:
        model: the model of the sweep.
        measures: the results of the sweep, at least one.
        options: how it was planned.
    """
    world_size = max(entry.world_size for entry in measures)
    largest = [entry for entry in measures if entry.world_size == world_size]
    yield _on_blocks(model, largest, options)
    for entry in largest:
        yield _on_world_sizes(model, entry, [m for m in measures if m.block == entry.block], options)
        yield _on_shard_groups(model, entry, options)
        yield _on_merging(model, entry, options)


def _on_blocks(model: ModelShape, largest: Sequence[Measure], options: Options) -> Advice:
    tried = {measure.block: measure for measure in largest}
    for block in list(tried):
        if isinstance(block, Rows) and block.count > 1:  # would a smaller one do?
            half = Rows(block.count // 2)
            tried.setdefault(half, measure(model, largest[0].world_size, half, options))
    ranked = sorted(tried.values(), key=Measure.padding)
    listing = ", ".join(f"{measure.block} pads {percent(measure.padding())}" for measure in ranked)
    fine = [measure.block for measure in ranked if measure.padding() <= _FINE]
    if len(fine) == len(ranked):
        verdict = f"each stays within {_FINE:.0%}"
    elif fine:
        verdict = f"prefer {_either(fine)}, within {_FINE:.0%}"
    else:
        verdict = f"prefer {ranked[0].block}; none stays within {_FINE:.0%}"
    text = f"block at {largest[0].world_size} ranks: {verdict}: {listing}."
    return Advice("block", text, tuple(_option(measure) for measure in ranked))


def _on_world_sizes(
    model: ModelShape, largest: Measure, swept: Sequence[Measure], options: Options
) -> Advice:
    world_size, block = largest.world_size, largest.block
    step = max(_NODE, -(-world_size // (2 * _NEARBY) // _NODE) * _NODE)
    first = -(-3 * world_size // (4 * _NODE)) * _NODE
    nearby = [
        measure(model, other, block, options)
        for other in range(first, min(5 * world_size // 4, MOST_RANKS) + 1, step)
        if other
    ]
    ranked = sorted([largest, *nearby], key=lambda m: (m.planned / m.numel, m.world_size != world_size))
    best = ranked[0]
    low, high = min(swept, key=Measure.padding), max(swept, key=Measure.padding)
    text = f"world size with {block}: "
    if low.world_size != high.world_size:
        text += (
            f"of those swept {low.world_size} pads least ({percent(low.padding())}) "
            f"and {high.world_size} most ({percent(high.padding())}); "
        )
    if best.padding() < largest.padding() - _FINE / 10:
        text += f"near {world_size} ({_cost(largest)}) prefer {best.world_size} ({_cost(best)})."
    else:
        text += f"no whole number of nodes near {world_size} pads noticeably less than {percent(largest.padding())}."
    return Advice("world size", text, tuple(_option(measure) for measure in ranked[:8]))


def _on_shard_groups(model: ModelShape, largest: Measure, options: Options) -> Advice:
    world_size, block = largest.world_size, largest.block
    groups = [d for d in range(world_size // 2, 1, -1) if world_size % d == 0]
    measures = [largest, *(measure(model, group, block, options) for group in groups)]
    text = f"shard group under HSDP with {block} on {world_size} ranks: "
    fine = [m for m in measures if m.padding() <= _FINE]
    if largest in fine or len(measures) == 1:
        text += f"all {world_size} ranks in one shard group pad {_cost(largest)}"
        shown = measures[1:3]
    else:
        text += f"{world_size} (no replicas) pads {_cost(largest)}; " + (
            f"prefer {_group(fine[0], world_size)}" if fine else f"none is within {_FINE:.0%}"
        )
        shown = [m for m in measures[1:4] if m not in fine[:1]]
    if shown:
        text += ", compared with " + " and ".join(_group(m, world_size) for m in shown)
    best = sorted(measures, key=lambda m: (m.padding(), -m.world_size))
    return Advice("shard group", text + ".", tuple(_option(m) for m in best[:8]))


def _group(measure: Measure, world_size: int) -> str:
    replicas = world_size // measure.world_size
    return f"{measure.world_size} x {replicas} replicas ({_cost(measure)})"


def _cost(measure: Measure) -> str:
    return f"{percent(measure.padding())}, {size(measure.bytes_per_rank)} per rank"


def _on_merging(model: ModelShape, largest: Measure, options: Options) -> Advice:
    world_size, block = largest.world_size, largest.block
    text = f"merged layers with {block} on {world_size} ranks: "
    counts = [layers for layers in _MERGED if any(group.count >= layers for group in model.groups)]
    if not counts:
        return Advice("merged layers", text + "no two layers of this model are equal.", ())
    by_count = {1: largest}
    for layers in counts:
        by_count[layers] = measure(merged(model, layers), world_size, block, options)
    parts = []
    for layers, m in by_count.items():
        gathered = BF16 * max(group.numel for group in merged(model, layers).groups)
        per_group = "layer per group" if layers == 1 else "layers per group"
        parts.append(f"{layers} {per_group} {percent(m.padding())} and {size(gathered)} gathered at once")
    least = min(by_count, key=lambda layers: (round(by_count[layers].padding(), 4), layers))
    gain = largest.padding() - by_count[least].padding()
    verdict = f"prefer {least} layers per group" if gain > _FINE / 10 else "not worth it"
    listed = sorted(by_count, key=lambda layers: by_count[layers].padding())
    numbers = tuple({**_option(by_count[layers]), "layers_per_group": layers} for layers in listed)
    return Advice("merged layers", f"{text}{verdict}: {', '.join(parts)}.", numbers)


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


def _option(measure: Measure) -> dict[str, object]:
    return {
        "world_size": measure.world_size,
        "block": str(measure.block),
        "padding_ratio": measure.padding(),
        "bf16_bytes_per_rank": measure.bytes_per_rank,
    }


def _either(blocks: Sequence[Block]) -> str:
    names = [str(block) for block in blocks]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
