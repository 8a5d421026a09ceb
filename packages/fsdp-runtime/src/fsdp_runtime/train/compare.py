"""The same run on several systems, or with several optimizers, in turn: a table, a plot, and a check of the losses."""

import dataclasses
import json
import platform
import statistics
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ragged_shard import is_cpu

from .config import FLOAT8, SYSTEMS, RunConfig
from .errors import TrainError, say
from .hardware import pick_device
from .launch import num_cores, pick_ranks, start_ranks
from .optimizers import not_available, optimizer_spec, peak_lr
from .report import METRICS, draw_curves, losses, read_metrics
from .runs import RUNS, next_free
from .systems import not_installed

# How far losses of two systems may lie apart over the run, relative: sums are taken in another order, and
# bf16 is cast at other places.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
QUANTIZED_TOLERANCE = 1e-1  # where one of the two rounds weights, activations or gradients to eight bits
_WARM = 0.25  # share of the steps that is not timed


@dataclass
class Measured:
    """What one system (or optimizer) did, over the rounds."""

    name: str
    losses: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Take in one round's metrics."""
        steps = [entry for entry in entries if entry["kind"] == "train"]
        timed = steps[int(_WARM * len(steps)) :]
        self.losses = losses(entries, "train")[1]
        self.tokens_per_s.append(statistics.median(entry["tokens_per_s"] for entry in timed))
        self.cpu_s.append(statistics.median(entry["cpu_s"] for entry in timed))
        self.memory_mb.append(max(entry["memory_mb"] for entry in steps))
        self.entries = entries

    def row(self) -> dict[str, float]:
        """Medians over rounds."""
        return {
            "tokens_per_s": statistics.median(self.tokens_per_s),
            "step_s": statistics.median(self.cpu_s),
            "memory_mb": statistics.median(self.memory_mb),
            "loss": self.losses[-1],
        }


def compare_systems(config: RunConfig, systems: list[str], rounds: int, asked_ranks: int | None) -> int:
    """Run each installed system `rounds` times, alternating; print the table, save table and plot.

    Returns 0, or 1 where losses do not agree.

    Raises:
        TrainError: an unknown system, none installed, or a run that failed.
    """
    for name in systems:
        if name not in SYSTEMS:
            raise TrainError(f"--systems: {name!r} is not one of {', '.join(SYSTEMS)}")
    if rounds < 1:
        raise TrainError(f"--rounds {rounds}: expected at least 1")
    reasons = {name: not_installed(name) for name in systems}
    present = [name for name in systems if reasons[name] is None]
    if not present:
        raise TrainError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    for name, reason in reasons.items():
        if reason:
            say(f"{name}: {reason}")
    out = folder_of(config)
    ranks = {
        name: pick_ranks(dataclasses.replace(config, system=name), None if name == "one" else asked_ranks)
        for name in present
    }
    found = {name: Measured(name) for name in present}
    for number in range(rounds):
        order = present if number % 2 == 0 else present[::-1]
        for name in order:
            run = dataclasses.replace(config, system=name, out=str(out / f"{name}-{number + 1}"), plot=False)
            if name != "fsdp_runtime":
                run = dataclasses.replace(run, block="auto", quantize="none", reduce="none")
            say(f"round {number + 1} of {rounds}: {name} on {ranks[name]} ranks")
            found[name].add(run_quietly(run, ranks[name]))
    return _conclude(config, found, out, "system", ranks)


# What travels: changes of a run, by name.
GATHERS: dict[str, dict[str, str]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp8": {"quantize": "fp8"},
    "fp8-bf16": {"quantize": "fp8", "reduce": "bf16"},
    "fp8-int8": {"quantize": "fp8", "reduce": "int8"},
    "int8": {"quantize": "int8"},
}


