"""Metrics of a run as lines on the terminal, JSON lines and curves, on rank 0 only; profiles of steps, on each rank."""

import contextlib
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from .errors import say

METRICS = "metrics.jsonl"
CURVES = "curves.png"


class Report:
    """Writes metrics of `steps` steps to a file, and every 25th part of a run as a line on the terminal.

    Lines of the file from step `start` on are dropped: a killed run wrote them, and its steps are repeated.
    """

    def __init__(self, folder: Path, start: int, steps: int, *, quiet: bool) -> None:
        self.steps, self.quiet = steps, quiet
        path = folder / METRICS
        kept = [entry for entry in read_metrics(path) if entry["step"] < start] if start else []
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(partial, path)
        self._file = path.open("a", buffering=1)
        self.every = max(1, steps // 25)

    def step(self, entry: dict[str, Any]) -> None:
        """Record one training step."""
        self._log("train", entry)
        if (entry["step"] + 1) % self.every == 0 or entry["step"] == 0:
            self.say(
                f"step {entry['step'] + 1:>6}/{self.steps}  loss {entry['loss']:.4f}  "
                f"{entry['tokens_per_s']:,.0f} tokens/s  {1000 * entry['step_s']:.0f} ms  {entry['memory_mb']:.0f} MB"
            )

    def held_out(self, step: int, loss: float) -> None:
        """Record a held-out loss after `step` steps."""
        self._log("held_out", {"step": step, "loss": loss})
        self.say(f"step {step:>6}/{self.steps}  held-out loss {loss:.4f}")

    def _log(self, kind: str, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **entry}) + "\n")

    def say(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            say(text)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def profile_of(steps: range, first: int, path: Path) -> torch.profiler.profile:
    """A profile of `steps`, written to `path` in Chrome's format, also if the run ends within them.

    Call its `step` after each step of the run, which begins with step `first`.
    """

    def action(number: int) -> ProfilerAction:
        step = first + number
        if step in steps:
            return ProfilerAction.RECORD if step + 1 in steps else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step + 1 in steps else ProfilerAction.NONE

    return torch.profiler.profile(
        schedule=action, on_trace_ready=lambda done: done.export_chrome_trace(str(path)), acc_events=True
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics file. Other lines are dropped: a killed run leaves its last one half written."""
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
    from matplotlib.figure import Figure  # the model and the data work without it, as on a GPU machine

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
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


def closing_lines(summary: dict[str, Any]) -> str:
    """The last lines that a run prints."""
    out, steps = summary["out"], summary["steps"]
    if summary["stopped"] and not summary["saved"]:
        return f"stopped after step {steps}, which --save-every 0 does not save"
    if summary["stopped"]:
        resume = shlex.join(["fsdp-train", "--resume", "--out", out])
        return f"stopped after step {steps}, saved in {out}; resume with: {resume}"
    if summary["loss"] is None:
        return f"nothing to do: {out} has all {steps} steps"
    held_out = summary["held_out_loss"]
    more = "" if held_out is None else f", held out {held_out:.4f}"
    done = f"{steps} steps in {summary['seconds']:.0f} s: loss {summary['loss']:.4f}{more}"
    return f"{done}\nresults are in {out}"
