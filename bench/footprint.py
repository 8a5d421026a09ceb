"""Worker: one system alone in fresh processes, for peak memory. Started by `launch`, once for each system.

    idle      resident memory with torch and the process group up, before any model
    start     peak since the process began: building the whole model and wrapping it included
    steady    peak over the last steps alone (the kernel's counter is reset after the first ones)

All in bytes, the most of any rank. On CUDA also what torch's allocator reserved and allocated at most.
"""

import gc
import os
from typing import Any

from . import machine
from .launch import read_request, write_answer


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
        answer = run(request, device)
        if dist.get_rank() == 0:
            write_answer(answer)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(request: dict[str, Any], device: str) -> dict[str, Any]:
    """Build, step, look."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from .rounds import Clock
    from .systems import Job, build, why_not
    from .workloads import WORKLOADS

    job = Job(
        workload=WORKLOADS[request["workload"]],
        mesh=init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",)),
        device=device,
        optimizer=request.get("optimizer", "adamw"),
        precision=request.get("precision", "float32"),
    )
    if reason := why_not(request["system"], job):
        return {"skipped": reason}
    found = {"idle": machine.rss()}
    trainer = build(request["system"], job)
    gc.collect()
    clock = Clock(job)
    for _ in range(2):
        clock.mean_loss(trainer)
    found["start"] = machine.peak_rss()
    machine.reset_peak_rss()
    for _ in range(request.get("steps", 3)):
        loss = clock.mean_loss(trainer)
    found["steady"] = machine.peak_rss()
    found["start"] = max(found["start"], found["steady"])
    if device == "cuda":
        found["cuda_reserved"] = torch.cuda.max_memory_reserved()
        found["cuda_allocated"] = torch.cuda.max_memory_allocated()
    values = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {"loss": loss, **{name: int(value) for name, value in zip(found, values, strict=True)}}


if __name__ == "__main__":
    main()
