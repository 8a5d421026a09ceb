# mypy: disable-error-code="call-arg, var-annotated, attr-defined, override, assignment"
"""Process groups whose backends were not named, or were named for each device, behave like those of plain gloo."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import fill_views, load, local_part, mesh_of

import dbuffer
from dbuffer import DBuffer
from dbuffer.transport import transport_of
from dbuffer.transport.peer.direct import MIN_BYTES
from layout_planner import Rows, TensorSpec, plan
from ragged_shard.testing import record_collectives, run_ranks


def two_dtypes_are_gathered(transport):
    """In one call: gloo garbles what it coalesces."""
    mesh, values = mesh_of(), torch.arange(32.0).view(8, 4)
    layout = plan([TensorSpec("w", (8, 4), Rows(1))], mesh.size())
    buffers = [DBuffer(layout, mesh, dtype=d, transport=transport) for d in (torch.bfloat16, torch.float32)]
    for factor, buffer in enumerate(buffers, 1):
        load(buffer, {"w": values * factor})
    dbuffer.Gather(buffers).start().wait()
    return all(
        buffer.views["w"].equal((values * factor).to(buffer.dtype))
        for factor, buffer in enumerate(buffers, 1)
    )


def two_buffers_are_reduced():
    mesh, values = mesh_of(), torch.arange(32.0).view(8, 4)
    layout = plan([TensorSpec("w", (8, 4), Rows(1))], mesh.size())
    buffers = [DBuffer(layout, mesh, dtype=torch.float32) for _ in range(2)]
    for factor, buffer in enumerate(buffers, 1):
        fill_views(buffer, {"w": values * factor})
    dbuffer.ReduceScatter(buffers, op="sum").start().wait()
    return all(
        buffer.local_views["w"].equal(local_part(buffer, "w", values * factor * 2))
        for factor, buffer in enumerate(buffers, 1)
    )


def one_byte_floats_are_gathered():
    mine = torch.full((16,), float(dist.get_rank() + 1)).to(torch.float8_e4m3fn)
    full = torch.zeros(32, dtype=torch.float8_e4m3fn)
    transport_of(dist.group.WORLD, "collectives").all_gather([(full, mine)], "x").wait()  # type: ignore[arg-type]
    return full.float().tolist() == [1.0] * 16 + [2.0] * 16


def large_exchanges_go_through_peer_memory():
    mine = torch.full((MIN_BYTES,), dist.get_rank(), dtype=torch.uint8)
    full = torch.zeros(2 * MIN_BYTES, dtype=torch.uint8)
    transport = transport_of(dist.group.WORLD, "peer_memory")  # type: ignore[arg-type]
    transport.all_gather([(full, mine)], "x").wait()  # connects
    with record_collectives() as record:
        transport.all_gather([(full, mine)], "x").wait()
    return full.chunk(2)[1].eq(1).all().item() and "all_gather" not in record.kinds


def in_a_world_of(backend, folder):
    """What of the above holds after `init_process_group(backend)`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        return {
            "two dtypes, collectives": two_dtypes_are_gathered("collectives"),
            "two dtypes, auto": two_dtypes_are_gathered("auto"),
            "one-byte floats": one_byte_floats_are_gathered(),
            "peer memory": large_exchanges_go_through_peer_memory(),
        }
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_gathers_are_right_and_direct_however_the_process_group_was_initialized(backend, tmp_path):
    for result in run_ranks(2, in_a_world_of, backend, str(tmp_path)):
        assert all(result.values()), result


class OfPython(dist.ProcessGroup):
    """A process group of a user's own, such as torchft's: it has calls of single tensors only, here on gloo."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo, self.calls = dist.ProcessGroupGloo(store, rank, size, timeout), Counter()
        self.allreduce = self.gloo.allreduce

    def getBackendName(self):
        return "of-python"

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def _allgather_base(self, output, sent, options):
        self.calls["all_gather"] += 1
        return self.gloo._allgather_base(output, sent, options)

    def _reduce_scatter_base(self, output, sent, options):
        self.calls["reduce_scatter"] += 1
        return self.gloo._reduce_scatter_base(output, sent, options)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # from torch 2.13 on


def on_a_python_process_group(folder):
    """Whether gathers and reductions of two buffers are right there, and the calls that they took."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if "of-python" not in dist.Backend.backend_list:
        dist.Backend.register_backend("of-python", OfPython, devices=["cpu"])
    dist.init_process_group(
        "of-python", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    try:
        return two_dtypes_are_gathered(None), two_buffers_are_reduced(), dict(dist.group.WORLD.calls)
    finally:
        dist.destroy_process_group()


def test_a_python_process_group_gets_one_call_for_each_buffer(tmp_path):
    for gathered, reduced, calls in run_ranks(2, on_a_python_process_group, str(tmp_path)):
        assert gathered
        assert reduced
        assert calls["all_gather"] == 2
        assert calls["reduce_scatter"] == 2
