"""The command line's arguments: reading ranges, blocks and models from text, and the parser."""

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

from layout_planner._blocks import Block, Rows, Tile, parse_block
from layout_planner._checks import MOST_RANKS, shortened
from layout_planner._sweep import Options
from layout_planner.checkpoints import read_checkpoint
from layout_planner.models import ModelShape, load_model, model_names, separate_experts

T = TypeVar("T")

_EPILOG = f"models: {', '.join(model_names())}. Blocks: rows:N, tile:RxC, elements:N, whole."


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line on stderr, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"layout-planner: error: {one_line(message)}\n")


def one_line(message: object) -> str:
    """The message without line breaks, cut in the middle if it quotes something huge."""
    return shortened(" ".join(str(message).split()))


def number(text: str) -> int:
    """A positive integer."""
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_RANKS:
        raise ValueError(f"{text!r} is not an integer from 1 to {MOST_RANKS}")
    return int(text)


def world_sizes(text: str) -> tuple[int, ...]:
    """`64`, `8,24`, `8..1024` (doubling), `8..64:8` (every 8), or several of these with commas; ascending."""
    args: set[int] = set()
    for part in text.split(","):
        first, dots, rest = part.partition("..")
        if not dots:
            args.add(number(part))
            continue
        last, colon, step = rest.partition(":")
        start, stop = number(first), number(last)
        if start > stop:
            raise ValueError(f"{part!r} runs from {start} down to {stop}; write the smaller one first")
        if colon:
            args.update(range(start, stop + 1, number(step)))
        while not colon and start <= stop:
            args.add(start)
            start *= 2
    return tuple(sorted(args))


def blocks(text: str) -> tuple[Block, ...]:
    """Blocks separated by commas, without repeats."""
    return tuple(dict.fromkeys(parse_block(part) for part in text.split(",")))


def tile(text: str) -> tuple[int, int]:
    """`128x128`: rows and columns that share a scale."""
    block = parse_block(f"tile:{text}") if text.count("x") == 1 else None
    if not isinstance(block, Tile):
        raise ValueError(f"{text!r} is not a tile; write its rows and columns, such as 128x128")
    return (block.rows, block.columns)


def tiles(text: str) -> tuple[tuple[int, int], ...]:
    """Tiles separated by commas, without repeats."""
    return tuple(dict.fromkeys(tile(part) for part in text.split(",")))


def ranks(text: str) -> range:
    """`3` or `0..15`, both ends included."""
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise ValueError(
            f"{text!r} is not a rank or a range of ranks; write one rank or a range such as 0..15"
        )
    start, stop = int(first), int(last if dots else first)
    if start > stop:
        raise ValueError(f"{text!r} runs from {start} down to {stop}; write the smaller one first")
    return range(start, stop + 1)


def model(args: argparse.Namespace) -> ModelShape:
    """The model that `--model` or `--checkpoint` names, with experts as `--experts` says."""
    if args.checkpoint is None:
        return named(args.model, args.experts)
    if args.experts != "stacked":
        raise ValueError("--experts is for --model; a checkpoint's tensors are planned as it stores them")
    return read_checkpoint(args.checkpoint)


def named(name: str, experts: str) -> ModelShape:
    """A well-known model with experts stacked or separate."""
    return separate_experts(load_model(name)) if experts == "separate" else load_model(name)


def options(args: argparse.Namespace) -> Options:
    """The planning options among the arguments."""
    return Options(args.align, args.period, args.segments)


def parser() -> Parser:
    """The command line."""
    top = Parser(
        prog="layout-planner", description="Plan how sharded training lays out parameters.", epilog=_EPILOG
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="plan|sweep|draw")
    plan = commands.add_parser("plan", help="plan each group of a model at one world size", epilog=_EPILOG)
    _source(plan)
    _add(plan, "--world-size", number, required=True, help="ranks that share each parameter")
    _planning(plan)
    _add(
        plan, "--tile", tile, help="also show the bytes of quantized gathers with this tile, such as 128x128"
    )
    many = commands.add_parser(
        "sweep", help="padding over world sizes and blocks, with advice", epilog=_EPILOG
    )
    _source(many)
    _add(
        many, "--world-size", world_sizes, required=True, help="8..1024 (doubling), 8..64:8 (every 8) or 8,12"
    )
    _planning(many, many=True)
    _add(many, "--tile", tiles, help="also show the bytes of quantized gathers; 128x128 or 128x128,32x32")
    picture = commands.add_parser("draw", help="draw one group's layout as SVG", epilog=_EPILOG)
    _source(picture)
    _add(picture, "--world-size", number, required=True, help="ranks that share each parameter")
    _planning(picture, json=False)
    picture.add_argument("-o", "--output", required=True, help="the SVG file to write; - is standard output")
    picture.add_argument(
        "--group", help="group to draw (default: the one with the most parameters in the model)"
    )
    _add(picture, "--ranks", ranks, help="ranks to draw, such as 0..15 (default: the first 16)")
    return top


def _source(command: argparse.ArgumentParser) -> None:
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a well-known model, see below")
    which.add_argument(
        "--checkpoint", metavar="PATH", help="a safetensors file, index or folder (headers are read)"
    )


def _planning(
    command: argparse.ArgumentParser,
    *,
    many: bool = False,
    json: bool = True,
    default: tuple[Block, ...] = (Rows(1),),
) -> None:
    shown = ",".join(map(str, default))
    if many:
        _add(
            command,
            "--block",
            blocks,
            default=default,
            help=f"one or more, separated by commas (default: {shown})",
        )
    else:
        _add(
            command,
            "--block",
            parse_block,
            default=default[0],
            help=f"what stays on one rank (default: {shown})",
        )
    _add(command, "--align", number, default=8, help="elements that offsets are multiples of (default: 8)")
    _add(
        command, "--segments", number, default=4, help="the most segments to split a group into (default: 4)"
    )
    command.add_argument(
        "--experts",
        choices=("stacked", "separate"),
        default="stacked",
        help="one tensor for all experts of a layer, or separate tensors for each expert (default: stacked)",
    )
    command.add_argument(
        "--period",
        choices=("tensor", "expert"),
        default="tensor",
        help="blocks run across the stacked experts of a tensor, or start over in each (default: tensor)",
    )
    if json:
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add(command: argparse.ArgumentParser, flag: str, read: Callable[[str], T], **more: object) -> None:
    """Add an argument whose ValueError is printed as it is, after the flag."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    command.add_argument(flag, type=checked, **more)  # type: ignore[arg-type]
