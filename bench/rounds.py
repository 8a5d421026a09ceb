"""Worker: all systems in one process group, taking turns, each step cut into forward, backward and update.

Started by `launch`. Every rank builds every system from the same weights. Then

    check     the same batches through each: losses must agree, or the system is dropped and the difference reported
    rounds    in each round every system does some steps, in an order that rotates

In a simulated world each measurement is repeated with a wire that takes no time, so that what is exposed shows.
Raw samples of rank 0 are answered; walls are taken between barriers, so they are the slowest rank's.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import machine
from .ranks import job_of, run_worker

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Build, check, measure."""
    import torch.distributed as dist

    from .workloads import describe

    job = job_of(request)
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    losses = {
        name: clock.mean_losses(trainer, request.get("check_steps", 3)) for name, trainer in trainers.items()
    }
    if "simulate" not in request:  # in a simulated world layouts differ in what they repeat, so losses do
        differ = compare_losses(losses, TOLERANCE[job.precision] * (1 if job.optimizer == "adamw" else 10))
        skipped.update(differ)
        for name in differ:
            del trainers[name]
    if not trainers:
        raise RuntimeError(f"no system is left to measure: {skipped}")
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    free: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    calibration: list[float] = []
    for turn in range(request["rounds"]):
        calibration.append(clock.calibrate())
        names = list(trainers)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(clock.measure(trainers[name], request["steps"]))
            if "simulate" in request:
                with no_delay():
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
def no_delay() -> Iterator[None]:
    """A simulated wire that takes no time: what a step is without waiting for it."""
    from .simulated_group import SimulatedGroup, Wire

    wire, SimulatedGroup.wire = SimulatedGroup.wire, Wire(None)
    try:
        yield
    finally:
        SimulatedGroup.wire = wire


def build_all(names: list[str], job: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Trainers by name, and for the others why not."""
    from .systems import build, why_not

    trainers, skipped = {}, {}
    for name in names:
        if reason := why_not(name, job):
            skipped[name] = reason
            continue
        try:
            trainers[name] = build(name, job)
        except Exception as error:  # a peer that does not work here must not cost the others their figures
            skipped[name] = f"{type(error).__name__}: {error}"
    return trainers, skipped


def compare_losses(losses: dict[str, list[float]], tolerance: float) -> dict[str, str]:
    """Who differs from the first system, the reference, by more than `tolerance` of the loss, and how."""
    differ = {}
    reference = next(iter(losses), None)
    for name, found in losses.items():
        expected = losses[reference]
        gap = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        if not gap <= tolerance:
            differ[name] = f"its losses {found} differ from {reference}'s {expected}"
    return differ


class Clock:
    """Steps a trainer and times it. Each system sees the same sequence of batches."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self._done: dict[str, int] = {}

    def batch(self, trainer: Any) -> Any:
        """The next batch of this rank for this system."""
        import torch.distributed as dist

        from .workloads import batch_of

        step = self._done.get(trainer.name, 0)
        self._done[trainer.name] = step + 1
        return batch_of(self.job.workload, step, dist.get_rank(), self.job.device)

    def calibrate(self) -> float:
        """Rank 0's fixed loop while the others wait: four ranks on two cores would only measure each other."""
        import torch.distributed as dist

        dist.barrier()
        seconds = machine.calibrate() if dist.get_rank() == 0 else 0.0
        dist.barrier()
        return seconds

    def mean_losses(self, trainer: Any, steps: int) -> list[float]:
        """So many steps; each one's loss, averaged over ranks."""
        return [self.mean_loss(trainer) for _ in range(steps)]

    def mean_loss(self, trainer: Any) -> float:
        """One step; the mean of the ranks' losses."""
        import torch
        import torch.distributed as dist

        loss = torch.tensor(trainer.step(self.batch(trainer)), dtype=torch.float64, device=self.job.device)
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    def measure(self, trainer: Any, steps: int) -> dict[str, float]:
        """Seconds a step: wall, CPU of this rank, and the three parts; and others' share of the CPUs."""
        import torch.distributed as dist

        batches = [self.batch(trainer) for _ in range(steps)]
        parts: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        self._synchronize()
        dist.barrier()
        before, cpu, start = machine.CpuTimes.now(), time.process_time(), time.perf_counter()
        for batch in batches:
            marks = [time.perf_counter()]
            loss = trainer.forward(batch)
            marks.append(self._mark())
            trainer.backward(loss)
            marks.append(self._mark())
            trainer.update()
            marks.append(self._mark())
            for name, begin, end in zip(parts, marks, marks[1:], strict=False):
                parts[name].append(end - begin)
        self._synchronize()
        dist.barrier()
        wall, cpu, after = time.perf_counter() - start, time.process_time() - cpu, machine.CpuTimes.now()
        ranks_cpu = self._sum(cpu)
        foreign = (after.busy - before.busy - ranks_cpu) / max(after.total - before.total, 1e-9)
        means = {name: statistics.mean(values) for name, values in parts.items()}
        return {"wall": wall / steps, "cpu": cpu / steps, **means, "foreign": max(foreign, 0.0)}

    def _mark(self) -> float:
        self._synchronize()
        return time.perf_counter()

    def _synchronize(self) -> None:
        if self.job.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _sum(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        total = torch.tensor(value, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(total)
        return float(total)


if __name__ == "__main__":
    run_worker(run)
