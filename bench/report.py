"""The report: results/*.json as one Markdown page of tables.

python -m bench report                     writes results/REPORT.md
python -m bench report --readme README.md  also replaces the summary block of that file
python -m bench report --plots FOLDER      also draws the figures as SVG files; needs matplotlib
"""

import re
from pathlib import Path

from . import sections, store

BEGIN, END = "<!-- bench summary: python -m bench report -->", "<!-- end of bench summary -->"


def write(folder: Path, drawings: Path | None = None) -> Path:
    """Write REPORT.md of all results in `folder`, and draw the figures into `drawings`. Returns the page's path."""
    parts = ["# Benchmarks: the newest figures", sections.INTRODUCTION]
    for section in sections.ALL:
        parts += section(folder, drawings)
    path = folder / "REPORT.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def put_into(readme: Path, folder: Path) -> None:
    """Replace the summary block of `readme`.

    Raises:
        ValueError: `readme` has no such block.
    """
    text, block = readme.read_text(), "\n\n".join([BEGIN, *sections.summary(folder), END])
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{readme} has no block from {BEGIN} to {END}; add the two lines where it should be")
    readme.write_text(pattern.sub(lambda _: block, text))


def main(arguments: list[str]) -> int:
    """Write the report."""
    parser = store.parser_of("report", __doc__)
    parser.add_argument("--folder", type=Path, default=store.FOLDER, help="results to read (bench/results)")
    parser.add_argument("--readme", type=Path, help="also put the summary into this file")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw the figures into this folder")
    options = parser.parse_args(arguments)
    print(f"written to {write(options.folder, options.plots)}")
    if options.readme:
        put_into(options.readme, options.folder)
        print(f"summary put into {options.readme}")
    return 0
