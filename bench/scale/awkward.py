"""Padding of real models with a few awkward tensors in the layer's layout, in a group of their own, and in holes.

python -m bench awkward      prints a table for each model; writes results/awkward.json

Awkward are tensors of at most 2 % of a layer whose blocks fit no shard size that suits the rest. Three ways:

    in the layer    `plan` as it is: one layout for a layer, in up to four segments
    own group       all layers' awkward tensors are one unit, gathered once a step and held; needs nothing new
    in holes        each is cut into runs of whole blocks, which lie in the rest's holes and are copied on gather
"""

from typing import Any

from ..common import store

MODELS = ("gpt-oss-120b", "deepseek-v3", "llama-3-70b")
BLOCK = "rows:128"
RANKS = tuple(2**k for k in range(3, 15))
_SHARE = 0.02  # of a layer's elements
_WORTH = 0.005  # of a layer's elements that taking a tensor out must save
_COUNT = 4  # kinds of tensors that are taken out at most


def padded(specs: Any, ranks: int) -> int:
    """Elements of a group's buffers."""
    from layout_planner import plan

    return plan(specs, ranks).padded_numel


def awkward(specs: list[Any], ranks: int) -> list[Any]:
    """The tensors that the layer is better off without, the worst kind first."""
    total = sum(spec.numel for spec in specs)
    kinds: dict[tuple[int, int], list[Any]] = {}
    for spec in specs:
        if spec.numel <= _SHARE * total:
            kinds.setdefault((spec.numel, spec.grid.block), []).append(spec)
    rest, least = list(specs), padded(specs, ranks)
    found: list[Any] = []
    for _ in range(_COUNT):
        tried = [(padded([s for s in rest if s not in kinds[kind]], ranks), kind) for kind in kinds]
        if not tried or least - min(tried)[0] < _WORTH * total:
            break
        least, kind = min(tried)
        out = kinds.pop(kind)
        found += out
        rest = [spec for spec in rest if spec not in out]
    return found


def in_holes(rest: list[Any], out: list[Any], ranks: int) -> int:
    """Elements of the buffers of a layer whose awkward tensors are runs of as many blocks as a shard has room for."""
    from layout_planner import TensorSpec, Whole, plan

    shard = max(segment.shard_size for segment in plan(rest, ranks).segments)
    runs = []
    for spec in out:
        length = max(shard // spec.grid.block, 1) * spec.grid.block
        for number, start in enumerate(range(0, spec.numel, length)):
            size = min(length, spec.numel - start)
            runs.append(TensorSpec(f"{spec.name}#{number}", (size,), Whole()))
    return padded([*rest, *runs], ranks)


def ways(model: Any, ranks: int) -> dict[str, Any]:
    """Padding of the whole model, as a share of its parameters, each way; and what the two others take in addition."""
    from dataclasses import replace

    from layout_planner import parse_block

    today = own = holes = copied = 0
    apart: list[Any] = []
    names: set[str] = set()
    for group in model.groups:
        specs = group.specs(parse_block(BLOCK))
        now = padded(specs, ranks)
        out = awkward(specs, ranks) if group.count > 1 else []
        today += group.count * now
        rest = [spec for spec in specs if spec not in out]
        own += group.count * (padded(rest, ranks) if out else now)
        holes += group.count * (in_holes(rest, out, ranks) if out else now)
        copied += group.count * sum(spec.numel for spec in out)
        for layer in range(group.count if out else 0):
            apart += [replace(spec, name=f"{group.name}.{layer}.{spec.name}") for spec in out]
        names |= {spec.name for spec in out}
    own += padded(apart, ranks) if apart else 0
    return {
        "ranks": ranks,
        "awkward": sorted(names),
        "share": copied / model.numel,
        "in the layer": today / model.numel - 1,
        "own group": own / model.numel - 1,
        "in holes": holes / model.numel - 1,
        "held": 2 * sum(spec.numel for spec in apart),
    }


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a row for each number of ranks."""
    rows = [
        [
            f"{one['ranks']:,}",
            ", ".join(name.removesuffix(".weight").split(".")[-1] for name in one["awkward"]) or "none",
            f"{one['share']:.2%}",
            *(f"{one[way]:.2%}" for way in ("in the layer", "own group", "in holes")),
            store.mib(one["held"]),
        ]
        for one in found
    ]
    header = [
        "ranks",
        "awkward",
        "of all",
        "in the layer",
        "own group",
        "in holes",
        "own group holds MiB (bf16)",
    ]
    return store.table(header, rows)


def main(arguments: list[str]) -> int:
    """Compute, print, write."""
    from layout_planner import load_model

    parser = store.parser_of("awkward", __doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    options = parser.parse_args(arguments)
    figures = {name: [ways(load_model(name), ranks) for ranks in RANKS] for name in options.models}
    for name, found in figures.items():
        print(f"{name}, {BLOCK}\n\n{table(found)}\n")
    print(f"written to {store.save('awkward', figures)}")
    return 0
