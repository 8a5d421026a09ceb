"""The command line: `plan`, `sweep` and `draw`. Results go to stdout, errors to stderr in one line."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from layout_planner._blocks import Rows, parse_block
from layout_planner._checks import MOST_RANKS, shortened
from layout_planner._sweep import BF16, SWEEP_HEADERS, Options, measure, plan_group, sweep_row
from layout_planner._table import markdown, percent, size
from layout_planner.checkpoints import read_checkpoint
from layout_planner.models import ModelShape, load_model, model_names, separate_experts

T = TypeVar("T")

_EPILOG = f"models: {', '.join(model_names())}. Blocks: rows:N, tile:RxC, elements:N, whole."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for bad input, 1 if the reader of stdout has gone."""
    args = _parser().parse_args(argv)
    try:
        for line in args.run(args):
            print(line, flush=True)
    except BrokenPipeError:
        # Keeps the flush at exit from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, ImportError, OSError) as error:
        print(f"layout-planner: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line on stderr, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"layout-planner: error: {_one_line(message)}\n")


def _one_line(message: object) -> str:
    """The message without line breaks, cut in the middle if it quotes something huge."""
    return shortened(" ".join(str(message).split()))


def _parser() -> _Parser:
    top = _Parser(
        prog="layout-planner", description="Plan how sharded training lays out parameters.", epilog=_EPILOG
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="plan|sweep|draw")

    def command(
        name: str, run: Callable[[argparse.Namespace], Iterator[str]], does: str, *, many: bool = False
    ) -> argparse.ArgumentParser:
        """Add a command with the arguments that all have; ``many``: lists of world sizes and blocks."""
        added = commands.add_parser(name, help=does, epilog=_EPILOG)
        added.set_defaults(run=run)
        which = added.add_mutually_exclusive_group(required=True)
        which.add_argument("--model", help="a well-known model, see below")
        headers = "a safetensors file, index or folder (headers are read)"
        which.add_argument("--checkpoint", metavar="PATH", help=headers)
        add = added.add_argument
        if many:
            add("--world-size", type=_shown(world_sizes), required=True, help="8..1024 (doubling) or 8,12")
            blocks = "one or more, separated by commas (default: rows:1)"
            add("--block", type=_listed(parse_block), default=(Rows(1),), help=blocks)
        else:
            add("--world-size", type=_shown(number), required=True, help="ranks that share each parameter")
            block = "block that stays on one rank (default: rows:1)"
            add("--block", type=_shown(parse_block), default=Rows(1), help=block)
        aligned = "elements that offsets are multiples of (default: 8)"
        add("--align", type=_shown(number), default=8, help=aligned)
        segments = "the most segments to split a group into (default: 4)"
        add("--segments", type=_shown(number), default=4, help=segments)
        stacked = "one tensor for all experts of a layer, or one for each expert (default: stacked)"
        add("--experts", choices=("stacked", "separate"), default="stacked", help=stacked)
        if run is not _draw:
            add("--json", action="store_true", help="print JSON instead of tables")
        return added

    command("plan", _plan, "plan each group of a model at one world size")
    command("sweep", _sweep, "padding over world sizes and blocks", many=True)
    draw = command("draw", _draw, "draw one group's layout as SVG")
    draw.add_argument("-o", "--output", required=True, help="the SVG file to write; - is standard output")
    draw.add_argument("--group", help="group to draw (default: the one with the most parameters)")
    draw.add_argument("--ranks", type=_shown(ranks), help="ranks to draw: 3 or 0..15 (default: the first 16)")
    return top


def _shown(read: Callable[[str], T]) -> Callable[[str], T]:
    """A type of arguments, whose ValueError is printed as it is."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _listed(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A type of arguments: several with commas, without repeats."""
    return _shown(lambda text: tuple(dict.fromkeys(read(part) for part in text.split(","))))


def number(text: str) -> int:
    """A positive integer."""
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_RANKS:
        raise ValueError(f"{text!r} is not an integer from 1 to {MOST_RANKS}")
    return int(text)


def world_sizes(text: str) -> tuple[int, ...]:
    """`64`, `8..1024` (doubling), or several of these with commas; ascending."""
    sizes: set[int] = set()
    for part in text.split(","):
        start, stop = _ends(part, number)
        while start <= stop:
            sizes.add(start)
            start *= 2
    return tuple(sorted(sizes))


def ranks(text: str) -> range:
    """`3` or `0..15`, both ends included."""
    if not re.fullmatch(r"[0-9]+(\.\.[0-9]+)?", text):
        raise ValueError(f"{text!r} is not a rank or a range of ranks; write 3, or a range such as 0..15")
    start, stop = _ends(text, int)
    return range(start, stop + 1)


def _ends(text: str, read: Callable[[str], int]) -> tuple[int, int]:
    """The ends of a range `8..64`; of `8` alone, both."""
    first, dots, last = text.partition("..")
    start, stop = read(first), read(last if dots else first)
    if start > stop:
        raise ValueError(f"{text!r} runs from {start} down to {stop}; write the smaller one first")
    return start, stop


def named(name: str, experts: str) -> ModelShape:
    """A well-known model with experts stacked or separate."""
    return separate_experts(load_model(name)) if experts == "separate" else load_model(name)


def _chosen(args: argparse.Namespace) -> tuple[ModelShape, Options]:
    """The model that `--model` or `--checkpoint` names, and the planning options."""
    options = Options(args.align, args.segments)
    if args.checkpoint is None:
        return named(args.model, args.experts), options
    if args.experts != "stacked":
        raise ValueError("--experts is for --model; a checkpoint's tensors are planned as it stores them")
    return read_checkpoint(args.checkpoint), options


# ---------------------------------------------------------------- commands


def _plan(args: argparse.Namespace) -> Iterator[str]:
    model, options = _chosen(args)
    planned = [(group, plan_group(group, args.world_size, args.block, options)) for group in model.groups]
    padded = sum(group.count * layout.padded_numel for group, layout in planned)
    bound = sum(group.count * layout.lower_bound for group, layout in planned)
    if args.json:
        content: dict[str, object] = {
            "model": model.name,
            "world_size": args.world_size,
            "block": str(args.block),
            "align": args.align,
            "groups": [
                {
                    "name": group.name,
                    "layers": group.count,
                    "numel": layout.numel,
                    "padded_numel": layout.padded_numel,
                    "lower_bound": layout.lower_bound,
                    "lower_bound_reason": layout.bound.reason,
                    "fingerprint": layout.fingerprint(),
                    "layout": json.loads(layout.to_json()),
                }
                for group, layout in planned
            ],
            "numel": model.numel,
            "padded_numel": padded,
            "lower_bound": bound,
            "bf16_bytes_per_rank": BF16 * padded / args.world_size,
        }
        yield json.dumps(content, indent=2)
        return
    yield f"{model.name}: {model.numel:,} parameters, {args.world_size} ranks, block {args.block}"
    yield ""
    headers = ("<group", "layers", "tensors", "parameters", "<shard size", "padding", "<bounded by", "gap")
    rows = [
        [
            group.name,
            f"{group.count:,}",
            f"{len(group.tensors):,}",
            f"{group.numel:,}",
            " + ".join(f"{segment.shard_size:,}" for segment in layout.segments),
            percent(layout.padding_ratio),
            layout.bound.reason,
            percent(layout.gap),
        ]
        for group, layout in planned
    ]
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
    yield "Tensors, parameters and shard sizes (elements per rank, one per segment) are one layer's."


def _sweep(args: argparse.Namespace) -> Iterator[str]:
    model, options = _chosen(args)
    rows = [measure(model, number, block, options) for block in args.block for number in args.world_size]
    if args.json:
        content = {"model": model.name, "numel": model.numel, "align": args.align}
        yield json.dumps({**content, "measures": [row.to_dict() for row in rows]}, indent=2)
        return
    yield f"{model.name}: {model.numel:,} parameters; padding in % of them"
    yield ""
    yield markdown(SWEEP_HEADERS, [sweep_row(row) for row in rows])


def _draw(args: argparse.Namespace) -> Iterator[str]:
    model, options = _chosen(args)
    group = model.group(args.group) if args.group else max(model.groups, key=lambda g: g.count * g.numel)
    layout = plan_group(group, args.world_size, args.block, options)
    prefix = f"one of {group.count} equal layers, " if group.count > 1 else ""
    title = f"{model.name} {group.name}: {prefix}{args.world_size} ranks, {args.block}"
    picture = layout.to_svg(title=title, ranks=args.ranks)
    if args.output == "-":
        yield picture.rstrip("\n")
        return
    Path(args.output).write_text(picture, encoding="utf-8")
    yield f"{args.output}: {title}, padding {percent(layout.padding_ratio)}"
