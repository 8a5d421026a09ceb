"""A worker's process group: real ranks, or one process that stands for rank 0 of a simulated world."""

import os
from collections.abc import Callable
from typing import Any

from .launch import read_request, write_answer


def run_worker(run: Callable[[dict[str, Any]], Any]) -> None:
    """Read the request, connect, run, and write rank 0's answer.

    The request's `device` is "cpu" (gloo) or "cuda" (NCCL); with `simulate` = {"ranks", "bandwidth", "latency"} it is
    a simulated world of that size on that device.
    """
    import torch
    import torch.distributed as dist

    request = read_request()
    torch.set_num_threads(1)
    device = request.get("device", "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if simulate := request.get("simulate"):
        from .simulated_group import Wire, connect

        wire = Wire(simulate["bandwidth"], simulate.get("latency", 0.0))
        connect(simulate["ranks"], device, wire)
    else:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        answer = run(request)
        if dist.get_rank() == 0:
            write_answer(answer)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def all_gather(whole: Any, own: Any) -> None:
    """Gather equal parts, under the name that this release of torch has for it."""
    import torch.distributed as dist

    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, own)


def reduce_scatter(own: Any, whole: Any) -> None:
    """Reduce into equal parts, under the name that this release of torch has for it."""
    import torch.distributed as dist

    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(own, whole)


def job_of(request: dict[str, Any]) -> Any:
    """The job that a request describes, on a mesh over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from .systems import Job
    from .workloads import WORKLOADS

    device = request.get("device", "cpu")
    return Job(
        workload=WORKLOADS[request["workload"]],
        mesh=init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",)),
        device=device,
        optimizer=request.get("optimizer", "adamw"),
        precision=request.get("precision", "float32"),
        options=request.get("options", {}),
    )
