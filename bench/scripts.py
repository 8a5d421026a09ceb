"""Keep what the commands about one package each print, for the report.

python -m bench scripts [NAME ...]      runs `python -m bench NAME` and writes results/script-NAME.json

Without names: all of them. They take minutes each on two cores, and print times, so run them on a quiet machine.
"""

import os
import subprocess
import sys
import time

from .common import machine, store
from .common.ranks import ROOT

SCRIPTS = (
    "planner", "placement", "buffer", "exchange", "optimizer", "optimizer_distance", "muon", "shampoo",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run, keep, and say which failed."""
    parser = store.parser_of("scripts", __doc__)
    parser.add_argument("names", nargs="*", default=SCRIPTS, help=", ".join(SCRIPTS))
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each")
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.names:
        busy = machine.busy_share()
        noise = (
            [f"{busy:.0%} of its CPU time was in use before the start"] if busy > machine.BUSY_BEFORE else []
        )
        start = time.monotonic()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, "-m", "bench", name]
        try:
            found = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=options.timeout
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: took longer than {options.timeout:.0f} s")
            failed += 1
            continue
        if found.returncode:
            print(f"{name}: ended with {found.returncode}\n{found.stderr[-2000:]}")
            failed += 1
            continue
        figures = {"command": f"python -m bench {name}", "printed": found.stdout}
        store.save(f"script-{name}", figures, noise=noise)
        print(f"{name}: {time.monotonic() - start:.0f} s")
    return 1 if failed else 0
