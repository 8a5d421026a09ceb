"""Building several systems in the same ranks and timing their steps in turns."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from . import machine
from .systems import Job, Trainer, build, why_not
from .workloads import batch_of


def build_all(names: list[str], job: Job) -> tuple[dict[str, Trainer], dict[str, str]]:
    """Trainers by name, and for the others why not."""
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


def in_turns(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The names in each round, every time beginning with another one."""
    for turn in range(rounds):
        first = turn % len(names)
        yield names[first:] + names[:first]


class Clock:
    """Steps a trainer and times it. Each system sees the same sequence of batches."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._began = time.perf_counter()
        self._done: dict[str, int] = {}

    def batch(self, trainer: Trainer) -> Any:
        """The next batch of this rank for this system."""
        import torch.distributed as dist

        step = self._done.get(trainer.name, 0)
        self._done[trainer.name] = step + 1
        return batch_of(self.job.workload, step, dist.get_rank(), self.job.device)

    def elapsed(self) -> float:
        """Seconds since the start by rank 0's clock; the same on all ranks."""
        import torch.distributed as dist

        return self._sum(time.perf_counter() - self._began if dist.get_rank() == 0 else 0.0)

    def calibrate(self) -> float:
        """Rank 0's fixed loop while the others wait: four ranks on two cores would only measure each other."""
        import torch.distributed as dist

        dist.barrier()
        seconds = machine.calibrate() if dist.get_rank() == 0 else 0.0
        dist.barrier()
        return seconds

    def mean_losses(self, trainer: Trainer, steps: int) -> list[float]:
        """So many steps; each one's loss, averaged over ranks."""
        return [self.mean_loss(trainer) for _ in range(steps)]

    def mean_loss(self, trainer: Trainer) -> float:
        """One step; the mean of the ranks' losses."""
        import torch
        import torch.distributed as dist

        loss = torch.tensor(trainer.step(self.batch(trainer)), dtype=torch.float64, device=self.job.device)
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    def measure(self, trainer: Trainer, steps: int) -> dict[str, float]:
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
