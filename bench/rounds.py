"""Worker: all systems in one process group, taking turns, each step cut into forward, backward and update.

Started by `launch`. Every rank builds every system from the same weights. Then

    check     the same batches through each: losses must agree, or the system is dropped and the difference reported
    rounds    in each round every system does some steps, in an order that rotates

Raw samples of rank 0 are answered; walls are taken between barriers, so they are the slowest rank's.
"""

import os
import statistics
import time
from typing import Any

from . import machine
from .launch import read_request, write_answer

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def main() -> None:
    """Do what the request says."""
    import torch
    import torch.distributed as dist

    request = read_request()
    torch.set_num_threads(1)
    device = request.get("device", "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        answer = run(request)
        if dist.get_rank() == 0:
            write_answer(answer)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Build, check, measure."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from .systems import Job
    from .workloads import WORKLOADS, describe

    device = request.get("device", "cpu")
    job = Job(
        workload=WORKLOADS[request["workload"]],
        mesh=init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",)),
        device=device,
        optimizer=request.get("optimizer", "adamw"),
        precision=request.get("precision", "float32"),
    )
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    losses, differ = check(trainers, clock, request.get("check_steps", 3))
    skipped.update(differ)
    for name in differ:
        del trainers[name]
    samples = {name: [] for name in trainers}
    calibration: list[float] = []
    for turn in range(request["rounds"]):
        calibration.append(machine.calibrate())
        names = list(trainers)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(clock.measure(trainers[name], request["steps"]))
    return {
        "workload": describe(job.workload),
        "ranks": dist.get_world_size(),
        "optimizer": job.optimizer,
        "precision": job.precision,
        "losses": losses,
        "skipped": skipped,
        "samples": samples,
        "calibration": calibration,
    }


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


def check(
    trainers: dict[str, Any], clock: "Clock", steps: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Losses of the first steps, averaged over ranks, and who differs from the first system, the reference."""
    losses = {name: [clock.mean_loss(trainer) for _ in range(steps)] for name, trainer in trainers.items()}
    tolerance = TOLERANCE[clock.job.precision] * (1 if clock.job.optimizer == "adamw" else 10)
    differ = {}
    reference = next(iter(losses), None)
    for name, found in losses.items():
        expected = losses[reference]
        gap = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        if not gap <= tolerance:
            differ[name] = f"its losses {found} differ from {reference}'s {expected}"
    return losses, differ


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
    main()