def compare_gathers(config: RunConfig, names: list[str], rounds: int, asked_ranks: int | None) -> int:
    """The same run with weights and gradients that travel otherwise, in turns; print and save the table, plot losses.

    "bf16" computes in bf16 too; the others compute in the run's precision. Losses differ by what is rounded.

    Returns 0.

    Raises:
        TrainError: an unknown name, or a run that failed.
    """
    for name in names:
        if name not in GATHERS:
            raise TrainError(f"--kinds: {name!r} is not one of {', '.join(GATHERS)}")
    if rounds < 1:
        raise TrainError(f"--rounds {rounds}: expected at least 1")
    out, ranks = folder_of(config), pick_ranks(config, asked_ranks)
    found = {name: Measured(name) for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            changes: dict[str, Any] = {
                **GATHERS[name],
                "out": str(out / f"{name}-{number + 1}"),
                "plot": False,
            }
            say(f"round {number + 1} of {rounds}: {name} on {ranks} ranks")
            found[name].add(run_quietly(dataclasses.replace(config, **changes), ranks))
    return _conclude(config, found, out, "gathers", dict.fromkeys(names, ranks))


def compare_optimizers(config: RunConfig, names: list[str], asked_ranks: int | None) -> int:
    """Run each optimizer over the same steps, each with its own learning rate unless one is given; plot all curves.

    Returns 0.

    Raises:
        TrainError: an unknown optimizer, or a run that failed.
    """
    for name in names:
        optimizer_spec(name)
    out = folder_of(config)
    ranks = pick_ranks(config, asked_ranks)
    found = {}
    for name in names:
        reason = not_available(name)
        if reason:
            say(f"{name}: {reason}")
            continue
        say(f"{name} at learning rate {peak_lr(name, config.lr):g} on {ranks} ranks")
        run = dataclasses.replace(config, optimizer=name, out=str(out / name), plot=False)
        found[name] = Measured(name)
        found[name].add(run_quietly(run, ranks))
    if not found:
        raise TrainError("none of these optimizers is installed")
    return _conclude(config, found, out, "optimizer", dict.fromkeys(found, ranks))


def run_quietly(config: RunConfig, ranks: int) -> list[dict[str, Any]]:
    """One run from start to end. Returns its metrics.

    Raises:
        TrainError: it failed or was stopped.
    """
    config.check(ranks)
    finished = start_ranks(config, ranks, quiet=True)
    if finished.summary.get("stopped"):
        raise TrainError("stopped")
    return read_metrics(Path(config.out or ".") / METRICS)


def _conclude(
    config: RunConfig, found: dict[str, Measured], out: Path, what: str, ranks: dict[str, int]
) -> int:
    """Print and save what was measured; 1 if systems' losses differ."""
    rows = {name: measured.row() for name, measured in found.items()}
    first = next(iter(rows))
    lines = table(rows, what, first, not is_cpu(pick_device("auto")))
    head = (
        f"{date.today().isoformat()}, {platform.machine()} with {num_cores()} cores, torch {torch.__version__}, "
        f"ranks {', '.join(f'{n}: {r}' for n, r in ranks.items())}; {config.batch} x {config.seq_len} tokens a "
        f"step, {config.steps} steps, {config.precision}"
    )
    out.mkdir(parents=True, exist_ok=True)
    report = "\n".join([head, "", *lines, ""])
    print(report)
    (out / "table.md").write_text(report)
    (out / "rows.json").write_text(json.dumps(rows, indent=1))
    draw_curves({name: m.entries for name, m in found.items()}, out / "curves.png", f"by {what}")
    if what == "system":
        draw_bars(rows, out / "compare.png", head)
    print(f"table.md, rows.json and plots are in {out}")
    if what != "system":
        return 0
    quantized = config.quantize != "none" or config.reduce != "none"
    return _check_losses(
        found, first, {name: _tolerance(name, first, config.precision, quantized) for name in found}
    )


def _tolerance(name: str, first: str, precision: str, quantized: bool) -> float:
    """How far a system's losses may be from the first one's."""
    rounded = quantized and "fsdp_runtime" in (name, first)
    return QUANTIZED_TOLERANCE if rounded or name in FLOAT8 or first in FLOAT8 else TOLERANCE[precision]


def table(rows: dict[str, dict[str, float]], what: str, first: str, cuda: bool) -> list[str]:
    """The rows as a markdown table; ratios of tokens/s and memory are to the first."""
    seconds = "s/step" if cuda else "CPU s/step"
    lines = [
        f"| {what} | tokens/s | to {first} | {seconds} | peak memory MB | to {first} | last loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = rows[first]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['tokens_per_s']:,.0f} | {row['tokens_per_s'] / base['tokens_per_s']:.2f} "
            f"| {row['step_s']:.3f} | {row['memory_mb']:,.0f} | {row['memory_mb'] / base['memory_mb']:.2f} "
            f"| {row['loss']:.5f} |"
        )
    return lines


def _check_losses(found: dict[str, Measured], first: str, tolerances: dict[str, float]) -> int:
    """Compare every step's loss with the first system's; say how far they lie apart."""
    status = 0
    base = found[first].losses
    for name, measured in found.items():
        if name == first:
            continue
        pairs = list(zip(measured.losses, base, strict=False))
        apart = max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)
        same = apart <= tolerances[name] and len(measured.losses) == len(base)
        print(
            f"losses of {name} and {first}: {apart:.1e} apart at most, {'agree' if same else 'DO NOT AGREE'}"
        )
        status = status if same else 1
    return status


def draw_bars(rows: dict[str, dict[str, float]], path: Path, title: str) -> None:
    """Tokens/s and peak memory side by side, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, pair = pyplot.subplots(1, 2, figsize=(9, 3.6), dpi=120, layout="constrained")
    for axes, key, label in zip(
        pair, ("tokens_per_s", "memory_mb"), ("tokens/s", "peak memory, MB"), strict=True
    ):
        bars = axes.bar(
            list(rows), [row[key] for row in rows.values()], color=[f"C{n}" for n in range(len(rows))]
        )
        axes.bar_label(bars, fmt="{:,.0f}", fontsize="small")
        axes.set(title=label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=7)
    figure.savefig(path)
    pyplot.close(figure)


def folder_of(config: RunConfig) -> Path:
    """Where a comparison goes. Its first run makes the folder, so that a start that fails leaves none."""
    return Path(config.out) if config.out else next_free(RUNS)
