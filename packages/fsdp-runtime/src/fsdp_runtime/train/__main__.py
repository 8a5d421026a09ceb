"""The command line. Without a subcommand it trains; under torchrun it joins, else it starts ranks."""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

from .checkpoint import latest, read_about, run_to_resume
from .compare import compare
from .config import RunConfig, add_run_options, resumed_config, run_config
from .errors import TrainError, one_line, say
from .launch import LAUNCHED, end_process, pick_ranks, rank_status, start_ranks
from .plan import print_plan


class _Parser(argparse.ArgumentParser):
    """Raises errors, which become one line."""

    def error(self, message: str) -> NoReturn:
        raise TrainError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdp-train``; returns the exit status: 0, 2 for a user error, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if LAUNCHED in os.environ:
            return rank_status(None)
        first = arguments[0] if arguments else "-"
        if not first.startswith("-") and first not in _SUBCOMMANDS:
            raise TrainError(f"{first!r} is not a subcommand: there are {', '.join(_SUBCOMMANDS)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise TrainError("matplotlib, which draws curves, is missing: pip install 'fsdp-runtime[train]'")
        if first in _SUBCOMMANDS:
            if "RANK" in os.environ:
                raise TrainError(f"{first} starts its own ranks: run it without torchrun")
            return _SUBCOMMANDS[first][1](arguments[1:])
        return _train(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SignalException as error:  # ranks have saved and left
        return 128 + error.sigval
    except (TrainError, OSError) as error:
        say(f"fsdp-train: {one_line(error)}")
        return 2


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    return _Parser(
        prog=f"fsdp-train {name}".strip(),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _train(argv: list[str]) -> int:
    lines = ["Pretrain a small transformer on real text, sharded over all local ranks.", ""]
    lines += ["subcommands (each has --help); without one it trains:"]
    lines += [f"  {name:<12} {text}" for name, (text, _) in _SUBCOMMANDS.items()]
    parser = _parser("", "\n".join(lines))
    parser.usage = "fsdp-train [SUBCOMMAND] [OPTIONS]"
    add_run_options(parser)
    options = parser.parse_args(argv)
    config = _resumed(options) if options.resume else run_config(options)
    if "RANK" in os.environ:
        if options.ranks is not None and options.ranks != int(os.environ["WORLD_SIZE"]):
            raise TrainError(f"--ranks {options.ranks} under a torchrun of {os.environ['WORLD_SIZE']} ranks")
        return rank_status(config)
    ranks = pick_ranks(config, options.ranks)
    config.check(ranks)
    return start_ranks(config, ranks)


def _resumed(options: argparse.Namespace) -> RunConfig:
    run = run_to_resume(options.out)
    checkpoint = latest(run)
    assert checkpoint is not None  # run_to_resume returns no other
    return resumed_config(options, run, RunConfig.from_json(read_about(checkpoint)["config"]))


def _compare(argv: list[str]) -> int:
    parser = _parser("compare", "The same model, data and steps in several ways, interleaved.")
    parser.add_argument(
        "--vary",
        default="system=fsdp_runtime,fsdp2,ddp,deepspeed",
        help="system=A,B,..., optimizer=A,B,... or gathers=fp32,bf16,fp8,... (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    add_run_options(parser)
    options = parser.parse_args(argv)
    config = run_config(options) if options.vary.startswith("optimizer") else _for_comparison(options)
    return compare(config, options.vary, options.rounds, options.ranks)


def _for_comparison(options: argparse.Namespace) -> RunConfig:
    """A short run that saves nothing, with torch's optimizer, which every system accepts."""
    for name, value in (("steps", 40), ("save_every", 0), ("eval_every", 0), ("optimizer", "torch-adamw")):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return run_config(options)


def _plan(argv: list[str]) -> int:
    parser = _parser("plan", "The bytes of a rank by kind. Allocates nothing.")
    add_run_options(parser)
    options = parser.parse_args(argv)
    return print_plan(run_config(options), options.ranks)


_SUBCOMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "compare": ("the same work on several systems, optimizers or wire formats", _compare),
    "plan": ("the bytes of a rank, before a run", _plan),
}


if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:  # started by torchrun
        end_process(status)
    sys.exit(status)
