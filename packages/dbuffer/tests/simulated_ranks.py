"""SIMULATION: one process that stands for rank 0 of several, for tests of streams and memory on a single device.

Every other rank is taken to hold what this one holds, so a gather repeats this rank's shard and a sum is `size` times
its own part. The right number of bytes is moved, on a stream of the group's own, as NCCL does. Nothing is sent.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class SimulatedWork(dist.Work):
    def __init__(self, event):
        super().__init__()
        self.event = event

    def wait(self, timeout=None):
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return True


class SimulatedGroup(dist.ProcessGroup):
    """The collectives that buffers use."""

    def __init__(self, rank, size, device):
        super().__init__(rank, size)
        self.ranks = size
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def size(self):
        return self.ranks

    def getBackendName(self):
        return "simulated"

    @property
    def pg_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self):
        return self.pg_name

    def _run(self, pairs, move):
        if self.stream is None:
            for pair in pairs:
                move(*pair)
            return SimulatedWork(None)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for pair in pairs:
                move(*pair)
            event = torch.cuda.Event()
            event.record()
        return SimulatedWork(event)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        def move(receive, send):
            parts = receive.view(self.ranks, -1)
            parts[1:].copy_(send)
            if send.data_ptr() != receive.data_ptr():
                parts[0].copy_(send)

        return self._run(zip(outputs, inputs, strict=True), move)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        def move(receive, send):
            total = send.view(self.ranks, -1)[0]
            receive.copy_(total if opts.reduceOp == dist.ReduceOp.AVG else total * self.ranks)

        return self._run(zip(outputs, inputs, strict=True), move)

    def all_gather_single(self, output, sent, opts=None):
        return self.all_gather_single_coalesced([output], [sent])

    def reduce_scatter_single(self, output, sent, opts):
        return self.reduce_scatter_single_coalesced([output], [sent], opts)

    # The same under torch 2.11's names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


@contextmanager
def simulated_ranks(size, device):
    """A mesh of `size` ranks on "cpu" or "cuda", this process rank 0."""
    name = f"simulated_{device}"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            name, lambda store, rank, ranks, timeout: SimulatedGroup(rank, ranks, device), devices=[device]
        )
    dist.init_process_group(name, rank=0, world_size=size, store=dist.HashStore())
    try:
        yield init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()
