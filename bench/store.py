"""Where figures are kept, and tables of them.

bench/results/NAME.json       {"machine": ..., "commit": ..., "quiet": true, "figures": ...}
bench/results/MACHINE/*.json  asv's own files, its history
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .ranks import ROOT

FOLDER = ROOT / "bench" / "results"
TOO_BUSY = 3  # exit code


def parser_of(command: str, text: str | None, *, timed: bool = False) -> argparse.ArgumentParser:
    """The parser of `python -m bench COMMAND`, described by the first line of the module's docstring."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {command}", description=(text or "").split("\n")[0]
    )
    if timed:
        parser.add_argument(
            "--keep-noisy", action="store_true", help="record also on a busy machine, marked as such"
        )
    return parser


def record(name: str, figures: Any, noise: list[str], keep_noisy: bool) -> int:
    """Save the figures, or refuse where the machine was too busy; the exit code."""
    for reason in noise:
        print(f"too busy to tell: {reason}", file=sys.stderr)
    if noise and not keep_noisy:
        print("nothing is recorded", file=sys.stderr)
        return TOO_BUSY
    print(f"\nwritten to {save(name, figures, noise=noise)}")
    return 0


def save(name: str, figures: Any, *, noise: list[str] | None = None, folder: Path | None = None) -> Path:
    """Write figures with machine, date and commit.

    Args:
        noise: why times among them are not to be trusted; empty or None: the machine was quiet.
    """
    from . import machine

    path = (folder or FOLDER) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine.describe(), "commit": commit(), "noise": noise or [], "figures": figures}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def load(name: str, folder: Path | None = None) -> dict[str, Any] | None:
    """What `save` wrote; None where nothing was."""
    path = (folder or FOLDER) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def load_all(prefix: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """Every file whose name begins so, by name."""
    paths = sorted((folder or FOLDER).glob(f"{prefix}*.json"))
    return [{"name": path.stem, **json.loads(path.read_text())} for path in paths]


def commit() -> str | None:
    """The checkout's commit, with a plus sign where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(ROOT)]
    head = subprocess.run([*command, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    changed = subprocess.run(
        [*command, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table, columns aligned; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [all(_number(row[i]) for row in cells[1:]) for i in range(len(header))]
    lines = []
    for index, row in enumerate(cells):
        parts = [
            cell.rjust(w) if right else cell.ljust(w)
            for cell, w, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("| " + " | ".join(parts) + " |")
        if index == 0:
            rules = [
                "-" * (w - 1) + ":" if right else "-" * w for w, right in zip(widths, numeric, strict=True)
            ]
            lines.append("| " + " | ".join(rules) + " |")
    return "\n".join(lines)


def _number(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in "-+<" or cell == ""


def print_tables(tables: list[dict[str, Any]]) -> None:
    """Print tables of the report's form: {"title", "text", "header", "rows"}."""
    for part in tables:
        print(f"{part['title']}\n\n{part['text']}\n\n{table(part['header'], part['rows'])}\n")


def mib(count: float) -> str:
    """Bytes as MiB."""
    value = count / 2**20
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
