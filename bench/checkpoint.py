"""How long a checkpoint takes, ours beside FSDP2's and DDP's.

python -m bench checkpoint     torch.distributed.checkpoint, save and load in turns; writes results/checkpoint.json

Checkpoints: each rank writes its part into one folder (in memory, /dev/shm, where there is one, so that no disk is
measured) and loads it back into the same world.
"""

import shutil
import statistics
import tempfile
import time
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_states

from . import measure
from .compare import Clock, build_all, noise_of
from .measure import launch, mib, options_of, record, table_of
from .systems import SYSTEMS, Job, Trainer, left_out

COMPARED = ["ddp", "ours", "fsdp2"]


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: build, train a little, then save and load in turns."""
    job = Job.of(request)
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    for trainer in trainers.values():
        clock.mean_losses(trainer, 2)
    samples, calibration = clock.samples(trainers, request["rounds"], partial(_save_and_load, clock=clock))
    about = {"workload": job.workload.name, "ranks": dist.get_world_size(), "skipped": skipped}
    return {**about, "samples": samples, "calibration": calibration}


def _save_and_load(trainer: Trainer, clock: Clock) -> dict[str, float]:
    folder = [tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)]
    dist.broadcast_object_list(folder)
    try:
        dist.barrier()
        before, cpu, start = measure.CpuTimes.now(), time.process_time(), time.perf_counter()
        model, optimizer = dcp_states.get_state_dict(trainer.module, trainer.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        dist.barrier()
        saved = time.perf_counter()
        model, optimizer = dcp_states.get_state_dict(trainer.module, trainer.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        dcp_states.set_state_dict(
            trainer.module, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        dist.barrier()
        loaded, foreign = time.perf_counter(), before.foreign(clock.sum(time.process_time() - cpu))
        size = sum(path.stat().st_size for path in Path(folder[0]).rglob("*") if path.is_file())
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return {"save": saved - start, "load": loaded - saved, "foreign": foreign, "bytes": size}


def tables(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's table."""
    rows = []
    for name, times in raw["samples"].items():
        saving, loading = (1e3 * statistics.median(s[key] for s in times) for key in ("save", "load"))
        varied = measure.spread([s["save"] for s in times])
        size = mib(times[-1]["bytes"])
        rows.append([SYSTEMS[name].label, f"{saving:.0f}", f"{loading:.0f}", size, f"{varied:.0%}"])
    text = f"{raw['workload']}, {raw['ranks']} ranks, model and AdamW state." + left_out(raw["skipped"])
    return [table_of("Checkpoints", text, "system; save ms; load ms; MiB on disk; spread", rows)]


def main_checkpoint(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    o = options_of(parser, arguments, workload="dense", ranks=2, rounds=5, keep_noisy=False)
    before = measure.busy_share()
    raw = launch(run, o.ranks, {"workload": o.workload, "systems": COMPARED, "rounds": o.rounds})
    return record("checkpoint", tables(raw), noise_of(before, raw), keep_noisy=o.keep_noisy, **raw)
