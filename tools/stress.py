"""Runs the tests several times in random order, some of the runs beside busy processes, and lists what failed.

    nox -s stress -- --runs 20 --busy-runs 5 --busy 4 [arguments for pytest]

Prints a row for each run (seed, tests, failures, seconds) and what its failures printed, and at the end each test that
failed at least once with the seeds of these runs. Exit code 1 if there is one.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUSY = [sys.executable, "-c", "while True: pass"]


def run_once(seed: int, busy: int, arguments: list[str]) -> tuple[int, list[str]]:
    """Run the tests in the order of `seed` beside `busy` processes; returns their number and the names of failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        order = ["--random-order-bucket=module", f"--random-order-seed={seed}"]
        command = [sys.executable, "-m", "pytest", "-q", *order, f"--junitxml={report}", *arguments]
        load = [subprocess.Popen(BUSY) for _ in range(busy)]
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        finally:
            for process in load:
                process.kill()
                process.wait()
        if not report.exists():
            return 0, [f"(pytest ended with {done.returncode} and no report)"]
        cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = []
    for case in cases:
        problem = next((tag for tag in case if tag.tag in ("failure", "error")), None)
        if problem is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
            print(f"{failed[-1]}\n{problem.text}", file=sys.stderr, flush=True)
    return len(cases), failed


def main() -> int:
    """Run, print the table and the failures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--busy-runs", type=int, default=5, help="how many of the runs, the last ones, are loaded"
    )
    parser.add_argument("--busy", type=int, default=4, help="processes that load the machine in these")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each next one adds 1")
    options, arguments = parser.parse_known_args()
    seeds: dict[str, list[int]] = defaultdict(list)
    print(
        "| seed | busy processes | tests | failed | seconds |\n| ---: | ---: | ---: | ---: | ---: |",
        flush=True,
    )
    for index in range(options.runs):
        seed = options.seed + index
        busy = options.busy if index >= options.runs - options.busy_runs else 0
        begin = time.monotonic()
        tests, failed = run_once(seed, busy, arguments)
        for name in failed:
            seeds[name].append(seed)
        print(f"| {seed} | {busy} | {tests} | {len(failed)} | {time.monotonic() - begin:.0f} |", flush=True)
    for name, where in sorted(seeds.items()):
        print(f"{name}: failed with seeds {', '.join(map(str, where))}")
    return 1 if seeds else 0


if __name__ == "__main__":
    sys.exit(main())
