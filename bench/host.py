"""CPU time that a runtime adds to the model's own step, with nothing on the wire: copies, hooks, launches.

python -m bench host      writes results/host.json

One process stands for rank 0 of 8, 64 and 1024 (torch's fake process group); the model without sharding, ours and FSDP2
take turns. Time is the main thread's CPU time, so that a busy machine disturbs it less than it does a clock; few
tokens, so that what is added shows.
"""

import argparse
import resource
import statistics
import time
from typing import Any

from . import machine, store
from .counts import SIMULATED, simulated
from .speed import record
from .systems import SYSTEMS, Job, _plain, build, why_not
from .workloads import WORKLOADS, batch_of

COMPARED = ("ours", "fsdp2")
PARTS = ("forward", "backward", "update")


def measure(ranks: int, rounds: int, workload: str) -> dict[str, list[dict[str, float]]]:
    """Thread CPU seconds of each part, round by round."""
    with simulated(ranks) as mesh:
        job = Job(WORKLOADS[workload], mesh)
        trainers = {"plain": _plain("plain", job.workload.model(), job)}
        trainers |= {name: build(name, job) for name in COMPARED if not why_not(name, job)}
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        for turn in range(rounds + 2):
            batch = batch_of(job.workload, turn, 0)
            for name, trainer in trainers.items():
                found = _step(trainer, batch)
                if turn >= 2:
                    samples[name].append(found)
    return samples


def _step(trainer: Any, batch: Any) -> dict[str, float]:
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    marks = [time.thread_time()]
    loss = trainer.forward(batch)
    marks.append(time.thread_time())
    trainer.backward(loss)
    marks.append(time.thread_time())
    trainer.update()
    marks.append(time.thread_time())
    found = {part: end - begin for part, begin, end in zip(PARTS, marks, marks[1:], strict=False)}
    return {**found, "faults": resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults}


def tables(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's table: medians, and what is added to the plain model within a round."""
    rows = []
    for ranks, samples in figures["samples"].items():
        for name, found in samples.items():
            medians = {part: statistics.median(s[part] for s in found) for part in PARTS}
            pairs = zip(found, samples["plain"], strict=True)
            added = statistics.median(
                a["forward"] + a["backward"] - b["forward"] - b["backward"] for a, b in pairs
            )
            spread = machine.spread([s["forward"] + s["backward"] for s in found])
            cells = (f"{1e3 * medians[part]:.1f}" for part in PARTS)
            faults = f"{statistics.median(s['faults'] for s in found):,.0f}"
            rows.append([ranks, SYSTEMS[name].label, *cells, f"{1e3 * added:.1f}", faults, f"{spread:.0%}"])
    header = [
        "simulated ranks",
        "system",
        "forward ms",
        "backward ms",
        "optimizer ms",
        "added ms",
        "page faults",
    ]
    text = (
        f"Workload {figures['workload']}; thread CPU milliseconds of one step. *Added* is forward and backward beyond"
        " the same model's without sharding, in the same round. Page faults are memory"
        " that torch's CPU allocator took anew from the kernel; on a GPU there are none."
    )
    header.append("spread")
    return [{"title": "Host time with nothing on the wire", "text": text, "header": header, "rows": rows}]


def main(arguments: list[str]) -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(prog="python -m bench host", description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="counts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--keep-noisy", action="store_true", help="record also on a busy machine, marked as such"
    )
    options = parser.parse_args(arguments)
    before = machine.busy_share()
    calibration = [machine.calibrate() for _ in range(8)]
    samples = {str(ranks): measure(ranks, options.rounds, options.workload) for ranks in SIMULATED}
    calibration += [machine.calibrate() for _ in range(8)]
    figures: dict[str, Any] = {"workload": options.workload, "samples": samples}
    figures["tables"] = tables(figures)
    for part in figures["tables"]:
        print(f"{part['text']}\n\n{store.table(part['header'], part['rows'])}")
    return record("host", figures, machine.verdict(before, calibration, []), options.keep_noisy)
