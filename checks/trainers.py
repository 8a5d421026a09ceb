"""Writes the table of trainers into packages/fsdp-runtime/docs/trainers.md: every case, ours next to FSDP2.

    python -m checks.trainers [torchtitan verl ...]

Without names: the trainers that are installed. Rows of the others stay as they are.
"""

import sys
from importlib import import_module, metadata

import pytest
from table import CASES, TRAINERS, distances

from checks import RUNTIME

PAGE = RUNTIME / "docs" / "trainers.md"
BEGIN, END = "<!-- made by checks/trainers.py -->", "<!-- end of what is made -->"


def _cell(distance: float) -> str:
    if distance == 0:
        return "equal"
    return f"{distance:.0e}" if distance <= 1e-5 else f"**{distance:.0e}**"


def _row(name: str) -> str:
    cases = import_module(name)
    found = distances(name)
    cells = " | ".join(_cell(found[case]) for case in CASES)
    return f"| {cases.TITLE} {metadata.version(cases.PACKAGE.replace('_', '-'))} | {cells} |"


def _trainer(row: str) -> str:
    return row.split("|")[1].strip().rpartition(" ")[0]


def main() -> None:
    """Run all cases, and replace what the page has between the marks."""
    chosen = [f"cases_{name}" for name in sys.argv[1:]]
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    made, _, after = rest.partition(END)
    rows = {_trainer(line): line for line in made.splitlines() if line.startswith("| ")}
    rows = {name: row for name, row in rows.items() if name}
    for name in chosen or TRAINERS:
        try:
            row = _row(name)
        except pytest.skip.Exception as error:
            if chosen:
                raise SystemExit(f"{name}: {error}") from None
            print(f"{name}: {error}; its row is kept")
        else:
            rows[_trainer(row)] = row
    lines = [f"| trainer | {' | '.join(CASES)} |", f"| --- |{' --- |' * len(CASES)}"]
    lines += [rows[name] for name in sorted(rows, key=str.lower)]
    lines += ["", *(f"- {case}: {text}" for case, text in CASES.items())]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


if __name__ == "__main__":
    main()
