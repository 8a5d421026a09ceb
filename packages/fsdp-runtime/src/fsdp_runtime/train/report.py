"""Where metrics go: lines on the terminal, a file of JSON lines, trackers (``--log-to``), curves. Rank 0 only."""

import contextlib
import importlib.util
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from .errors import TrainError, one_line, say

METRICS = "metrics.jsonl"
CURVES = "curves.png"


class Sink(Protocol):
    """Takes metrics. Any exception ends the run, on every rank."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of a step. Names are ``train/loss``, ``held_out/loss`` and so on, of one kind per call."""

    def close(self) -> None:
        """Write what is buffered."""


class JsonLines:
    """A file with one JSON object per call: ``{"kind": "train", "step": 7, "loss": 2.1}``.

    Args:
        path: of the file, which is replaced.
        kept: entries that it begins with.
    """

    def __init__(self, path: Path, kept: Iterable[Mapping[str, Any]] = ()) -> None:
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(partial, path)
        self._file = path.open("a", buffering=1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line."""
        kind = next(iter(values)).partition("/")[0]
        figures = {name.removeprefix(f"{kind}/"): value for name, value in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run. Steps from `start` on replace those of a killed run."""

    def __init__(self, folder: Path, start: int, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Tracker:
    """A run of wandb or trackio, named as the folder. `WANDB_PROJECT` names the project of both."""

    def __init__(
        self, init: Callable[..., Any], folder: Path, config: dict[str, Any], **options: Any
    ) -> None:
        project = os.environ.get("WANDB_PROJECT", "fsdp-train")
        self._run = init(project=project, name=folder.resolve().name, config=config, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb(folder: Path, start: int, config: dict[str, Any]) -> Sink:
    import wandb

    return Tracker(wandb.init, folder, config, dir=str(folder))


def _trackio(folder: Path, start: int, config: dict[str, Any]) -> Sink:
    import trackio

    return Tracker(trackio.init, folder, config, resume="allow" if start else "never")


# By package.
TRACKERS = {"tensorboard": TensorBoard, "wandb": _wandb, "trackio": _trackio}


def check_installed(names: Iterable[str]) -> None:
    """Raises `TrainError`, with the command that installs them, if packages of trackers are missing."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        extras = ",".join(missing)
        raise TrainError(f"--log-to {extras}: not installed: pip install 'fsdp-runtime[{extras}]'")


def open_trackers(names: Iterable[str], folder: Path, start: int, config: dict[str, Any]) -> list[Sink]:
    """Open trackers by name, for a run in `folder` whose next step is `start`.

    Raises:
        TrainError: a package is missing, or the tracker cannot start.
    """
    check_installed(names)
    sinks: list[Sink] = []
    for name in dict.fromkeys(names):
        try:
            sinks.append(TRACKERS[name](folder, start, config))
        except Exception as error:
            raise TrainError(f"--log-to {name}: {one_line(error)}") from error
    return sinks


class Report:
    """The file of metrics and other sinks, and a progress bar on a terminal or a line now and then elsewhere.

    Args:
        folder: of the run.
        start, steps: first step, and how many there are in all. Lines of a file from `start` on are dropped: they
            are of steps that a killed run made and that are made again.
        quiet: print nothing.
        sinks: also take the metrics; closed at the end.
    """

    def __init__(
        self, folder: Path, start: int, steps: int, *, quiet: bool, sinks: Sequence[Sink] = ()
    ) -> None:
        self.steps, self.quiet = steps, quiet
        path = folder / METRICS
        kept = [entry for entry in read_metrics(path) if entry["step"] < start] if start else []
        self.sinks: list[Sink] = [JsonLines(path, kept), *sinks]
        self.problem: str | None = None  # why a sink could not be written
        self.bar: Any = None
        self.task: Any = None
        if not quiet and sys.stderr.isatty():
            self.bar, self.task = _bar(steps, start)
        self.every = max(1, steps // 25)

    def step(self, entry: dict[str, Any]) -> None:
        """One training step's figures."""
        self._log("train", entry)
        if self.bar is not None:
            self.bar.update(self.task, completed=entry["step"] + 1, text=shown(entry))
        elif not self.quiet and ((entry["step"] + 1) % self.every == 0 or entry["step"] == 0):
            self.say(f"step {entry['step'] + 1:>6}/{self.steps}  {shown(entry)}")

    def held_out(self, step: int, loss: float) -> None:
        """A held-out loss, after `step` steps."""
        self._log("held_out", {"step": step, "loss": loss})
        self.say(f"step {step:>6}/{self.steps}  held-out loss {loss:.4f}")

    def _log(self, kind: str, entry: dict[str, Any]) -> None:
        values = {f"{kind}/{name}": value for name, value in entry.items() if name != "step"}
        for sink in self.sinks:
            try:
                sink.log(entry["step"], values)
            except Exception as error:  # any kind: a tracker's
                self.problem = f"cannot log metrics to {type(sink).__name__}: {one_line(error)}"

    def say(self, text: str) -> None:
        """A line of text."""
        if self.bar is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                self.bar.console.print(text, highlight=False)
        elif not self.quiet:
            say(text)

    def __enter__(self) -> "Report":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                say(f"fsdp-train: cannot close {type(sink).__name__}: {one_line(error)}")


def shown(entry: dict[str, Any]) -> str:
    """A step's figures as people read them."""
    parts = [
        f"loss {entry['loss']:.4f}",
        f"{entry['tokens_per_s']:,.0f} tokens/s",
        f"{1000 * entry['step_s']:.0f} ms",
        f"{entry['memory_mb']:.0f} MB",
    ]
    if entry.get("mfu") is not None:
        parts.append(f"MFU {100 * entry['mfu']:.1f} %")
    return "  ".join(parts)


def _bar(steps: int, start: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    return bar, bar.add_task("training", total=steps, completed=start, text="")


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
    if summary["bad_steps"]:
        more += f"; {summary['bad_steps']} updates were skipped, their gradients not being finite"
    return (
        f"{steps} steps in {summary['seconds']:.0f} s: loss {summary['loss']:.4f}{more}\n"
        f"metrics, curves.png and checkpoints are in {out}"
    )
