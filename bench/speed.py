"""Tokens/s, step time and its parts, CPU seconds and peak memory of all systems on the same work.

python -m bench speed [--workload dense] [--ranks 2] ...      table; writes results/speed-WORKLOAD-RANKS.json

"Alone" is the same model on each rank by itself, which does not communicate: the limit of what any system can reach.

Times: one launch, every system built in the same ranks, in alternating rounds; ratios are taken within a round and
the median over rounds is reported, so that a slow minute hits all alike. Memory: one launch for each system, since
a process's peak cannot be told apart by system. Exit code 3, and nothing written, when the machine was too busy
to tell.
"""

import statistics
from typing import Any

from . import footprint, machine, rounds, store
from .ranks import launch
from .systems import OPTIMIZERS, label_of
from .workloads import WORKLOADS

OURS = ["ours", "ours-peer-memory", "ours-collectives"]
ALL = ["alone", "ddp", *OURS, "fsdp2", "fsdp1", "deepspeed", "megatron-fsdp"]
PEERS = ("alone", "ddp", "fsdp2")  # of which ratios are taken


def measure(
    workload: str,
    ranks: int,
    *,
    systems: list[str],
    num_rounds: int = 8,
    steps: int = 2,
    seconds: float = float("inf"),
    memory: bool = True,
    **job: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Figures of one workload, and why their times are not to be trusted (empty: they are)."""
    before = machine.busy_share()
    request = {"workload": workload, "systems": systems, "rounds": num_rounds, "steps": steps, **job}
    request["seconds"] = seconds
    raw = launch(rounds.run, ranks, request)
    foreign = [sample["foreign"] for samples in raw["samples"].values() for sample in samples]
    noise = machine.verdict(before, raw["calibration"], foreign)
    figures = {**raw, "times": summarise(raw), "memory": {}}
    if memory:
        for name in raw["samples"]:
            request = {"workload": workload, "system": name, **job}
            figures["memory"][name] = launch(footprint.run, ranks, request)
    return figures, noise


def summarise(raw: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians, spread, and ratios of each system to FSDP2 and to DDP, from the raw samples."""
    samples = raw["samples"]
    tokens = raw["workload"]["tokens_per_rank"] * raw["ranks"]
    out = {}
    for name, runs in samples.items():
        medians = {key: statistics.median(r[key] for r in runs) for key in runs[0] if key != "foreign"}
        out[name] = {
            **medians,
            "tokens_per_second": tokens / medians["wall"],
            "spread": machine.spread([r["wall"] for r in runs]),
        }
        if raw.get("free", {}).get(name):
            pairs = zip(runs, raw["free"][name], strict=True)
            out[name]["exposed"] = statistics.median(
                with_wire["wall"] - without["wall"] for with_wire, without in pairs
            )
        for peer in PEERS:
            if peer in samples:
                for key in ("wall", "cpu"):
                    pairs = zip(samples[peer], runs, strict=True)
                    out[name][f"{key}_ratio_{peer}"] = statistics.median(p[key] / r[key] for p, r in pairs)
    return out


def as_table(figures: dict[str, Any]) -> str:
    """Markdown: one row a system; what could not run, and why, below."""
    header = [
        "system",
        "tokens/s",
        "of alone",
        "x FSDP2",
        "x DDP",
        "CPU s/step",
        "forward ms",
        "backward ms",
        "optimizer ms",
    ]
    header += ["spread", "peak RSS MiB", "steady MiB", "PSS MiB"]
    rows = []
    for name, t in figures["times"].items():
        memory = figures["memory"].get(name, {})
        rows.append(
            [
                label_of(name),
                f"{t['tokens_per_second']:,.0f}",
                *(
                    f"{t[f'wall_ratio_{peer}']:.2f}" if f"wall_ratio_{peer}" in t else ""
                    for peer in ("alone", "fsdp2", "ddp")
                ),
                f"{t['cpu']:.3f}",
                *(f"{1e3 * t[part]:.0f}" for part in ("forward", "backward", "update")),
                f"{t['spread']:.1%}",
                *(store.mib(memory[key]) if key in memory else "" for key in ("start", "steady", "pss")),
            ]
        )
    lines = [store.table(header, rows)]
    for name, reason in figures["skipped"].items():
        lines.append(f"\n{label_of(name)} is not in the table: {reason}.")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print, record."""
    parser = store.parser_of("speed", __doc__, timed=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="dense")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", default=",".join(ALL), help="separated by commas")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of each system in each round")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further round after so many"
    )
    parser.add_argument("--no-memory", action="store_true", help="skip the launches that measure peak memory")
    options = parser.parse_args(arguments)
    figures, noise = measure(
        options.workload,
        options.ranks,
        systems=options.systems.split(","),
        num_rounds=options.rounds,
        steps=options.steps,
        seconds=options.seconds,
        memory=not options.no_memory,
        optimizer=options.optimizer,
        precision=options.precision,
    )
    done = max(map(len, figures["samples"].values()))
    print(
        f"{options.workload}, {options.ranks} ranks, {options.optimizer}, {options.precision}; {done} rounds\n"
    )
    print(as_table(figures))
    suffix = "".join(
        f"-{x}" for x, plain in ((options.optimizer, "adamw"), (options.precision, "float32")) if x != plain
    )
    return store.record(
        f"speed-{options.workload}-{options.ranks}{suffix}", figures, noise, options.keep_noisy
    )
