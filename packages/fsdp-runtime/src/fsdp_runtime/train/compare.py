"""``fsdp-train compare``: the same work in several ways, interleaved; a table, loss curves, and a check of the losses.

--vary system=fsdp_runtime,fsdp2,ddp     one run per system; losses must agree
--vary optimizer=adamw,muon              one run per optimizer, each at its default learning rate
--vary gathers=fp32,bf16,fp8,fp8-int8    one run per format of gathers and reductions
"""

import dataclasses
import platform
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ragged_shard.device import is_cpu

from .checkpoint import RUNS, next_free
from .config import SYSTEMS, RunConfig
from .errors import TrainError, say
from .hardware import pick_device
from .launch import num_cores, pick_ranks, start_ranks
from .optimizers import OPTIMIZERS
from .report import CURVES, METRICS, draw_curves, losses, read_metrics
from .systems import not_installed

# Largest relative distance of two systems' losses over a run: sums are taken in another order, and casts to bf16
# happen at other places.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
QUANTIZED_TOLERANCE = 1e-1  # if one of the two rounds weights, activations or gradients to eight bits
_WARM = 0.25  # share of the steps that is not timed

# "bf16" computes in bf16 too; the others compute in the run's precision.
GATHERS: dict[str, dict[str, str]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp8": {"quantize": "fp8"},
    "fp8-bf16": {"quantize": "fp8", "reduce": "bf16"},
    "fp8-int8": {"quantize": "fp8", "reduce": "int8"},
    "int8": {"quantize": "int8"},
}

Entries = list[dict[str, Any]]


@dataclass
class Way:
    """One of the ways to train: its changes of the run, and the metrics of its runs."""

    name: str
    changes: dict[str, Any]
    ranks: int
    entries: list[Entries] = field(default_factory=list)

    def row(self, seconds: str) -> dict[str, float]:
        """Medians over all runs, also of this entry's seconds, and the last training loss."""
        steps = [[entry for entry in entries if entry["kind"] == "train"] for entries in self.entries]
        timed = [run[int(_WARM * len(run)) :] for run in steps]
        speeds = [median(entry["tokens_per_s"] for entry in run) for run in timed]
        steps_s = [median(entry[seconds] for entry in run) for run in timed]
        peaks = [max(entry["memory_mb"] for entry in run) for run in steps]
        row = {"tokens_per_s": median(speeds), "seconds": median(steps_s), "memory_mb": median(peaks)}
        return {**row, "loss": steps[-1][-1]["loss"]}


