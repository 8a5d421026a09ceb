"""A worker: one system alone in fresh processes, for peak memory. Launched once for each system.

    idle      resident memory with torch and the process group up, before any model
    start     peak since the process began: building the whole model and wrapping it included
    steady    peak over the last steps alone (the kernel's counter is reset after the first ones)
    pss       after the last step: pages that ranks share, and each has, are divided among them

All in bytes, the most of any rank. On CUDA also what torch's allocator reserved and allocated at most.
"""

import gc
from typing import Any

from . import machine
from .clock import Clock
from .systems import Job, build, why_not


def run(request: dict[str, Any], simulation: Any = None) -> dict[str, Any]:
    """Build, step, look."""
    import torch
    import torch.distributed as dist

    job = Job.of(request)
    if reason := why_not(request["system"], job):
        return {"skipped": reason}
    rss = {"idle": machine.rss()}
    trainer = build(request["system"], job)
    gc.collect()
    clock = Clock(job)
    for _ in range(2):
        clock.mean_loss(trainer)
    rss["start"] = machine.peak_rss()
    machine.reset_peak_rss()
    for _ in range(request.get("steps", 3)):
        loss = clock.mean_loss(trainer)
    rss["steady"] = machine.peak_rss()
    rss["start"] = max(rss["start"], rss["steady"])
    rss["pss"] = machine.pss()
    if job.device == "cuda":
        rss["cuda_reserved"] = torch.cuda.max_memory_reserved()
        rss["cuda_allocated"] = torch.cuda.max_memory_allocated()
    values = torch.tensor(list(rss.values()), dtype=torch.float64, device=job.device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {"loss": loss, **{name: int(value) for name, value in zip(rss, values, strict=True)}}
