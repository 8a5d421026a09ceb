"""Put faults of earlier rounds back, one at a time, and count the programs of `tests.programs` until one shows it.

    python -m tools.old_faults [NAME ...] [--count 500] [--seed 0]

A fault is a patch in old_faults/, whose first lines say what a user saw; "simulated" there: on the simulated device.
Prints a line for each, and exits with 1 where one is not found. The tree is not touched: each is a copy of the sources.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from .mutants import ROOT, copied_sources

PATCHES = Path(__file__).parent / "old_faults"
FAULT = re.compile(r"^seed (\d+): (.*)$", re.MULTILINE)


def search(folder: Path, system: str, seed: int, count: int, jobs: int) -> tuple[int, str] | None:
    """Seed and first line of the first fault in `count` programs on a copy of the sources; None if there is none.

    Raises:
        RuntimeError: the programs did not run.
    """
    end = seed + count
    paths = map(str, sorted(folder.glob("packages/*/src")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    while seed < end:
        command = [
            sys.executable,
            "-m",
            "checks.programs",
            "--system",
            system,
            "--found",
            str(folder / "found"),
        ]
        for name, value in {"seed": seed, "count": end - seed, "jobs": jobs, "shrink": 0}.items():
            command += [f"--{name}", str(value)]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        fault = FAULT.search(run.stdout)
        if fault is None:
            if run.returncode:
                raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
            return None
        if not fault[2].startswith("once: "):  # else the machine may be to blame
            return int(fault[1]), fault[2]
        seed = int(fault[1]) + 1
    return None


def first_program(patch: Path, seed: int, count: int, jobs: int) -> tuple[int, str] | None:
    """The first program that shows a patch's fault, and not one of the sources as they are."""
    comment = patch.read_text().partition("\ndiff ")[0]
    system = "simulated" if comment.startswith("# simulated") else "ours"
    with copied_sources() as unchanged, copied_sources() as folder:
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # it is no repository's
        subprocess.run(
            ["git", "apply", "-C1", "--recount", str(patch)], cwd=folder, env=environment, check=True
        )
        first = seed
        while (found := search(folder, system, first, seed + count - first, jobs)) is not None:
            if search(unchanged, system, found[0], 1, 1) is None:
                return found
            first = found[0] + 1
    return None


def main() -> int:
    """Search for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="patches; default: all")
    parser.add_argument("--count", type=int, default=500, help="programs, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    options = parser.parse_args()
    missed = 0
    for name in options.names or sorted(path.stem for path in PATCHES.glob("*.patch")):
        began = time.monotonic()
        found = first_program(PATCHES / f"{name}.patch", options.seed, options.count, options.jobs)
        missed += found is None
        told = "NOT FOUND" if found is None else f"{found[0] - options.seed + 1} programs, {found[1][:150]}"
        print(f"{name}: {told}; {time.monotonic() - began:.0f} s", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
