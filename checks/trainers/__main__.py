"""Runs every case of the trainers, ours and FSDP2; fails where ours is further than 1e-5 from FSDP2.

    python -m checks.trainers [torchtitan verl ...] [--write]

Without names: the trainers that are installed. `--write` puts their rows into packages/fsdp-runtime/docs/trainers.md.
"""

import argparse
import sys
from importlib import import_module, metadata

import pytest

from checks import RUNTIME
from checks.trainers import CASES, TRAINERS, distances

PAGE = RUNTIME / "docs" / "trainers.md"
BEGIN, END = "<!-- made by checks/trainers -->", "<!-- /made -->"
BOUND = 1e-5


def _cell(distance: float) -> str:
    if distance == 0:
        return "equal"
    return f"{distance:.0e}" if distance <= BOUND else f"**{distance:.0e}**"


def _row(name: str) -> str:
    cases, largest = import_module(name), distances(name)
    cells = " | ".join(_cell(largest[case]) for case in CASES)
    return f"| {cases.TITLE} {metadata.version(cases.PACKAGE.replace('_', '-'))} | {cells} |"


def _trainer(row: str) -> str:
    return row.split("|")[1].strip().rpartition(" ")[0]


def write(rows: dict[str, str]) -> None:
    """Replace rows of the page, by their trainer."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    made, _, after = rest.partition(END)
    old = {_trainer(line): line for line in made.splitlines() if line.startswith("| ")}
    rows = {name: row for name, row in {**old, **rows}.items() if name}
    lines = [f"| trainer | {' | '.join(CASES)} |", f"| --- |{' --- |' * len(CASES)}"]
    lines += [rows[name] for name in sorted(rows, key=str.lower)]
    lines += ["", *(f"- {case}: {text}" for case, text in CASES.items())]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trainers", nargs="*", help="default: those that are installed")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/trainers.md")
    options = parser.parse_args()
    rows = {}
    for name in [f"checks.trainers.cases_{name}" for name in options.trainers] or TRAINERS:
        try:
            row = _row(name)
        except pytest.skip.Exception as error:
            if options.trainers:
                parser.error(f"{name}: {error}")
            continue
        rows[_trainer(row)] = row
        print(row, flush=True)
    if options.write:
        write(rows)
    return int(any("**" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
