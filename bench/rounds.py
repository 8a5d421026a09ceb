"""A worker: all systems in one process group, taking turns, each step cut into forward, backward and update.

Every rank builds every system from the same weights. Then

    check     the same batches through each: losses must agree, or the system is dropped and the difference reported
              (of those that communicate)
    rounds    in each round every system does some steps, in an order that rotates

In a simulated world each measurement is repeated with a network that takes no time, so that what is exposed shows.
Raw samples of rank 0 are returned; walls are taken between barriers, so they are the slowest rank's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .clock import Clock, build_all, in_turns
from .systems import SYSTEMS, Job
from .workloads import describe

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def run(request: dict[str, Any], simulation: Any = None) -> dict[str, Any]:
    """Build, check, measure."""
    import torch.distributed as dist

    job = Job.of(request)
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    check_steps = request.get("check_steps", 3)
    losses = {name: clock.mean_losses(trainer, check_steps) for name, trainer in trainers.items()}
    if simulation is None:  # in a simulated world layouts differ in what they repeat, so losses do
        compared = {name: curve for name, curve in losses.items() if SYSTEMS[name].communicates}
        differ = compare_losses(compared, TOLERANCE[job.precision] * (1 if job.optimizer == "adamw" else 10))
        skipped.update(differ)
        for name in differ:
            del trainers[name]
    if not trainers:
        raise RuntimeError(f"no system is left to measure: {skipped}")
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    free: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    calibration: list[float] = []
    for names in in_turns(list(trainers), request["rounds"]):
        if calibration and clock.elapsed() > request.get("seconds", float("inf")):
            break
        calibration.append(clock.calibrate())
        for name in names:
            samples[name].append(clock.measure(trainers[name], request["steps"]))
            if simulation is not None:
                with no_delay(simulation):
                    free[name].append(clock.measure(trainers[name], request["steps"]))
    return {
        "workload": describe(job.workload),
        "ranks": dist.get_world_size(),
        "simulate": request.get("simulate"),
        "device": job.device,
        "optimizer": job.optimizer,
        "precision": job.precision,
        "losses": losses,
        "skipped": skipped,
        "samples": samples,
        "free": free,
        "calibration": calibration,
    }


@contextmanager
def no_delay(simulation: Any) -> Iterator[None]:
    """A simulated network that takes no time: what a step is without waiting for it."""
    from ragged_shard.testing import Network

    network, simulation.network = simulation.network, Network()
    try:
        yield
    finally:
        simulation.network = network


def compare_losses(losses: dict[str, list[float]], tolerance: float) -> dict[str, str]:
    """Who differs from the first system, the reference, by more than `tolerance` of the loss, and how."""
    differ = {}
    for name, curve in losses.items():
        reference, expected = next(iter(losses.items()))
        gap = max(abs(a - b) / abs(b) for a, b in zip(curve, expected, strict=True))
        if not gap <= tolerance:
            differ[name] = f"its losses {curve} differ from {reference}'s {expected}"
    return differ
