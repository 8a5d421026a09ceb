"""All figures of the report again, in one go: three quarters of an hour on two cores.

python -m bench record [--keep-noisy]

A part whose times the machine was too busy to tell is not written (the old file stays), and the exit code says so.
"""

import sys
import time

from .commands import run
from .common import store

# command, its arguments, whether it measures time
PARTS: tuple[tuple[str, list[str], bool], ...] = (
    ("padding", [], False),
    ("awkward", [], False),
    ("counts", [], False),
    ("calls", [], False),
    ("speed", ["--workload", "dense", "--ranks", "2", "--rounds", "6"], True),
    ("speed", ["--workload", "moe", "--ranks", "2", "--rounds", "5",
               "--systems", "alone,ddp,ours,ours-peer-memory,ours-sends,ours-collectives,fsdp2,fsdp1,deepspeed"], True),
    ("speed", ["--workload", "dense", "--ranks", "4", "--rounds", "4", "--steps", "1",
               "--systems", "alone,ddp,ours,ours-sends,ours-collectives,fsdp2,deepspeed"], True),
    ("speed", ["--workload", "moe", "--ranks", "4", "--rounds", "4", "--steps", "1",
               "--systems", "alone,ddp,ours,ours-sends,ours-collectives,fsdp2"], True),
    ("speed", ["--workload", "dense", "--ranks", "8", "--rounds", "3", "--steps", "1",
               "--systems", "alone,ddp,ours,ours-collectives,fsdp2"], True),
    ("host", [], True),
    ("ablation", ["--rounds", "6"], True),
    ("checkpoint", [], True),
    ("scale", [], False),
    ("report", [], False),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run every part; go on where one fails, and say so at the end."""
    options = store.parser_of("record", __doc__, timed=True).parse_args(arguments)
    failed = []
    for command, given, timed in PARTS:
        line = [*given, *(["--keep-noisy"] if timed and options.keep_noisy else [])]
        name = " ".join([command, *given])
        print(f"\n## python -m bench {name}\n", flush=True)
        start = time.monotonic()
        try:
            code = run(command, line)
        except Exception as error:  # the other parts' figures are worth having
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 1
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
        if code:
            failed.append(f"{name} (exit {code})")
    for name in failed:
        print(f"not recorded: {name}", file=sys.stderr)
    return 1 if failed else 0
