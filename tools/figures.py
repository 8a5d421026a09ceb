"""Print how large the project is: lines of source and tests by package, words of the docs, what an import loads.

    python -m tools.figures

Files are those that git tracks. Lines are all lines, blank ones and comments included. "Loaded" are the lines of our
packages that `import fsdp_runtime` reads, in a new process.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("fsdp-runtime", "dbuffer", "block-optim", "ragged-shard", "layout-planner")
_OF_DBUFFER = "packages/dbuffer/src/dbuffer"
# What every step needs: neither encodings nor peer memory, no optional module.
CORE = (
    "packages/fsdp-runtime/src/fsdp_runtime/_*.py",
    *(f"{_OF_DBUFFER}/{files}" for files in ("_*.py", "memory/*.py", "transport/*.py")),
    f":!{_OF_DBUFFER}/transport/peer/*",
)
_IMPORT = (
    "import fsdp_runtime, sys; "
    "ours = ('layout_planner', 'ragged_shard', 'dbuffer', 'block_optim', 'fsdp_runtime'); "
    "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in ours and m.__file__), sep='\\n')"
)


def tracked(*patterns: str) -> list[Path]:
    """The files that git tracks of some patterns."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def lines_of(paths: list[Path]) -> int:
    """Lines of some files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def figures() -> dict[str, int]:
    """Each figure, by what it counts."""
    counts = {name: lines_of(tracked(f"packages/{name}/src/*.py")) for name in PACKAGES}
    counts["bench"] = lines_of(tracked("bench/*.py"))
    counts["all source"] = sum(counts.values())
    counts["of it the core of a step"] = lines_of(tracked(*CORE))
    counts |= {f"tests of {name}": lines_of(tracked(f"packages/{name}/tests/*.py")) for name in PACKAGES}
    counts["tests of the whole"] = lines_of(tracked("tests/*.py"))
    counts["all tests"] = sum(count for name, count in counts.items() if name.startswith("tests of"))
    counts["checks and tools"] = lines_of(tracked("checks/*.py", "tools/*.py"))
    counts["words of the docs"] = sum(len(path.read_text().split()) for path in tracked("*.md"))
    loaded = subprocess.run(
        [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True
    ).stdout
    files = [Path(name) for name in loaded.splitlines()]
    counts["lines loaded by import fsdp_runtime"], counts["in files"] = lines_of(files), len(files)
    return counts


if __name__ == "__main__":
    for what, count in figures().items():
        print(f"{what:<40}{count:>9,}")
