"""What asv has recorded, by machine and commit: read from its result files, without asv.

series() -> {machine: {"benchmark(param, ...)": [(date, commit, value), ...]}}
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

from ..common import store

Point = tuple[int, str, float]


def series(folder: Path | None = None) -> dict[str, dict[str, list[Point]]]:
    """Every recorded figure, oldest commit first. Figures of a version that the benchmark no longer has are kept."""
    found: dict[str, dict[str, list[Point]]] = {}
    for about in sorted((folder or store.FOLDER).glob("*/machine.json")):
        machine = json.loads(about.read_text())["machine"]
        lines = found.setdefault(machine, {})
        for path in sorted(about.parent.glob("*.json")):
            if path.name != "machine.json":
                for name, point in points(json.loads(path.read_text())):
                    lines.setdefault(name, []).append(point)
        for line in lines.values():
            line.sort()
    return found


def rises(lines: dict[str, list[Point]], least: float = 0.01) -> list[tuple[str, Point, Point]]:
    """Where a figure is more than this share above the commit before it: (figure, before, after), oldest first.

    Every figure that is recorded falls when things get better.
    """
    found = [
        (name, before, after)
        for name, line in lines.items()
        for before, after in itertools.pairwise(line)
        if after[2] > before[2] * (1 + least)
    ]
    return sorted(found, key=lambda rise: (rise[2][0], rise[0]))


def points(content: dict[str, Any]) -> list[tuple[str, Point]]:
    """The figures of one result file."""
    columns = content["result_columns"]
    out = []
    for name, row in content["results"].items():
        cells = dict(zip(columns, row, strict=False))
        values = cells.get("result") or []
        for params, value in zip(itertools.product(*(cells.get("params") or [])), values, strict=False):
            if isinstance(value, int | float) and not math.isnan(value):
                label = f"{name}({', '.join(p.strip(chr(39)) for p in params)})" if params else name
                out.append((label, (content["date"], content["commit_hash"][:8], float(value))))
    return out
