"""Keep what the other scripts of this folder print, for the report.

python -m bench scripts [NAME ...]      runs `python bench/NAME.py` and writes results/script-NAME.json

Without names: all of them. They take minutes each on two cores, and print times, so run them on a quiet machine.
"""

import argparse
import os
import subprocess
import sys
import time

from . import machine, store
from .launch import ROOT

SCRIPTS = ("planner", "placement", "buffer", "optimizer", "optimizer_distance", "muon", "shampoo")


def main(arguments: list[str]) -> int:
    """Run, keep, and say which failed."""
    parser = argparse.ArgumentParser(prog="python -m bench scripts", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=SCRIPTS)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each")
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.names:
        path = ROOT / "bench" / f"{name}.py"
        if not path.exists():
            print(f"{name}: there is no {path.name}")
            continue
        busy = machine.busy_share()
        noise = (
            [f"{busy:.0%} of its CPU time was in use before the start"] if busy > machine.BUSY_BEFORE else []
        )
        start = time.monotonic()
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
        try:
            found = subprocess.run(
                [sys.executable, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True,
                timeout=options.timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{name}: took longer than {options.timeout:.0f} s")
            failed += 1
            continue
        if found.returncode:
            print(f"{name}: ended with {found.returncode}\n{found.stderr[-2000:]}")
            failed += 1
            continue
        figures = {"command": f"python bench/{name}.py", "printed": found.stdout}
        store.save(f"script-{name}", figures, noise=noise)
        print(f"{name}: {time.monotonic() - start:.0f} s")
    return 1 if failed else 0
