"""Where metrics go: lines on the terminal, a file of JSON lines, curves. Rank 0 only."""

import contextlib
import json
import math
import os
import shlex
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import one_line, say

METRICS = "metrics.jsonl"
CURVES = "curves.png"


class Report:
    """The file of metrics, and a line on the terminal now and then.

    Args:
        folder: of the run.
        start, steps: first step, and how many there are in all. Lines of the file from `start` on are dropped: they
            are of steps that a killed run made and that are made again.
        quiet: print nothing.
    """

    def __init__(self, folder: Path, start: int, steps: int, *, quiet: bool) -> None:
        self.steps, self.quiet = steps, quiet
        path = folder / METRICS
        kept = [entry for entry in read_metrics(path) if entry["step"] < start] if start else []
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(partial, path)
        self._file = path.open("a", buffering=1)
        self.problem: str | None = None  # why the file could not be written
        self.every = max(1, steps // 25)

    def step(self, entry: dict[str, Any]) -> None:
        """One training step's figures."""
        self._log("train", entry)
        if not self.quiet and ((entry["step"] + 1) % self.every == 0 or entry["step"] == 0):
            self.say(f"step {entry['step'] + 1:>6}/{self.steps}  {shown(entry)}")

    def held_out(self, step: int, loss: float) -> None:
        """A held-out loss, after `step` steps."""
        self._log("held_out", {"step": step, "loss": loss})
        self.say(f"step {step:>6}/{self.steps}  held-out loss {loss:.4f}")

    def _log(self, kind: str, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, **entry}) + "\n")
        except OSError as error:
            self.problem = f"cannot log metrics: {one_line(error)}"

    def say(self, text: str) -> None:
        """A line of text."""
        if not self.quiet:
            say(text)

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def shown(entry: dict[str, Any]) -> str:
    """A step's figures as people read them."""
    parts = [
        f"loss {entry['loss']:.4f}",
        f"{entry['tokens_per_s']:,.0f} tokens/s",
        f"{1000 * entry['step_s']:.0f} ms",
        f"{entry['memory_mb']:.0f} MB",
    ]
    return "  ".join(parts)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics file. Lines that are none are dropped: a killed run leaves its last one half written."""
    entries = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            known = isinstance(entry, dict) and entry.get("kind") in ("train", "held_out")
            if known and type(entry.get("step")) is int and isinstance(entry.get("loss"), float):
                entries.append(entry)
    return entries


def losses(entries: list[dict[str, Any]], kind: str) -> tuple[list[int], list[float]]:
    """Steps and losses of one kind ("train" or "held_out")."""
    chosen = [entry for entry in entries if entry["kind"] == kind and math.isfinite(entry["loss"])]
    return [entry["step"] for entry in chosen], [entry["loss"] for entry in chosen]


def draw_curves(runs: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Training losses as lines and held-out losses as points, a colour for each run, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for number, (name, entries) in enumerate(runs.items()):
        colour = f"C{number % 10}"
        steps, values = losses(entries, "train")
        axes.plot(steps, values, color=colour, alpha=0.9, linewidth=1.2, label=name)
        steps, values = losses(entries, "held_out")
        if steps:
            axes.plot(steps, values, "o", color=colour, markersize=5, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, fontsize=8, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def closing_lines(summary: dict[str, Any]) -> str:
    """The last lines that a run prints."""
    out, steps = summary["out"], summary["steps"]
    if summary["stopped"]:
        resume = shlex.join(["fsdp-train", "--resume", "--out", out])
        return f"stopped after step {steps}, saved in {out}; go on with: {resume}"
    if summary["loss"] is None:
        return f"nothing to do: {out} has all {steps} steps"
    held_out = summary["held_out_loss"]
    more = "" if held_out is None else f", held out {held_out:.4f}"
    return (
        f"{steps} steps in {summary['seconds']:.0f} s: loss {summary['loss']:.4f}{more}\n"
        f"metrics, curves.png and checkpoints are in {out}"
    )
