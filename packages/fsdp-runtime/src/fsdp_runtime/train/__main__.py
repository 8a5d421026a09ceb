"""The command line. Without a subcommand it trains; under torchrun it joins, else it starts ranks."""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

from .checkpoint import checkpoint_to_resume, read_about
from .compare import compare
from .config import RunConfig, add_run_options, resumed_config, run_config
from .errors import TrainError, one_line, say
from .launch import LAUNCHED, end_process, pick_ranks, rank_status, start_ranks
from .plan import print_plan


class _Parser(argparse.ArgumentParser):
    """Raises errors, which become one line."""

    def error(self, message: str) -> NoReturn:
        raise TrainError(f"{message} (see {self.prog} --help)")


_COMMANDS = {
    "": "Pretrain a small transformer on real text, sharded over all local ranks. Subcommands, each with --help: "
    "compare (the same work on several systems, optimizers or wire formats); plan (the bytes of a rank, before a run).",
    "compare": "The same model, data and steps in several ways, interleaved.",
    "plan": "The bytes of a rank by kind. Allocates nothing.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdp-train``; returns the exit status: 0, 2 for a user error, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if LAUNCHED in os.environ:
            return rank_status(None)
        command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
        if command not in _COMMANDS:
            raise TrainError(f"{command!r} is not a subcommand: there are compare, plan")
        if command and "RANK" in os.environ:
            raise TrainError(f"{command} starts its own ranks: run it without torchrun")
        options = parser_of(command).parse_args(arguments)
        if command == "compare":
            return compare(
                _able_to_plot(_config_to_compare(options)), options.vary, options.rounds, options.ranks
            )
        if command == "plan":
            return print_plan(run_config(options), options.ranks)
        return _train(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SignalException as error:  # ranks have saved and left
        return 128 + error.sigval
    except (TrainError, OSError) as error:
        say(f"fsdp-train: {one_line(error)}")
        return 2


def parser_of(command: str) -> argparse.ArgumentParser:
    """The options of a subcommand, or of the training itself for ""."""
    parser = _Parser(prog=f"fsdp-train {command}".strip(), description=_COMMANDS[command])
    if not command:
        parser.usage = "fsdp-train [SUBCOMMAND] [OPTIONS]"
    if command == "compare":
        parser.add_argument(
            "--vary",
            default="system=fsdp_runtime,fsdp2,ddp,deepspeed",
            help="system=A,B,..., optimizer=A,B,... or gathers=fp32,bf16,fp8,... (default: %(default)s)",
        )
        parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    add_run_options(parser)
    return parser


def _train(options: argparse.Namespace) -> int:
    if options.resume:
        checkpoint = checkpoint_to_resume(options.out)
        saved = RunConfig.from_json(read_about(checkpoint)["config"])
        config = resumed_config(options, checkpoint.parents[1], saved)
    else:
        config = run_config(options)
    _able_to_plot(config)
    if "RANK" in os.environ:
        if options.ranks is not None and options.ranks != int(os.environ["WORLD_SIZE"]):
            raise TrainError(f"--ranks {options.ranks} under a torchrun of {os.environ['WORLD_SIZE']} ranks")
        return rank_status(config)
    ranks = pick_ranks(config, options.ranks)
    config.check(ranks)
    return start_ranks(config, ranks)


def _able_to_plot(config: RunConfig) -> RunConfig:
    """The run. Raises `TrainError` if it draws curves at its end, without matplotlib."""
    if config.plot and importlib.util.find_spec("matplotlib") is None:
        raise TrainError(
            "matplotlib, which draws curves, is missing: pip install matplotlib, or add --no-plot"
        )
    return config


def _config_to_compare(options: argparse.Namespace) -> RunConfig:
    """The run to compare: unless optimizers differ, a short one that saves nothing, with torch's AdamW."""
    short = {"steps": 40, "save_every": 0, "eval_every": 0, "optimizer": "torch-adamw"}
    if not options.vary.startswith("optimizer"):
        chosen = vars(options)
        chosen.update({name: value for name, value in short.items() if chosen[name] is None})
    return run_config(options)


if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:  # started by torchrun
        end_process(status)
    sys.exit(status)
