"""``fsdp-train plan``: bytes that a split holds and sends, and which splits fit in memory."""

import dataclasses
import sys

from ragged_shard.testing import simulated_ranks

from .config import RunConfig
from .corpus import read_data
from .errors import TrainError
from .hardware import device_memory, pick_device
from .launch import pick_ranks, start_ranks
from .model import ModelConfig
from .parallel.splits import AXES, Splits
from .parallel.traffic import candidates, split_config, traffic_of
from .plan import MemoryPlan, kept_peaks, make_plan, megabytes, plan_here, plan_lines
from .trainer import MEASURED_STEP, model_config

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
    data = read_data(
        config.data,
        dtype=config.dtype,
        vocab_size=config.vocab_size,
        held_out=config.held_out,
        seq_len=config.seq_len,
    )
    sizes = model_config(config, data.vocab_size)
    chosen = any(getattr(config, axis) > 1 for axis in AXES)
    list_splits = not (chosen or config.measure or config.hf_config or config.system != "fsdp_runtime")
    try:
        config.check(ranks)
    except TrainError as error:
        if not list_splits or not candidates(config, ranks):
            raise
        print(f"without splits: {error}\n")
    else:
        splits, plan = config.splits(ranks), make_plan(config, data.vocab_size, ranks)
        print(
            "\n".join(
                [
                    *plan_lines(plan, ranks, splits),
                    "",
                    *traffic_lines(config, sizes, splits),
                    "",
                ]
            )
        )
        if config.system == "fsdp_runtime" and config.pp == 1 and config.reshard:
            with simulated_ranks(ranks, collectives="skip"):
                peaks = kept_peaks(config, data.vocab_size, plan)
            print("\n".join([*curve_lines(config, sizes, ranks, peaks), ""]))
        if config.measure:
            _measure(config, ranks, plan)
    if list_splits:
        with simulated_ranks(ranks, collectives="skip"):
            print("\n".join(splits_lines(config, sizes, ranks, gib)))
    return 0


def curve_lines(config: RunConfig, sizes: ModelConfig, ranks: int, peaks: list[int]) -> list[str]:
    """A Markdown table of peak memory and bytes sent, by the number of layers that stay gathered.

    Raises:
        TrainError: not even freeing all of them fits ``config.memory_budget``.
    """
    budget = config.memory_budget
    if budget is not None and min(peaks) > budget:
        raise TrainError(
            f"--memory-budget {budget:,}: a rank is planned to hold {min(peaks):,} bytes at least, with every layer "
            "freed after forward"
        )
    fits = [kept for kept, peak in enumerate(peaks) if budget is None or peak <= budget]
    rows = []
    shown = {round(i * (len(peaks) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)} | {fits[-1]}
    for kept in sorted(shown):
        sent = traffic_of(config, sizes, config.splits(ranks), kept=kept).fsdp
        chosen = ", as many as fit" if budget is not None and kept == fits[-1] else ""
        rows.append(f"| {kept}{chosen} | {megabytes(peaks[kept])} | {sent / 1e6:,.2f} |")
    return [
        "memory against bytes sent (--memory-budget): the last layers that stay gathered after forward",
        "",
        "| layers | peak MB | MB sent: fsdp |",
        "| --- " * 3 + "|",
        *rows,
    ]


def _measure(config: RunConfig, ranks: int, plan: MemoryPlan) -> None:
    sys.stdout.flush()
    short = dataclasses.replace(
        config, steps=MEASURED_STEP, save_every=0, eval_every=0, plot=False, resume=False
    )
    summary = start_ranks(short, ranks, quiet=True).summary
    for text, planned, measured in (
        ("live bytes before it", plan.at_rest, summary["measured_rest"]),
        ("peak", plan.peak, summary["measured_peak"]),
    ):
        off = 100 * (measured / planned - 1)
        print(
            f"step {MEASURED_STEP}, measured {text}: {megabytes(measured)} MB, {off:+.1f} % from "
            f"{megabytes(planned)} MB planned"
        )


def traffic_lines(config: RunConfig, sizes: ModelConfig, splits: Splits) -> list[str]:
    """Bytes that one rank sends in a step on each axis, and the pipeline's bubble."""
    traffic = traffic_of(config, sizes, splits)
    what = {
        "fsdp": "gathers and reductions of parameters",
        "hsdp": "all-reduces of gradient shards",
        "tp": "gathers and reduce-scatters of activations",
        "cp": "gathers of keys and values, and their gradients",
        "ep": "all-to-alls of tokens, if experts are evenly used",
        "pp": "activations between stages, and their gradients",
    }
    lines = [f"one rank sends in a step ({splits}; layers only, MB):"]
    for axis, text in what.items():
        nbytes = getattr(traffic, axis)
        if nbytes:
            lines.append(f"  {axis:<5}{text + ':':<52}{nbytes / 1e6:>12,.2f}")
    return [*lines, f"pipeline's bubble: {splits.bubble(config.accumulate):.1%} of a step"]


def memory_limit(config: RunConfig, gib: float | None) -> tuple[float, str]:
    """Bytes that a rank may hold, and who says so."""
    if gib is not None:
        return gib * _GIB, "--memory"
    mine = device_memory(pick_device(config.device))
    return (_ASSUMED_GIB * _GIB, "assumed; no GPU here") if mine is None else (mine, "this GPU's")


def splits_lines(config: RunConfig, sizes: ModelConfig, ranks: int, gib: float | None) -> list[str]:
    """A Markdown table of the splits that fit in memory, those that send the fewest bytes first.

    Called inside `simulated_ranks`.

    Args:
        config, sizes: the run, and its model with the data's vocabulary.
        ranks: number of ranks to split.
        gib: GiB that a rank may hold; None takes this machine's GPU.
    """
    found = [(splits, traffic_of(config, sizes, splits)) for splits in candidates(config, ranks)]
    limit, whose = memory_limit(config, gib)
    rows: list[str] = []
    planned = 0
    for splits, traffic in sorted(found, key=lambda pair: pair[1].total):
        if len(rows) == _SHOWN or planned == _PLANNED:
            break
        planned += 1
        chosen = split_config(config, {axis: getattr(splits, axis) for axis in AXES})
        peak = plan_here(chosen, sizes.vocab_size).peak
        if peak <= limit:
            cells = " | ".join(f"{getattr(traffic, axis) / 1e6:,.1f}" for axis in _SENT)
            bubble = splits.bubble(config.accumulate)
            rows.append(
                f"| {splits} | {peak / _GIB:,.2f} | {bubble:.0%} | {traffic.total / 1e6:,.1f} | {cells} |"
            )
    lines = [
        f"{len(found)} splits of {ranks} ranks; those that hold at most {limit / _GIB:.2f} GiB ({whose}) among the "
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
    if config.accumulate == 1:
        lines.append("pipelines take microbatches: with --accumulate 2 or more there are splits with pp")
    return lines
