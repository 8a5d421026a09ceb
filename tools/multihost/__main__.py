"""`python -m tools.multihost [CASE ...] [--write]`: run the cases, print their table; `--write`: into the docs too.

Needs root, for network namespaces. All cases take about a quarter of an hour on two cores.
"""

import argparse
import datetime
import sys
import tempfile
import time
from pathlib import Path

from .cases import CASES, STEPS, TIMEOUT, Bench, Result, one_process
from .hosts import obstacle

PAGE = Path(__file__).parents[2] / "packages" / "fsdp-runtime" / "docs" / "RELIABILITY.md"
_RULE = "| --- | --- | --- |"  # above the first row
_BEGIN, _END = "<!-- multihost -->", "<!-- /multihost -->"


def main(argv: list[str]) -> int:
    """Run what is asked for. Returns 0 if every case came out as it should."""
    parser = argparse.ArgumentParser(prog="python -m tools.multihost", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)".replace("%", "%%")
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]}")
    if reason := obstacle():
        print(f"no hosts here: {reason}", file=sys.stderr)
        return 2
    results = []
    with tempfile.TemporaryDirectory(prefix="multihost-") as folder:
        reference = one_process(Path(folder))
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="multihost-") as folder:
            results.append(outcome(name, Bench(Path(folder), reference)))
        print(row(results[-1]), results[-1].line, flush=True)
    if options.write:
        write(PAGE, results)
    return int(any(result.wrong for result in results))


def outcome(name: str, bench: Bench) -> Result:
    """Outcome of a case; one that has not come to its fault in time (a slow start) is wrong, with the reason."""
    begin = time.monotonic()
    try:
        return CASES[name](bench)
    except TimeoutError as error:
        return Result(name, False, time.monotonic() - begin, "", str(error))


def row(result: Result) -> str:
    """A case as a row of the table."""
    outcome = "finished" if result.finished else "error"
    if result.wrong:
        outcome = f"**wrong**: {result.wrong}"
    return f"| {result.case} | {outcome} | {result.seconds:.0f} |"


def write(page: Path, results: list[Result]) -> None:
    """Replace the section of the page, or add it; rows of cases that were not run stay."""
    text = page.read_text() if page.exists() else "# Reliability\n"
    before, begin, rest = text.partition(_BEGIN)
    old, _, after = rest.partition(_END)
    rows = {
        line.split(" |")[0]: line for line in old.partition(_RULE)[2].splitlines() if line.startswith("| ")
    }
    rows |= {line.split(" |")[0]: line for line in map(row, results)}
    head = [
        "## Several machines",
        "",
        f"Written by `nox -s 'nightly(multihost)'` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. Hosts are",
        "network namespaces on one machine, joined by a switch in user space; they share one folder. Two gloo ranks a",
        f"host, torchrun with its c10d rendezvous, {STEPS} steps, a checkpoint every 10,",
        f"`--timeout {TIMEOUT:g}`. Seconds are from the fault (or start) to the end of the last rank.",
        "Losses are within 1e-4 of one process, and all checkpoints are valid, or the case is marked wrong. Errors",
        "name the collective and the missing ranks.",
        "",
        "| what happened | training | seconds |",
        _RULE,
    ]
    section = "\n".join([_BEGIN, "", *head, *rows.values(), "", _END])
    page.write_text(before.rstrip("\n") + "\n\n" + section + (after if begin else "\n"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
