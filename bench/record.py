"""All figures of the report anew, in one go: some 18 minutes on two cores.

python -m bench record [--keep-noisy]

A part whose times the machine was too busy to tell is not written (the old file stays), and the exit code says so.
"""

import argparse
import importlib
import sys
import time

# verb's module, its arguments, whether it measures time
PARTS = (
    ("padding", [], False),
    ("counts", [], False),
    ("speed", ["--workload", "dense", "--ranks", "2", "--rounds", "6"], True),
    ("speed", ["--workload", "moe", "--ranks", "2", "--rounds", "5", "--systems", "ddp,ours,fsdp2,fsdp1"], True),
    ("speed", ["--workload", "dense", "--ranks", "4", "--rounds", "4", "--steps", "1",
               "--systems", "ddp,ours,fsdp2"], True),
    ("speed", ["--workload", "moe", "--ranks", "4", "--rounds", "4", "--steps", "1",
               "--systems", "ddp,ours,fsdp2"], True),
    ("host", [], True),
    ("ablation", ["--rounds", "6"], True),
    ("checkpoint", [], True),
    ("scale", [], False),
    ("report", [], False),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run every part; go on where one fails, and say so at the end."""
    parser = argparse.ArgumentParser(prog="python -m bench record", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--keep-noisy", action="store_true", help="record also on a busy machine, marked as such"
    )
    options = parser.parse_args(arguments)
    failed = []
    for module, given, timed in PARTS:
        line = [*given, *(["--keep-noisy"] if timed and options.keep_noisy else [])]
        name = " ".join([module, *given])
        print(f"\n## python -m bench {name}\n", flush=True)
        start = time.monotonic()
        try:
            code = importlib.import_module(f".{module}", __package__).main(line)
        except Exception as error:  # the other parts' figures are worth having
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 1
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
        if code:
            failed.append(f"{name} (exit {code})")
    for line in failed:
        print(f"not recorded: {line}", file=sys.stderr)
    return 1 if failed else 0
