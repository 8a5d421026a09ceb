"""block-optim: steps that each optimizer takes to one held-out loss, over ten seeds.

python -m bench steps     the grid of learning rates, ten seeds at the best; writes bench/results/steps.json

A small form of modded-nanogpt's optimizer track: model, data, batch size and target are fixed, the optimizer
changes. A Llama-style model (0.1M parameters, bytes) learns the source of Python's standard library in fp32 on one CPU
core. The rule of the hidden matrices changes; embedding, head and norms have the same AdamW everywhere. Learning rates
rise over the first steps and then stay constant, so that the step at which a loss is reached does not depend on the
length of the run. A seed decides the first weights and the batches; optimizers share both.

    grid         three other seeds; the learning rate that needs the fewest steps is taken
    steps        first step, of every 5th, at which the loss on held-out text is at most the target
    t            difference of the means to AdamW's over its standard error, both variances (Welch)
    by the rule  the first step at which the mean loss of the n seeds is below the target by margin / sqrt(n), as
                 modded-nanogpt asks for; the margin is three standard deviations of the loss between seeds at that step
"""

import concurrent.futures
import functools
import math
import multiprocessing
import statistics
from argparse import ArgumentParser
from typing import Any

import torch

from block_optim import Mixed
from fsdp_runtime.train.data import read_data
from fsdp_runtime.train.model import losses_of

from .measure import record, table_of
from .models import Shape, build

VOCAB, CONTEXT, BATCH = 128, 64, 16
DIM, LAYERS, HEADS, INNER = 64, 2, 4, 128
TARGET, BEYOND = 2.4, 0.03  # nats a byte; a run ends when it is so far below the target
EVERY, WARMUP, MOST = 5, 20, 400
SEEDS, GRID_SEEDS = tuple(range(10)), (100, 101, 102)
REST_LR, BETAS = 4e-3, (0.9, 0.95)
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {  # options and learning rates of the grid
    "AdamW": ({"algorithm": "adamw", "betas": BETAS}, (2e-3, 4e-3, 8e-3, 1.6e-2)),
    "AdamW8bit": (
        {"algorithm": "adamw8bit", "betas": BETAS, "min_8bit_numel": 0},
        (2e-3, 4e-3, 8e-3, 1.6e-2),
    ),
    "Muon": ({"algorithm": "muon"}, (1e-2, 2e-2, 4e-2, 8e-2)),
    "NorMuon": ({"algorithm": "muon", "normuon": True}, (1e-2, 2e-2, 4e-2, 8e-2)),
    "SOAP": ({"algorithm": "soap"}, (4e-3, 8e-3, 1.6e-2, 3.2e-2)),
    "Shampoo": ({"algorithm": "shampoo"}, (2e-3, 4e-3, 8e-3, 1.6e-2)),
}
BASELINE = "AdamW"
Curve = list[tuple[int, float]]  # (step, held-out loss)


def build_optimizer(model: Any, name: str, lr: float) -> Any:
    """The optimizer's rule for the hidden matrices, AdamW for all else."""
    hidden = [(n, p) for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    matrices = {id(p) for _, p in hidden}
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in matrices]
    others = {"algorithm": "adamw", "lr": REST_LR, "betas": BETAS, "weight_decay": 0.0}
    return Mixed(
        [{"params": hidden, "lr": lr, "weight_decay": 0.0, **OPTIMIZERS[name][0]}, {"params": rest, **others}]
    )


@functools.cache
def tokens() -> tuple[Any, Any]:
    """Bytes of the standard library's source to train on, and 32 held-out sequences: the text of `fsdp-train`."""
    data = read_data([], dtype="uint8", vocab_size=None, held_out=[], seq_len=CONTEXT)
    train, rest = (
        torch.from_numpy(side.read(0, min(side.num_tokens, 2_000_000))).clamp_(max=VOCAB - 1)
        for side in (data.train, data.held_out)
    )
    starts = torch.linspace(0, len(rest) - CONTEXT - 2, 32).long().tolist()
    return train, torch.stack([rest[s : s + CONTEXT + 1] for s in starts])


