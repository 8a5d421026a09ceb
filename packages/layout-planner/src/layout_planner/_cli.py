"""The command line: `plan`, `sweep` and `draw`. Results go to stdout, errors to stderr in one line."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from layout_planner import _arguments as arguments
from layout_planner._advice import advise
from layout_planner._gathers import (
    GROUP_HEADERS,
    GatherMeasure,
    gathers_row,
    gathers_table,
    group_dict,
    group_row,
    plan_matrices,
    sweep_gathers,
)
from layout_planner._layout import Layout
from layout_planner._quantized import QuantizedPlan
from layout_planner._sweep import BF16, plan_group, sweep, sweep_row, sweep_table
from layout_planner._table import markdown, percent, size
from layout_planner.models import GroupShape, ModelShape


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for bad input, 1 if the reader of stdout has gone."""
    options = arguments.parser().parse_args(argv)
    try:
        for line in _COMMANDS[options.command](options):
            print(line, flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # keeps the flush at exit from failing too
        return 1
    except (ValueError, ImportError, OSError) as error:
        print(f"layout-planner: error: {arguments.one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _plan(args: argparse.Namespace) -> Iterator[str]:
    model, options = arguments.model(args), arguments.options(args)
    planned = [(group, plan_group(group, args.world_size, args.block, options)) for group in model.groups]
    quantized = _quantized(model, args)
    if args.json:
        content = _plan_to_dict(model, args, planned)
        if args.tile:
            content["quantized"] = [group_dict(group, plan) for group, plan in quantized]
        yield json.dumps(content, indent=2)
        return
    yield f"{model.name}: {model.numel:,} parameters, {args.world_size} ranks, block {args.block}"
    yield ""
    headers = ("<group", "layers", "tensors", "parameters", "<shard size", "padding", "<bounded by", "gap")
    rows = [_plan_row(group, layout) for group, layout in planned]
    padded = sum(group.count * layout.padded_numel for group, layout in planned)
    bound = sum(group.count * layout.lower_bound for group, layout in planned)
    number_of = sum(group.count * len(group.tensors) for group in model.groups)
    layers = sum(group.count for group in model.groups)
    total = [percent(padded / model.numel - 1), "", percent(padded / bound - 1)]
    rows.append(["total", f"{layers:,}", f"{number_of:,}", f"{model.numel:,}", "", *total])
    yield markdown(headers, rows)
    yield ""
    most = max(layout.padded_numel for _, layout in planned)
    shard_bytes, waste = BF16 * padded / args.world_size, BF16 * (padded - model.numel) / args.world_size
    gathered = size(BF16 * most)
    yield f"bf16: {size(shard_bytes)} per rank, {size(waste)} of it padding; at most {gathered} gathered by one group."
    yield "Tensors, parameters and shard sizes (elements per rank, one per segment) are those of one layer."
    if args.tile:
        yield f"\n{_GATHERS}, of one layer:\n"
        yield markdown(GROUP_HEADERS, [group_row(group, plan) for group, plan in quantized])


_GATHERS = "Bytes of a gather of the matrices, quantized with whole tiles or with tiles cut between rows"


def _quantized(model: ModelShape, args: argparse.Namespace) -> list[tuple[GroupShape, QuantizedPlan]]:
    """The quantized layouts of every group that has matrices, if a tile was given."""
    if not args.tile:
        return []
    options = arguments.options(args)
    plans = [
        (group, plan_matrices(group, args.world_size, args.block, args.tile, options))
        for group in model.groups
    ]
    return [(group, plan) for group, plan in plans if plan is not None]


def _plan_row(group: GroupShape, layout: Layout) -> list[str]:
    return [
        group.name,
        f"{group.count:,}",
        f"{len(group.tensors):,}",
        f"{group.numel:,}",
        " + ".join(f"{segment.shard_size:,}" for segment in layout.segments),
        percent(layout.padding_ratio),
        layout.bound.reason,
        percent(layout.gap),
    ]


def _plan_to_dict(
    model: ModelShape, args: argparse.Namespace, planned: Sequence[tuple[GroupShape, Layout]]
) -> dict[str, object]:
    groups = [
        {
            "name": group.name,
            "layers": group.count,
            "numel": layout.numel,
            "padded_numel": layout.padded_numel,
            "padding_ratio": layout.padding_ratio,
            "lower_bound": layout.lower_bound,
            "lower_bound_reason": layout.bound.reason,
            "gap": layout.gap,
            "fingerprint": layout.fingerprint(),
            "layout": json.loads(layout.to_json()),
        }
        for group, layout in planned
    ]
    padded = sum(group.count * layout.padded_numel for group, layout in planned)
    bound = sum(group.count * layout.lower_bound for group, layout in planned)
    return {
        "model": model.name,
        "world_size": args.world_size,
        "block": str(args.block),
        "period": args.period,
        "align": args.align,
        "groups": groups,
        "numel": model.numel,
        "padded_numel": padded,
        "padding_ratio": padded / model.numel - 1,
        "lower_bound": bound,
        "gap": padded / bound - 1,
        "bf16_bytes_per_rank": BF16 * padded / args.world_size,
    }


def _sweep(args: argparse.Namespace) -> Iterator[str]:
    model, options = arguments.model(args), arguments.options(args)
    rows = sweep(model, args.world_size, args.block, options)
    if args.json:
        measures = list(rows)
        advised = [advice.to_dict() for advice in advise(model, measures, options)]
        content = {"model": model.name, "numel": model.numel, "period": args.period, "align": args.align}
        measured = [row.to_dict() for row in measures]
        if args.tile:
            content["quantized"] = [row.to_dict() for row in _sweep_gathers(model, args)]
        yield json.dumps({**content, "measures": measured, "advice": advised}, indent=2)
        return
    yield f"{model.name}: {model.numel:,} parameters; padding in % of them"
    yield ""
    table, measures = sweep_table(args.block), []
    yield table.head()
    for row in rows:
        measures.append(row)
        yield table.row(sweep_row(row))
    if args.tile:
        gathers = gathers_table(args.block)
        yield f"\n{_GATHERS}, of all layers:\n\n{gathers.head()}"
        for gather in _sweep_gathers(model, args):
            yield gathers.row(gathers_row(gather))
    yield ""
    yield "Advice"
    for advice in advise(model, measures, options):
        yield f"- {advice.text}"


def _sweep_gathers(model: ModelShape, args: argparse.Namespace) -> Iterator[GatherMeasure]:
    return sweep_gathers(model, args.world_size, args.block, args.tile, arguments.options(args))


def _draw(args: argparse.Namespace) -> Iterator[str]:
    model = arguments.model(args)
    group = model.group(args.group) if args.group else max(model.groups, key=lambda g: g.count * g.numel)
    layout = plan_group(group, args.world_size, args.block, arguments.options(args))
    prefix = f"one of {group.count} equal layers, " if group.count > 1 else ""
    title = f"{model.name} {group.name}: {prefix}{args.world_size} ranks, {args.block}"
    picture = layout.to_svg(title=title, ranks=args.ranks)
    if args.output == "-":
        yield picture.rstrip("\n")
        return
    Path(args.output).write_text(picture, encoding="utf-8")
    yield f"{args.output}: {title}, padding {percent(layout.padding_ratio)}"


_COMMANDS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "plan": _plan,
    "sweep": _sweep,
    "draw": _draw,
}
