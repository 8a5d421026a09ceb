"""Worker: saves and loads of each system in turns. Started by `launch`, see `checkpoint`."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from . import machine
from .ranks import job_of, run_worker


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Build, train a little, then save and load in turns."""
    import torch.distributed as dist

    from .rounds import Clock, build_all

    job = job_of(request)
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    for trainer in trainers.values():
        clock.mean_losses(trainer, 2)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    sizes: dict[str, int] = {}
    calibration = []
    for turn in range(request["rounds"]):
        calibration.append(clock.calibrate())
        names = list(trainers)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found, sizes[name] = _round_trip(trainers[name])
            samples[name].append(found)
    return {
        "workload": job.workload.name,
        "ranks": dist.get_world_size(),
        "samples": samples,
        "bytes": sizes,
        "skipped": skipped,
        "calibration": calibration,
    }


def _round_trip(trainer: Any) -> tuple[dict[str, float], int]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = [tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)]
    dist.broadcast_object_list(folder)
    try:
        dist.barrier()
        before, cpu, start = machine.CpuTimes.now(), time.process_time(), time.perf_counter()
        model, optimizer = get_state_dict(trainer.module, trainer.optimizers)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        dist.barrier()
        saved = time.perf_counter()
        model, optimizer = get_state_dict(trainer.module, trainer.optimizers)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        set_state_dict(trainer.module, trainer.optimizers, model_state_dict=model, optim_state_dict=optimizer)
        dist.barrier()
        loaded, after = time.perf_counter(), machine.CpuTimes.now()
        used = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
        dist.all_reduce(used)
        size = sum(path.stat().st_size for path in Path(folder[0]).rglob("*") if path.is_file())
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    foreign = (after.busy - before.busy - float(used)) / max(after.total - before.total, 1e-9)
    return {"save": saved - start, "load": loaded - saved, "foreign": max(foreign, 0.0)}, size


if __name__ == "__main__":
    run_worker(run)
