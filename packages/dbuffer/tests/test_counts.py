"""What a gather and a reduction do beside the collective, counted op by op.

gloo stages what it reduces and copies the result out in `Work.wait`; that is the backend's own, so the
spy looks away there.
"""

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import can_swap, make, mesh_of, zero
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dbuffer import DBuffer, Gather, Recycler, ReduceScatter
from layout_planner import TensorSpec, plan
from ragged_shard.testing import on_ranks, run_ranks


class Spy(TorchDispatchMode):
    """Records ops, apart from collectives, and the bytes that they write without being views."""

    def __init__(self):
        super().__init__()
        self.ops, self.bytes_written = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace != "c10d":
            self.ops.append(func._schema.name)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.is_write:
                    self.bytes_written += _nbytes(value)
            self.bytes_written += _nbytes((kwargs or {}).get("out"))
            written = any(argument.is_write for argument in func._schema.arguments)
            viewed = any(returned.alias_info for returned in func._schema.returns)
            if not written and not viewed:
                self.bytes_written += _nbytes(result)
        return result


class Unseen:
    """A collective's work, its own ops hidden from the spy."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        with _disable_current_modes():
            self.work.wait()


def wait(handle):
    if handle._work is not None:
        handle._work = Unseen(handle._work)
    handle.wait()


def _nbytes(value):
    return sum(t.numel() * t.itemsize for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def count(layout, dtype, full_dtype):
    """`(ops, bytes)` of one gather and of one reduction, and this rank's shard bytes in both dtypes."""
    buffer = make(layout, dtype=dtype, full_dtype=full_dtype)
    with Spy() as gathering:
        wait(Gather([buffer]).start())
    zero(buffer.full)  # the gradients are in the buffer
    with Spy() as reducing:
        wait(ReduceScatter([buffer], op="avg").start())
    gaps = sum(gap.numel() * gap.itemsize for gap in buffer.shard_memory.gaps)
    elements = sum(shard.numel() for shard in buffer.shard)
    return (gathering.ops, gathering.bytes_written), (reducing.ops, reducing.bytes_written - gaps), elements


@pytest.mark.parametrize("layout", ["planned", "split"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_copy_nothing_in_fp32_and_write_the_shard_once_with_a_cast(world_size, layout):
    for gathering, (ops, written), _ in run_ranks(world_size, count, layout, torch.float32, torch.float32):
        assert gathering == ([], 0)
        assert written == 0
        assert set(ops) <= {"aten::zero_", "aten::_foreach_zero_"}  # of padding
    for gathering, (_, written), elements in run_ranks(
        world_size, count, layout, torch.float32, torch.bfloat16
    ):
        assert gathering == (["aten::copy_" if layout == "planned" else "aten::_foreach_copy_"], elements * 2)
        assert written == elements * 4 or layout == "split"


def ops_with(num_tensors):
    specs = [TensorSpec(f"t{i}", (8, 3)) for i in range(num_tensors)]
    mesh = mesh_of()
    layout, recycler = plan(specs, mesh.size()), Recycler("cpu")  # not the debug one, which fills memory
    buffer = DBuffer(layout, mesh, dtype=torch.float32, full_dtype=torch.bfloat16, recycler=recycler)
    with Spy() as spy:
        wait(Gather([buffer]).start())
        wait(ReduceScatter([buffer]).start())
        buffer.release()
    return sorted(spy.ops)


def test_the_number_of_ops_does_not_grow_with_the_number_of_tensors():
    few, many = run_ranks(2, ops_with, 2)[0], run_ranks(2, ops_with, 60)[0]
    assert few == many
    assert len(few) <= 4


@can_swap  # else gathers are copied
@on_ranks(3)
def test_a_gather_through_peer_memory_copies_one_shard_and_a_reduction_nothing():
    """`(ops, bytes)` of a large gather and of a large reduction, those of the transport included."""
    layout = plan([TensorSpec("w", (1 << 10, 1 << 10))], dist.get_world_size())
    buffer = DBuffer(layout, mesh_of(), dtype=torch.float32, transport="peer_memory")
    Gather([buffer]).start().wait()  # connects
    with Spy() as gathering:
        Gather([buffer]).start().wait()
    with Spy() as reducing:
        ReduceScatter([buffer], op="avg").start().wait()
    padding = sum(gap.nbytes for gap in buffer.shard_memory.gaps)
    assert gathering.bytes_written == buffer.shard[0].nbytes
    assert reducing.bytes_written == padding  # its thread adds up, in a piece of memory that it keeps
    assert not [op for op in reducing.ops if "add" in op]
