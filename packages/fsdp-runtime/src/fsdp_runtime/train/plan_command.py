"""``fsdp-train plan``: what a split holds and sends, and, where none was asked for, which splits fit, best first."""

import dataclasses
import sys

from ragged_shard.testing import simulated_ranks

from .config import RunConfig
from .corpus import read_data
from .errors import TrainError
from .hardware import device_memory, peak_flops, pick_device
from .launch import pick_ranks, start_ranks
from .model import ModelConfig
from .network import Cluster
from .plan import MemoryPlan, kept_peaks, make_plan, megabytes, plan_here, plan_lines
from .predict import Prediction, assumptions, candidates, predict, reached_flops, split_config
from .splits import AXES
from .trainer import MEASURED_STEP, model_config

_GIB = 1 << 30
_ASSUMED_GIB = 80.0  # where this machine has no GPU
_SHOWN, _PLANNED = 12, 40  # splits that are printed, and looked at for it


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
                    *traffic_lines(prediction_of(config, sizes, ranks)),
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
    """A markdown table of the step's time against memory, by how many layers stay gathered.

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
        one = predict(config, sizes, config.splits(ranks), Cluster(), _flops(config)[0], kept=kept)
        chosen = ", as many as fit" if budget is not None and kept == fits[-1] else ""
        rows.append(
            f"| {kept}{chosen} | {megabytes(peaks[kept])} | {1e3 * one.seconds:,.3f} "
            f"| {1e3 * one.waiting:,.3f} | {one.traffic.fsdp / 1e6:,.2f} |"
        )
    return [
        "time of a step against memory (--memory-budget): the last layers that stay gathered after forward",
        "",
        "| layers | peak MB | ms a step | ms of it waiting | MB sent: fsdp |",
        "| --- " * 5 + "|",
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


def traffic_lines(prediction: Prediction) -> list[str]:
    """What one rank sends in a step on each axis, and the bubble."""
    what = {
        "fsdp": "gathers and reductions of parameters",
        "hsdp": "all-reduces of gradient shards",
        "tp": "gathers and reduce-scatters of activations",
        "cp": "gathers of keys and values, and their gradients",
        "ep": "all-to-alls of tokens, if experts are evenly used",
        "pp": "activations between stages, and their gradients",
    }
    lines = [f"one rank sends in a step ({prediction.splits}; layers only, MB):"]
    for axis, text in what.items():
        nbytes = getattr(prediction.traffic, axis)
        if nbytes:
            lines.append(f"  {axis:<5}{text + ':':<52}{nbytes / 1e6:>12,.2f}")
    return [*lines, f"pipeline's bubble: {prediction.bubble:.1%} of a step"]


def memory_limit(config: RunConfig, gib: float | None) -> tuple[float, str]:
    """Bytes that a rank may hold, and who says so."""
    if gib is not None:
        return gib * _GIB, "--memory"
    mine = device_memory(pick_device(config.device))
    return (_ASSUMED_GIB * _GIB, "assumed; no GPU here") if mine is None else (mine, "this GPU's")


def prediction_of(config: RunConfig, sizes: ModelConfig, ranks: int) -> Prediction:
    """The split that the options ask for, on paper."""
    return predict(config, sizes, config.splits(ranks), Cluster(), _flops(config)[0])


def splits_lines(config: RunConfig, sizes: ModelConfig, ranks: int, gib: float | None) -> list[str]:
    """A markdown table of the splits that fit memory, best predicted first, and what it takes for granted.

    Called inside `simulated_ranks`.

    Args:
        config, sizes: the run, and its model with the data's vocabulary.
        ranks: of which splits are looked for.
        gib: what a rank may hold; None takes this machine's GPU.
    """
    cluster, (flops, source) = Cluster(), _flops(config)
    found = [predict(config, sizes, splits, cluster, flops) for splits in candidates(config, ranks)]
    limit, whose = memory_limit(config, gib)
    rows: list[str] = []
    planned = 0
    for one in sorted(found, key=lambda one: one.seconds):
        if len(rows) == _SHOWN or planned == _PLANNED:
            break
        planned += 1
        chosen = split_config(config, {axis: getattr(one.splits, axis) for axis in AXES})
        peak = plan_here(chosen, sizes.vocab_size).peak
        if peak <= limit:
            rows.append(_row(one, peak))
    lines = [
        f"{len(found)} splits of {ranks} ranks; those of the best {planned} that hold at most {limit / _GIB:.2f} GiB "
        f"({whose}), best predicted first:",
        "",
        "| split | ms a step | waiting | bubble | GiB a rank | MB sent: fsdp | hsdp | tp | cp | ep | pp |",
        "| --- " * 11 + "|",
        *rows,
        "",
        *(f"assumed: {text}" for text in assumptions(cluster, flops, source)),
    ]
    if not rows:
        lines.append(
            "nothing fits: use more ranks, --checkpointing, or a smaller --batch with more --accumulate"
        )
    if config.accumulate == 1:
        lines.append("pipelines take microbatches: with --accumulate 2 or more there are splits with pp")
    return lines


def _row(one: Prediction, peak: int) -> str:
    sent = " | ".join(
        f"{getattr(one.traffic, axis) / 1e6:,.1f}" for axis in ("fsdp", "hsdp", "tp", "cp", "ep", "pp")
    )
    return (
        f"| {one.splits} | {1e3 * one.seconds:,.2f} | {one.waiting / one.seconds:.0%} | {one.bubble:.0%} "
        f"| {peak / _GIB:,.2f} | {sent} |"
    )


def _flops(config: RunConfig) -> tuple[float, str]:
    return reached_flops(peak_flops(pick_device(config.device), config.precision))