def curve_of(request: tuple[str, float, int, float, int]) -> Curve:
    """Held-out losses of one run until it is below the target; `request`: optimizer, lr, seed, target, most steps."""
    name, lr, seed, target, most = request
    torch.set_num_threads(1)
    train_part, held_out = tokens()
    model = build(Shape(dim=DIM, layers=LAYERS, heads=HEADS, inner=INNER, vocab=VOCAB), seed=seed)
    optimizer = build_optimizer(model, name, lr)
    full = [group["lr"] for group in optimizer.param_groups]
    generator, curve = torch.Generator().manual_seed(seed), []
    for step in range(1, most + 1):
        starts = torch.randint(len(train_part) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        batch = torch.stack([train_part[s : s + CONTEXT + 1] for s in starts])
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = rate * min(1.0, step / WARMUP)
        loss = losses_of(model, batch[:, :-1], batch[:, 1:])[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                curve.append((step, losses_of(model, held_out[:, :-1], held_out[:, 1:])[0].item()))
            if not curve[-1][1] > target - BEYOND or not math.isfinite(curve[-1][1]):
                break
    return curve


def steps_to(curve: Curve, target: float, most: int) -> float:
    """The first step at which the loss is at most the target; twice the most steps if none is."""
    return next((step for step, loss in curve if loss <= target), 2.0 * most)


def by_the_rule(curves: list[Curve], target: float) -> int | None:
    """The first step at which the mean loss is below the target by three standard errors; None if there is none.

    A run that has ended below the target counts with its last loss, which makes the mean too high at most.
    """
    for i in range(max(map(len, curves))):
        step, losses = EVERY * (i + 1), [curve[min(i, len(curve) - 1)][1] for curve in curves]
        margin = 3 * statistics.stdev(losses)
        if target - statistics.mean(losses) >= margin / math.sqrt(len(losses)):
            return step
    return None


def welch(first: list[float], second: list[float]) -> float:
    """Difference of two means over its standard error."""
    errors = [statistics.variance(values) / len(values) for values in (first, second)]
    difference = statistics.mean(first) - statistics.mean(second)
    return difference / math.sqrt(sum(errors)) if sum(errors) else math.copysign(math.inf, difference)


def measure(
    names: tuple[str, ...] = tuple(OPTIMIZERS),
    seeds: tuple[int, ...] = SEEDS,
    grid_seeds: tuple[int, ...] = GRID_SEEDS,
    target: float = TARGET,
    most: int = MOST,
    processes: int = 2,
) -> dict[str, Any]:
    """Steps of the grid, the learning rates that it chose, and the curves of all seeds at them."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        cells = [(name, lr) for name in names for lr in OPTIMIZERS[name][1]]
        requests = [(name, lr, seed, target, most) for name, lr in cells for seed in grid_seeds]
        curves = iter(list(pool.map(curve_of, requests)))
        grid: dict[str, dict[float, float]] = {name: {} for name in names}
        for name, lr in cells:
            grid[name][lr] = statistics.mean(steps_to(next(curves), target, most) for _ in grid_seeds)
        chosen = {name: min((steps, lr) for lr, steps in cells.items())[1] for name, cells in grid.items()}
        requests = [(name, chosen[name], seed, target, most) for name in names for seed in seeds]
        runs = iter(list(pool.map(curve_of, requests)))
    return {
        "target": target,
        "most": most,
        "grid": {name: {str(lr): steps for lr, steps in cells.items()} for name, cells in grid.items()},
        "chosen": chosen,
        "losses": {
            name: [" ".join(f"{loss:.5f}" for _, loss in next(runs)) for _ in seeds] for name in names
        },
    }


def curves_in(figures: dict[str, Any]) -> dict[str, list[Curve]]:
    """The curves of each optimizer's seeds, from a line of losses for each run."""
    return {
        name: [[(EVERY * (i + 1), float(loss)) for i, loss in enumerate(line.split())] for line in lines]
        for name, lines in figures["losses"].items()
    }


def tables_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of steps, and that of the grid."""
    target, most, curves = figures["target"], figures["most"], curves_in(figures)
    steps = {name: [steps_to(curve, target, most) for curve in runs] for name, runs in curves.items()}
    rows = []
    for name, values in steps.items():
        t = "" if name == BASELINE or BASELINE not in steps else f"{welch(values, steps[BASELINE]):+.1f}"
        rule = by_the_rule(curves[name], target)
        missed = f" ({sum(v > most for v in values)} never)" if max(values) > most else ""
        mean, spread = statistics.mean(values), statistics.stdev(values)
        cells = (f"{figures['chosen'][name]:g}", f"{mean:.0f}{missed}", f"{spread:.0f}", t)
        rows.append([name, *cells, "none" if rule is None else str(rule)])
    count = len(next(iter(curves.values())))
    grid_rows = [
        [name, f"{float(lr):g}", f"{taken:.0f}" if taken <= most else "missed"]
        for name, cells in figures["grid"].items()
        for lr, taken in cells.items()
    ]
    text = (
        "A Llama-style model of 0.1M parameters on bytes of Python's standard library; the rule of the hidden matrices"
        " changes, the rest has AdamW. *t*: difference to AdamW's mean over its standard error. *By the rule*: the"
        " first step at which the mean loss is below the target by three standard errors."
    )
    title = f"Steps to a held-out loss of {target}, {count} seeds"
    header = "optimizer; lr; mean steps; standard deviation; t; by the rule"
    grid_title, grid_text = "Steps to that loss by learning rate", "On three other seeds; the fewest decide."
    return [
        table_of(title, text, header, rows, exact=True),
        table_of(grid_title, grid_text, "optimizer; lr; steps", grid_rows, exact=True),
    ]


def main_steps(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print and save."""
    parser.parse_args(arguments)
    figures = measure()
    return record("steps", tables_of(figures), **figures)