def compare(config: RunConfig, vary: str, rounds: int, asked_ranks: int | None) -> int:
    """Train in each way, `rounds` times interleaved; print and save the table, plot the losses.

    Returns 0, or 1 if losses of systems differ by more than the tolerance. Raises `TrainError` if a way is not known,
    none is installed, or a run failed.
    """
    if rounds < 1:
        raise TrainError(f"--rounds {rounds}: expected at least 1")
    what, ways = ways_of(config, vary, asked_ranks)
    for way in ways:  # before the first is trained
        dataclasses.replace(config, **way.changes).check(way.ranks)
    out = Path(config.out) if config.out else next_free(RUNS)
    for number in range(rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            say(f"round {number + 1} of {rounds}: {way.name} on {way.ranks} ranks")
            folder = str(out / f"{way.name}-{number + 1}")
            changed = dataclasses.replace(config, **way.changes, out=folder, plot=False)
            way.entries.append(run_quietly(changed, way.ranks))
    return _conclude(config, ways, out, what)


def ways_of(config: RunConfig, vary: str, asked_ranks: int | None) -> tuple[str, list[Way]]:
    """The varied option, and a way for each value; prints systems that are not installed."""
    what, _, names = vary.partition("=")
    known = {"system": list(SYSTEMS), "gathers": list(GATHERS), "optimizer": list(OPTIMIZERS)}
    if what not in known or not names:
        raise TrainError(f"--vary {vary}: expected {', '.join(f'{name}=A,B,...' for name in known)}")
    ways: list[Way] = []
    for name in names.split(","):
        if name not in (allowed := known[what]):
            raise TrainError(f"--vary {what}: {name!r} is not one of {', '.join(allowed)}")
        if reason := not_installed(name) if what == "system" else None:
            say(f"{name}: {reason}")
            continue
        changes: dict[str, Any] = GATHERS[name] if what == "gathers" else {what: name}
        if what == "system" and name != "fsdp_runtime":
            changes = {**changes, "block": "auto", "quantize": "none", "reduce": "none", "hsdp": 1}
        asked = None if name == "one" else asked_ranks
        ways.append(Way(name, changes, pick_ranks(dataclasses.replace(config, **changes), asked)))
    if not ways:
        raise TrainError(f"--vary {vary}: none of these is installed")
    return what, ways


def run_quietly(config: RunConfig, ranks: int) -> Entries:
    """One run from start to end; returns its metrics. Raises `TrainError` if it failed or was stopped."""
    config.check(ranks)
    if start_ranks(config, ranks, quiet=True):
        raise TrainError("stopped")
    return read_metrics(Path(config.out or ".") / METRICS)


def _conclude(config: RunConfig, ways: list[Way], out: Path, what: str) -> int:
    """Print and save the table; 1 if losses differ too much."""
    # On a CPU its time varies less than a clock's.
    seconds, title = ("cpu_s", "CPU s/step") if is_cpu(pick_device(config.device)) else ("step_s", "s/step")
    rows = {way.name: way.row(seconds) for way in ways}
    head = (
        f"{date.today().isoformat()}, {platform.machine()} with {num_cores()} cores, torch {torch.__version__}, "
        f"ranks {', '.join(f'{way.name}: {way.ranks}' for way in ways)}; {config.batch} x {config.seq_len} tokens a "
        f"step, {config.steps} steps, {config.precision}"
    )
    status, verdict = compare_losses(config, ways) if what == "system" else (0, [])
    report = "\n".join([head, "", *table(rows, what, title), "", *verdict, ""])
    print(report)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(report)
    if config.plot:
        draw_curves({way.name: way.entries[-1] for way in ways}, out / CURVES, f"by {what}")
    print(f"table.md{f' and {CURVES} are' if config.plot else ' is'} in {out}")
    return status


def table(rows: dict[str, dict[str, float]], what: str, seconds: str) -> list[str]:
    """The rows as a Markdown table; ratios of tokens/s and memory are to the first."""
    first = next(iter(rows))
    lines = [f"| {what} | tokens/s | to {first} | {seconds} | peak memory MB | to {first} | last loss |"]
    lines.append("| --- " * 7 + "|")
    base = rows[first]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['tokens_per_s']:,.0f} | {row['tokens_per_s'] / base['tokens_per_s']:.2f} "
            f"| {row['seconds']:.3f} | {row['memory_mb']:,.0f} | {row['memory_mb'] / base['memory_mb']:.2f} "
            f"| {row['loss']:.5f} |"
        )
    return lines


def compare_losses(config: RunConfig, ways: list[Way]) -> tuple[int, list[str]]:
    """Status and a line per system: the largest distance of its losses from the first system's."""
    (first, expected), *others = [(way, losses(way.entries[-1], "train")[1]) for way in ways]
    status, lines = 0, []
    quantized = config.quantize != "none" or config.reduce != "none"
    for way, values in others:
        rounded = quantized and "fsdp_runtime" in (first.name, way.name)
        tolerance = QUANTIZED_TOLERANCE if rounded else TOLERANCE[config.precision]
        pairs = zip(values, expected, strict=False)
        distance = max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)
        same = distance <= tolerance and len(values) == len(expected)
        status = status if same else 1
        verdict = "agree" if same else "DO NOT AGREE"
        lines.append(f"losses of {way.name} and {first.name}: {distance:.1e} apart at most, {verdict}")
    return status, lines
