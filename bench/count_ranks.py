"""Worker: the counts of `counts` on real ranks. Started by `launch`; rank 0's figures are answered."""

from .launch import read_request, write_answer


def main() -> None:
    """Do what the request says."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from .counting import count, outside
    from .systems import Job, why_not
    from .workloads import WORKLOADS

    request = read_request()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        job = Job(WORKLOADS[request["workload"]], mesh)
        figures = {}
        for name in request["systems"]:
            reason = why_not(name, job)
            found = (
                {"skipped": reason}
                if reason
                else outside(count(name, job, rank=dist.get_rank()), request["base"])
            )
            figures[name] = found
        if dist.get_rank() == 0:
            write_answer(figures)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
