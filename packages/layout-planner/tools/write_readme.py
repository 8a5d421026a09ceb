"""Write the generated parts of this package's docs: the padding table and pictures.

    python tools/write_readme.py            # write
    python tools/write_readme.py --check    # exit 1, naming them, if any are stale

In a page, each generated section stands between `<!-- generated: NAME -->` and `<!-- /generated -->`.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from layout_planner import Rows
from layout_planner._cli import main as layout_planner
from layout_planner._cli import named
from layout_planner._sweep import Options, measure
from layout_planner._table import markdown, percent

PACKAGE = Path(__file__).resolve().parents[1]
PAGE = PACKAGE / "docs" / "padding.md"
_MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_MODELS = ("llama-3-70b", "gpt-oss-120b", "deepseek-v3", "qwen3-235b-a22b", "kimi-k2")
_WORLD_SIZES = (64, 512, 1024, 4096)
_PICTURES = {
    "llama-3-8b-layer.svg": "--model llama-3-8b --world-size 8 --block rows:128",
    "gpt-oss-120b-layer.svg": "--model gpt-oss-120b --world-size 128 --block rows:32",
}


def padding() -> str:
    """Padding of each model as a Markdown table, over blocks and ranks; on 1024 also of other rules."""
    models = [named(name, "stacked") for name in _MODELS]
    models.insert(_MODELS.index("deepseek-v3") + 1, named("deepseek-v3", "separate"))
    rows = []
    for model in models:
        for block in (Rows(16), Rows(128)):
            measures = {size: measure(model, size, block, Options()) for size in _WORLD_SIZES}
            other = measures[1024]
            rules = (percent(other.padding(each)) for each in (other.even_rows, other.lcm))
            rows.append(
                [model.name, str(block), *(percent(each.padding()) for each in measures.values()), *rules]
            )
    others = ("1024, even rows", "1024, lcm rule")
    return markdown(("<model", "<block", *(f"{size} ranks" for size in _WORLD_SIZES), *others), rows)


def run(command: str) -> str:
    """What the command line prints."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        status = layout_planner(command.split())
    if status:
        raise RuntimeError(f"layout-planner {command}: exit status {status}")
    return shown.getvalue().rstrip("\n")


SECTIONS: dict[str, Callable[[], str]] = {"padding": padding}


def written(page: str) -> str:
    """The page with every generated section up to date.

    Raises:
        ValueError: an unknown section, or no padding table.
    """
    names = [match[2] for match in _MARKED.finditer(page)]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or "padding" not in names:
        raise ValueError(
            f"{PAGE.name}: generated sections {names}; known are {list(SECTIONS)}, and padding must be there"
        )
    return _MARKED.sub(lambda match: f"{match[1]}{SECTIONS[match[2]]()}\n{match[3]}", page)


def outputs() -> Iterator[tuple[Path, str]]:
    """Each file that is generated, all of it or some sections, with its up-to-date content."""
    yield PAGE, written(PAGE.read_text(encoding="utf-8"))
    for name, chosen in _PICTURES.items():
        yield PACKAGE / "docs" / name, run(f"draw {chosen} -o -") + "\n"


def main() -> int:
    """Write the files, or with `--check` only compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if anything is stale; write nothing")
    check = parser.parse_args().check
    stale = 0
    for path, content in outputs():
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        stale += 1
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
        print(f"{'stale' if check else 'wrote'} {path.relative_to(PACKAGE)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
