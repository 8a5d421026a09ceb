"""Writes the table of trainers into packages/fsdp-runtime/docs/trainers.md: every case, ours next to FSDP2."""

import sys
from importlib import import_module, metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from table import CASES, TRAINERS, distances

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
BEGIN, END = "<!-- made by tests/integrations/make_table.py -->", "<!-- end of what is made -->"


def _cell(distance: float) -> str:
    if distance == 0:
        return "equal"
    return f"{distance:.0e}" if distance <= 1e-5 else f"**{distance:.0e}**"


def main() -> None:
    """Run all cases, and replace what the page has between the marks."""
    found = {name: distances(name) for name in TRAINERS}
    titles = []
    for name in TRAINERS:
        cases = import_module(name)
        titles.append(f"{cases.TITLE} {metadata.version(cases.PACKAGE.replace('_', '-'))}")
    lines = [f"| case | {' | '.join(titles)} |", f"| --- |{' --- |' * len(titles)}"]
    for case, text in CASES.items():
        cells = " | ".join(_cell(found[name][case]) for name in TRAINERS)
        lines.append(f"| {case}: {text} | {cells} |")
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


if __name__ == "__main__":
    main()
