"""How long a checkpoint takes: torch.distributed.checkpoint, model and optimizer, save and load, systems taking turns.

python -m bench checkpoint      writes results/checkpoint.json

Each rank writes what it holds into one folder (in memory, /dev/shm, where there is one, so that no disk is measured),
and loads it back into the same world.
"""

import argparse
import statistics
from typing import Any

from . import machine, store
from .launch import launch
from .speed import record
from .systems import SYSTEMS

COMPARED = ["ddp", "ours", "fsdp2"]


def measure(workload: str, ranks: int, rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Figures and why they are not to be trusted."""
    before = machine.busy_share()
    raw = launch("checkpoint_ranks", ranks, {"workload": workload, "systems": COMPARED, "rounds": rounds})
    foreign = [s["foreign"] for found in raw["samples"].values() for s in found]
    return raw, machine.verdict(before, raw["calibration"], foreign)


def tables(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's table."""
    rows = []
    for name, found in raw["samples"].items():
        save, load = (statistics.median(s[key] for s in found) for key in ("save", "load"))
        spread = machine.spread([s["save"] for s in found])
        rows.append(
            [
                SYSTEMS[name].label,
                f"{1e3 * save:.0f}",
                f"{1e3 * load:.0f}",
                store.mib(raw["bytes"][name]),
                f"{spread:.0%}",
            ]
        )
    text = f"{raw['workload']}, {raw['ranks']} ranks, model and AdamW state. "
    text += " ".join(f"{SYSTEMS[n].label} is missing: {why}." for n, why in raw["skipped"].items())
    header = ["system", "save ms", "load ms", "MiB on disk", "spread"]
    return [{"title": "Checkpoints", "text": text, "header": header, "rows": rows}]


def main(arguments: list[str]) -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(prog="python -m bench checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="dense")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--keep-noisy", action="store_true", help="record also on a busy machine, marked as such"
    )
    options = parser.parse_args(arguments)
    raw, noise = measure(options.workload, options.ranks, options.rounds)
    raw["tables"] = tables(raw)
    for part in raw["tables"]:
        print(f"{part['text']}\n\n{store.table(part['header'], part['rows'])}")
    return record("checkpoint", raw, noise, options.keep_noisy)
