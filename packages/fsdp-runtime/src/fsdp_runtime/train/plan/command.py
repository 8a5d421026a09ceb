"""``fsdp-train plan``: what each rank of a run will hold and send, and which splits of the ranks fit."""

import dataclasses
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby, product
from typing import Any

from ragged_shard.testing import simulated_ranks

from ..config import RunConfig
from ..errors import TrainError
from ..hardware import device_memory, pick_device
from ..launch import pick_ranks, start_ranks
from ..splits import AXES, Splits
from ..trainer import MEASURED_STEP, data_of, model_config
from .memory import MemoryPlan, make_plan, plan_here
from .models import has_forward
from .traffic import traffic_of, traffic_of_units


def plan_lines(plan: MemoryPlan, splits: Splits) -> list[str]:
    """The plan as a markdown table and sums; what is sent only where all parameters are sharded over the same ranks."""
    lines = [
        f"rank 0 of {splits.world_size}; MB are 10^6 bytes",
        "",
        "| unit | parameters | shard (elements) | padding | weights MB | gradients MB | optimizer MB | gathered MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for _, equal in groupby(plan.units, lambda unit: dataclasses.replace(unit, name="")):
        unit, *rest = equal
        name = f"{unit.name} to {rest[-1].name} ({len(rest) + 1}, each)" if rest else unit.name
        shard = " + ".join(f"{size:,}" for size in unit.shards)
        padding = unit.padding / (unit.padding + unit.parameters)
        lines.append(
            f"| {name} | {unit.parameters:,} | {shard} | {100 * padding:.2f} % | {megabytes(unit.weights)} "
            f"| {megabytes(unit.gradients)} | {megabytes(unit.state)} "
            f"| {megabytes(sum(unit.gathered))} |"
        )
    others = splits.shards - 1
    sent = [
        ("sent by one gather of every unit", others * sum(unit.sent for unit in plan.units)),
        ("sent by one reduction of every unit", others * sum(unit.reduced for unit in plan.units)),
    ]
    rows = [
        ("weights and their codes", plan.weights),
        ("optimizer state", plan.state),
        ("buffers that the optimizer keeps", plan.scratch),
        ("gradients, when all are there", plan.gradients),
        ("gathered buffers, at most", plan.buffers),
        ("activations and temporaries, at most", plan.activations),
        ("gradients, buffers, activations together, at most", plan.pass_peak),
        ("temporaries of the optimizer's step", plan.optimizer_step),
        *(sent if splits.one_mesh else ()),
        ("peak", plan.peak),
    ]
    return [*lines, "", *(f"{text + ':':<52}{megabytes(nbytes):>12} MB" for text, nbytes in rows)]


def megabytes(nbytes: float | None) -> str:
    """Format bytes as MB (10^6)."""
    return "unknown" if nbytes is None else f"{nbytes / 1e6:,.2f}"


def split_config(config: RunConfig, sizes: Iterable[int]) -> RunConfig:
    """The run with other splits: a number for each of `AXES`."""
    changes: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
    return dataclasses.replace(config, **changes)


def candidates(config: RunConfig, world_size: int) -> list[Splits]:
    """Every split of the ranks that the run allows, in no order."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    inside = [1] if config.hf_config else divisors
    experts = inside if config.model.num_experts else [1]
    allowed = []
    for sizes in product(divisors, inside, inside, inside, experts):
        chosen = split_config(config, sizes)
        with suppress(TrainError):
            chosen.check(world_size)
            allowed.append(chosen.splits(world_size))
    return allowed


_GIB = 1 << 30
_ASSUMED_GIB = 80.0  # where this machine has no GPU
_SHOWN, _PLANNED = 12, 40  # splits that are printed, and planned at most
_SENT = ("fsdp", "hsdp", "tp", "cp", "ep", "pp")


def print_plan(config: RunConfig, asked_ranks: int | None, gib: float | None = None) -> int:
    """Print a run's plan, and the splits of its ranks where it asks for none.

    With ``measure`` also run a few steps and print how far the measured peak was from it. `gib` is what a rank may
    hold. Returns 0.

    Raises:
        TrainError: what was asked for does not fit together, under any splits where it asks for none.
    """
    ranks = asked_ranks if asked_ranks and not config.measure else pick_ranks(config, asked_ranks)
    vocab_size = 1 if config.hf_config else data_of(config).vocab_size  # such a model has its own
    chosen = any(getattr(config, axis) > 1 for axis in AXES)
    list_splits = not (chosen or config.measure or config.system != "fsdp_runtime")
    try:
        config.check(ranks)
    except TrainError as error:
        if not list_splits or not candidates(config, ranks):
            raise
        print(f"without splits: {error}\n")
    else:
        splits, plan = config.splits(ranks), make_plan(config, vocab_size, ranks)
        print(*plan_lines(plan, splits), "", sep="\n")
        if not config.hf_config:
            print(_line_of_layers(config, vocab_size, splits), "", sep="\n")
        elif not has_forward(config):
            print(f"Activations are not counted: {config.hf_config} has tensors only; plan a config.json\n")
        if config.measure:
            _measure(config, ranks, plan)
    if list_splits:
        with simulated_ranks(ranks, collectives="skip"):
            print(*splits_lines(config, vocab_size, ranks, gib), sep="\n")
    return 0


def _line_of_layers(config: RunConfig, vocab_size: int, splits: Splits) -> str:
    """One line: MB that a rank sends for the built-in model's layers, by axis, and the pipeline's bubble."""
    traffic = dataclasses.asdict(traffic_of(config, model_config(config, vocab_size), splits))
    sent = ", ".join(f"{axis} {megabytes(nbytes)}" for axis, nbytes in traffic.items() if nbytes)
    bubble = splits.bubble(config.accumulate)
    return (
        f"one rank sends in a step ({splits}; layers only, MB): {sent or 0}; pipeline's bubble {bubble:.1%}"
    )


def _measure(config: RunConfig, ranks: int, plan: MemoryPlan) -> None:
    sys.stdout.flush()
    short = dataclasses.replace(
        config, steps=MEASURED_STEP, save_every=0, eval_every=0, plot=False, resume=False
    )
    summary = start_ranks(short, ranks, quiet=True)
    for text, planned, measured in (
        ("live bytes before it", plan.at_rest, summary["measured_rest"]),
        ("peak", plan.peak, summary["measured_peak"]),
    ):
        off = 100 * (measured / planned - 1)
        print(
            f"step {MEASURED_STEP}, measured {text}: {megabytes(measured)} MB, {off:+.1f} % from "
            f"{megabytes(planned)} MB planned"
        )


def splits_lines(config: RunConfig, vocab_size: int, ranks: int, gib: float | None) -> list[str]:
    """A Markdown table of the splits that fit in memory, those that send the fewest bytes first.

    Called inside `simulated_ranks`.

    Args:
        config, vocab_size: the run, and the number of its data's tokens.
        ranks: number of ranks to split.
        gib: GiB that a rank may hold; None takes this machine's GPU.
    """
    sizes = model_config(config, vocab_size)
    traffics = [(splits, traffic_of(config, sizes, splits)) for splits in candidates(config, ranks)]
    limit, whose = _ASSUMED_GIB * _GIB, "assumed; no GPU here"
    if gib is not None:
        limit, whose = gib * _GIB, "--memory"
    elif (memory := device_memory(pick_device(config.device))) is not None:
        limit, whose = memory, "this GPU's"
    rows: list[str] = []
    planned = 0
    for splits, traffic in sorted(traffics, key=lambda pair: pair[1].total):
        if len(rows) == _SHOWN or planned == _PLANNED:
            break
        planned += 1
        chosen = split_config(config, [getattr(splits, axis) for axis in AXES])
        plan = plan_here(chosen, vocab_size)
        if config.hf_config:
            traffic = traffic_of_units(config, plan.units, splits)
        if plan.peak <= limit:
            cells = " | ".join(f"{getattr(traffic, axis) / 1e6:,.1f}" for axis in _SENT)
            bubble = splits.bubble(config.accumulate)
            rows.append(
                f"| {splits} | {plan.peak / _GIB:,.2f} | {bubble:.0%} | {traffic.total / 1e6:,.1f} | {cells} |"
            )
    lines = [
        f"{len(traffics)} splits of {ranks} ranks; those that hold at most {limit / _GIB:.2f} GiB ({whose}) among the "
        f"{planned} that send least:",
        "",
        f"| split | GiB a rank | bubble | MB sent | {' | '.join(_SENT)} |",
        "| --- " * (4 + len(_SENT)) + "|",
        *rows,
        "",
    ]
    if not rows:
        lines.append(
            "nothing fits: use more ranks, --checkpointing, or a smaller --batch with more --accumulate"
        )
    if config.hf_config:
        lines.append("tp, pp, cp and ep divide the modules of the built-in model only")
    elif config.accumulate == 1:
        lines.append("pipelines take microbatches: with --accumulate 2 or more there are splits with pp")
    return lines
