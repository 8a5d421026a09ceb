"""Does training converge alike where weights and gradients travel quantized: every kind at several seeds, one plot."""

import dataclasses
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .compare import GATHERS, folder_of, run_quietly
from .config import RunConfig
from .errors import TrainError
from .launch import pick_ranks

KINDS = ("bf16", "fp8", "fp8-bf16", "fp8-int8")  # the first is what the others are held against
_WORDS = {
    "bf16": "bf16 gathers, fp32 reductions",
    "fp8": "fp8 gathers, fp32 reductions",
    "fp8-bf16": "fp8 gathers, bf16 reductions",
    "fp8-int8": "fp8 gathers, int8 reductions",
}
_SMOOTH = 10  # steps that a point of a curve is the mean of

Entries = list[dict[str, Any]]
Runs = dict[str, dict[int, Entries]]  # by kind and seed
Run = Callable[[RunConfig, int], Entries]


def check_convergence(
    config: RunConfig, seeds: list[int], asked_ranks: int | None, run: Run = run_quietly
) -> int:
    """Train with each kind of gather and reduction at each seed; print and save table and plot of the losses.

    A seed decides initial values and the order of batches, so kinds differ only in what is rounded on the wire: all
    compute in the run's precision. Final losses are held-out ones, after the last step.

    Returns 0, or 1 where a final loss is further from the first kind's of its seed than that kind's seeds are apart.

    Raises:
        TrainError: fewer than two seeds, one twice, or a run that failed.
    """
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise TrainError(f"--seeds {','.join(map(str, seeds))}: expected two different ones or more")
    config = dataclasses.replace(config, eval_every=config.steps)
    out, ranks = folder_of(config), pick_ranks(config, asked_ranks)
    runs: Runs = {kind: {} for kind in KINDS}
    for seed in seeds:
        for kind in KINDS:
            print(f"seed {seed}: {_WORDS[kind]}, on {ranks} ranks", file=sys.stderr, flush=True)
            changes: dict[str, Any] = {
                "quantize": GATHERS[kind].get("quantize", "none"),
                "reduce": GATHERS[kind].get("reduce", "none"),
                "seed": seed,
                "out": str(out / f"{kind}-{seed}"),
                "plot": False,
            }
            runs[kind][seed] = run(dataclasses.replace(config, **changes), ranks)
    return _conclude(config, runs, seeds, out, ranks)


def final_loss(entries: Entries) -> float:
    """The held-out loss after the last step; NaN where it was none."""
    return _values(entries, "held_out")[-1]


def _values(entries: Entries, kind: str) -> list[float]:
    return [entry["loss"] for entry in entries if entry["kind"] == kind]


def largest_difference(runs: Runs, kind: str) -> float:
    """How far a kind's final losses are from the first kind's, each at its own seed, at most."""
    first = runs[KINDS[0]]
    return max(abs(final_loss(runs[kind][seed]) - final_loss(first[seed])) for seed in first)


def spread(finals: list[float]) -> float:
    """How far the largest and the smallest are apart."""
    return max(finals) - min(finals)


def _conclude(config: RunConfig, runs: Runs, seeds: list[int], out: Path, ranks: int) -> int:
    finals = {kind: [final_loss(found[seed]) for seed in seeds] for kind, found in runs.items()}
    allowed = spread(finals[KINDS[0]])
    head = (
        f"{date.today().isoformat()}, {platform.machine()}, torch {torch.__version__}, {ranks} ranks, computing in "
        f"{config.precision}; {config.batch} x {config.seq_len} tokens a step, {config.steps} steps"
    )
    lines = [
        f"| what travels | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | furthest from bf16 of its seed |",
        f"| --- |{' --- |' * (len(seeds) + 2)}",
    ]
    failed = []
    for kind, values in finals.items():
        apart = largest_difference(runs, kind)
        if not apart <= allowed:  # also where it is NaN
            failed.append(kind)
        shown = " | ".join(f"{value:.4f}" for value in values)
        lines.append(f"| {_WORDS[kind]} | {shown} | {statistics.mean(values):.4f} | {apart:.4f} |")
    verdict = f"The seeds of bf16 are {allowed:.4f} apart; " + (
        f"further from bf16 than that: {', '.join(failed)}"
        if failed
        else "no kind is further from bf16 than that"
    )
    report = "\n".join([head, "", *lines, "", verdict, ""])
    print(report)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(report)
    draw(runs, out / "convergence.png", head)
    print(f"table.md and convergence.png are in {out}")
    return 1 if failed else 0


def draw(runs: Runs, path: Path, title: str) -> None:
    """Training losses on the left, the mean of seeds with their range; final held-out losses on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, points) = pyplot.subplots(
        1, 2, figsize=(10, 4.2), dpi=120, layout="constrained", width_ratios=(2, 1)
    )
    for number, (kind, found) in enumerate(runs.items()):
        rows = [_smoothed(_values(entries, "train")) for entries in found.values()]
        columns = list(zip(*rows, strict=True))
        steps = range(_SMOOTH, _SMOOTH + len(columns))
        curves.fill_between(
            steps,
            [min(c) for c in columns],
            [max(c) for c in columns],
            color=f"C{number}",
            alpha=0.12,
            linewidth=0,
        )
        style = ("-", "--", "-.", ":")[number % 4]
        middle = [statistics.mean(c) for c in columns]
        curves.plot(steps, middle, style, color=f"C{number}", linewidth=1.3, label=_WORDS[kind])
        finals = [final_loss(entries) for entries in found.values()]
        points.plot([number] * len(finals), finals, "o", color=f"C{number}", markersize=5)
    curves.set(
        xlabel="step",
        ylabel="loss (nats per token)",
        title=f"mean of seeds and their range, {_SMOOTH} steps a point",
    )
    curves.legend(frameon=False, fontsize="small")
    points.set(xticks=range(len(runs)), xticklabels=list(runs), title="held-out loss at the end, each seed")
    for axes in (curves, points):
        axes.grid(alpha=0.3)
        axes.title.set_fontsize(9)
    figure.suptitle(title, fontsize=7)
    figure.savefig(path)
    pyplot.close(figure)


def _smoothed(values: list[float]) -> list[float]:
    window = min(_SMOOTH, len(values))
    return [statistics.mean(values[end - window : end]) for end in range(window, len(values) + 1)]
