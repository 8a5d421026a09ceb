"""The command line. Without a subcommand it trains; under torchrun it joins, else it starts ranks."""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .config import RunConfig, add_run_options, resumed_config, run_config
from .errors import TrainError, one_line, say, silence
from .report import closing_lines

_NEEDED = ("block_optim", "matplotlib", "numpy")


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as all others."""

    def error(self, message: str) -> NoReturn:
        raise TrainError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdp-train``; returns the exit status: 0, 2 for a user error, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        first = arguments[0] if arguments else "-"
        if not first.startswith("-") and first not in _SUBCOMMANDS:
            raise TrainError(f"{first!r} is not a subcommand: there are {', '.join(_SUBCOMMANDS)}")
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing and not {"-h", "--help"} & set(arguments):
            raise TrainError(f"{', '.join(missing)} not installed: pip install 'fsdp-runtime[train]'")
        if first in _SUBCOMMANDS:
            if "RANK" in os.environ:
                raise TrainError(f"{first} starts its own ranks: run it without torchrun")
            return _SUBCOMMANDS[first][1](arguments[1:])
        return _train(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who reads our table has left
        silence(sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (TrainError, OSError) as error:
        say(f"fsdp-train: {one_line(error)}")
        return 2


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    return _Parser(prog=f"fsdp-train {name}".strip(), description=text)


def _overview() -> str:
    """The top of ``--help``."""
    rows = [f"  {name:<12} {text}" for name, (text, _) in _SUBCOMMANDS.items()]
    first = "Pretrain a small transformer on real text, sharded over all local ranks."
    return "\n".join([first, "", "subcommands (each has --help); without one it trains:", *rows])


def _train(argv: list[str]) -> int:
    parser = _parser("", _overview())
    parser.usage = "fsdp-train [SUBCOMMAND] [OPTIONS]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_run_options(parser)
    options = parser.parse_args(argv)
    config = _resumed(options) if options.resume else run_config(options)
    if "RANK" in os.environ:
        from .launch import run_rank, status_of

        if options.ranks is not None and options.ranks != int(os.environ["WORLD_SIZE"]):
            raise TrainError(f"--ranks {options.ranks} under a torchrun of {os.environ['WORLD_SIZE']} ranks")
        return status_of(lambda: run_rank(config), prints=True)
    from .launch import pick_ranks, start_ranks

    ranks = pick_ranks(config, options.ranks)
    config.check(ranks)
    summary = start_ranks(config, ranks)
    say(closing_lines(summary))
    return 128 + summary["stopped_by"] if summary["stopped"] and summary["stopped_by"] else 0


def _resumed(options: argparse.Namespace) -> RunConfig:
    from .runs import run_to_resume, saved_config

    run = run_to_resume(options.out)
    return resumed_config(options, run, saved_config(run))


def _compare(argv: list[str]) -> int:
    from .compare import compare

    parser = _parser("compare", "The same model, data and steps in several ways, interleaved.")
    parser.add_argument(
        "--vary",
        default="system=fsdp_runtime,fsdp2,ddp,deepspeed",
        help="system=A,B,..., optimizer=A,B,... or gathers=fp32,bf16,fp8,... (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--seeds", default="", help="one round per seed instead, such as 0,1,2")
    add_run_options(parser)
    options = parser.parse_args(argv)
    if options.seeds and options.seed is not None:
        raise TrainError("--seeds and --seed: give one of the two")
    try:
        seeds = [int(seed) for seed in options.seeds.split(",") if seed]
    except ValueError:
        raise TrainError(f"--seeds {options.seeds}: expected numbers with commas between them") from None
    config = run_config(options) if options.vary.startswith("optimizer") else _for_comparison(options)
    return compare(config, options.vary, options.rounds, seeds, options.ranks)


def _for_comparison(options: argparse.Namespace) -> RunConfig:
    """A comparison is short, saves nothing and uses torch's optimizer, which every system takes."""
    for name, value in (("steps", 40), ("save_every", 0), ("eval_every", 0), ("optimizer", "torch-adamw")):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return run_config(options)


def _plan(argv: list[str]) -> int:
    from .plan import print_plan

    parser = _parser("plan", "The bytes that each rank will hold, by unit and by kind. Nothing is allocated.")
    add_run_options(parser)
    options = parser.parse_args(argv)
    return print_plan(run_config(options), options.ranks)


def _verify(argv: list[str]) -> int:
    from .runs import verify

    parser = _parser("verify", "Check that checkpoints are as they were written; name damaged files.")
    parser.add_argument("run", help="a run's folder, or one of its checkpoints")
    return verify(parser.parse_args(argv).run)


_SUBCOMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "compare": ("the same work on several systems, optimizers or wire formats", _compare),
    "plan": ("what a rank will hold in memory, before anything is trained", _plan),
    "verify": ("whether checkpoints are as they were written", _verify),
}


if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:  # started by torchrun
        from .launch import end_process

        end_process(status)
    sys.exit(status)
