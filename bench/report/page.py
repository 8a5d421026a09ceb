"""The report: results/*.json as one Markdown page with pictures, which opens anywhere.

python -m bench report      writes results/REPORT.md, results/plots/*.svg, results/SUMMARY.md

SUMMARY.md is the block for the README at the top, between the marker comments that it begins and ends with. With
`--readme FILE` the block is put into that file in place of the one that is there.
"""

import re
import sys
from pathlib import Path

from ..common import store
from . import plots, sections

BEGIN, END = "<!-- bench summary: python -m bench report -->", "<!-- end of bench summary -->"


def write(folder: Path) -> Path:
    """Write the report of all results in a folder; its path."""
    parts = ["# Benchmarks: the newest figures", sections.INTRODUCTION]
    if not plots.available():
        parts.append("This copy was made without matplotlib and has no pictures.")
    for section in sections.ALL:
        if lines := section(folder):
            parts += lines
    path = folder / "REPORT.md"
    path.write_text("\n\n".join(parts) + "\n")
    (folder / "SUMMARY.md").write_text("\n\n".join([BEGIN, *sections.summary(folder), END]) + "\n")
    return path


def put_into(readme: Path, folder: Path) -> None:
    """Replace the summary block of a file.

    Raises:
        ValueError: the file has no such block.
    """
    text, block = readme.read_text(), (folder / "SUMMARY.md").read_text().strip()
    found = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not found.search(text):
        raise ValueError(f"{readme} has no block from {BEGIN} to {END}; add the two lines where it should be")
    readme.write_text(found.sub(lambda _: block, text))


def main(arguments: list[str]) -> int:
    """Write report and summary."""
    parser = store.parser_of("report", __doc__)
    parser.add_argument("--folder", type=Path, default=store.FOLDER)
    parser.add_argument("--readme", type=Path, help="also put the summary into this file")
    options = parser.parse_args(arguments)
    print(f"written to {write(options.folder)}")
    if options.readme:
        put_into(options.readme, options.folder)
        print(f"summary put into {options.readme}")
    if not plots.available():
        print("without pictures: matplotlib is not installed", file=sys.stderr)
    return 0
