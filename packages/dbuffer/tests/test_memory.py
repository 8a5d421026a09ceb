"""How much memory there is, when and where; views outlive its absence.

A CPU with an index stands for another device: its memory is the same, data take the way of offloaded shards.
"""

import ctypes
import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import (
    LAYOUTS,
    assert_locals_equal,
    assert_views_equal,
    can_swap,
    fill_views,
    full_tensors,
    load,
    make,
    mesh_of,
    storage_bytes,
    zero,
)

from dbuffer import Gather, Recycler, ReduceScatter
from dbuffer.encodings import BlockInt8, BlocksOnWire, CastReduction
from dbuffer.memory import huge_pages
from ragged_shard import RaggedDTensor
from ragged_shard.testing import on_ranks, record_collectives, run_ranks


@pytest.mark.parametrize("layout", ["planned", "split"])
@on_ranks(3)
def test_there_is_one_storage_per_segment_and_role_and_release_leaves_zero_bytes(layout):
    buffer = make(layout)
    Gather([buffer]).start().wait()
    sizes = [segment.shard_size for segment in buffer.layout.segments]
    views = {view.untyped_storage()._cdata for view in buffer.views.values()}
    local_views = {view.untyped_storage()._cdata for view in buffer.local_views.values()}
    ranks = dist.get_world_size()
    assert len(views) == len(local_views) == len(sizes)
    assert storage_bytes(buffer.shard) == 4 * sum(sizes) == storage_bytes(buffer.local_views.values())
    assert storage_bytes(buffer.full) == 4 * ranks * sum(sizes) == storage_bytes(buffer.views.values())
    buffer.release()
    assert storage_bytes(buffer.empty_views.values()) == 0


@on_ranks(2)
def test_views_are_the_same_objects_and_valid_after_every_gather():
    buffer, tensors = make(full_dtype=torch.bfloat16), full_tensors()
    views = dict(buffer.empty_views)
    for seed in range(3):
        tensors = full_tensors(seed)
        load(buffer, tensors)
        Gather([buffer]).start().wait()
        assert_views_equal(buffer, tensors)
        assert all(buffer.views[name] is view for name, view in views.items())
        buffer.release()


@pytest.mark.parametrize("full_dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_what_autograd_saved_is_valid_again_after_release_and_gather(full_dtype):
    buffer = make(full_dtype=full_dtype)
    tensors = full_tensors()
    load(buffer, tensors)
    weight = torch.nn.Parameter(buffer.empty_views["weight"])
    x = torch.ones(2, 6, dtype=full_dtype, device=buffer.device, requires_grad=True)
    Gather([buffer]).start().wait()
    y = torch.nn.functional.linear(x, weight).sum()
    buffer.release()
    other = make(full_dtype=full_dtype)  # of the same size, so it takes the memory and writes it
    Gather([other]).start().wait()
    other.full[0].fill_(99.0)
    Gather([buffer]).start().wait()
    y.backward()
    want = tensors["weight"].sum(0).expand(2, 6).to(x)
    torch.testing.assert_close(x.grad, want, rtol=0, atol=0)


def walk(layout, depth, full_dtype, num_groups=5, steps=3):
    """Gather, compute, release over equal groups, `depth` of them gathered ahead; the most bytes alive at any time."""
    recycler = Recycler("cpu")
    mesh = mesh_of()
    groups = [make(layout, mesh=mesh, full_dtype=full_dtype, recycler=recycler) for _ in range(num_groups)]
    shards = sum(storage_bytes(group.shard) for group in groups)
    peak, after_first = 0, None
    for _ in range(steps):
        handles = {}
        for index, group in enumerate(groups):
            for ahead in range(index, min(index + depth + 1, num_groups)):
                if ahead not in handles:
                    handles[ahead] = Gather([groups[ahead]]).start()
            handles[index].wait()
            gathered = storage_bytes(view for g in groups for view in g.empty_views.values())
            stats = recycler.stats
            assert gathered == stats.lent_bytes
            peak = max(peak, shards + gathered + stats.parked_bytes)
            group.release()
        after_first = after_first or recycler.stats
    sizes = [segment.shard_size for segment in groups[0].layout.segments]
    one = dist.get_world_size() * sum(sizes) * full_dtype.itemsize
    return peak, shards + recycler.stats.peak_bytes, shards, one, after_first, recycler.stats, len(sizes)


@pytest.mark.parametrize("layout", ["planned", "split"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("full_dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_a_walk_is_shards_and_prefetch_depth_plus_one_gathered_buffers(layout, depth, full_dtype):
    for peak, recorded, shards, one, *_ in run_ranks(2, walk, layout, depth, full_dtype):
        assert peak == recorded == shards + (depth + 1) * one


@can_swap
def test_after_the_first_step_nothing_is_allocated():
    *_, first, last, num_segments = run_ranks(3, walk, "planned", 1, torch.bfloat16)[0]
    assert first.allocations == last.allocations == 2 * num_segments


class Small(Recycler):
    """Has memory for so many storages more."""

    left = 1000

    def allocate(self, storage, nbytes):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("on purpose")
        super().allocate(storage, nbytes)


@can_swap
@pytest.mark.parametrize("wire", [None, BlocksOnWire(BlockInt8(64))])
@on_ranks(2)
def test_a_gather_that_runs_out_of_memory_gives_it_back_and_can_be_tried_again(wire):
    recycler, tensors = Small("cpu"), full_tensors()
    options = {"align": 16, "wire": wire, "recycler": recycler}
    specs = [make("split", full_dtype=torch.bfloat16, **options) for _ in range(2)]
    gather = Gather([load(buffer, tensors) for buffer in specs])
    for room in range(1000):
        recycler.left = room
        try:
            handle = gather.start()
        except torch.OutOfMemoryError:
            assert recycler.stats.lent_bytes == recycler.stats.quarantined_bytes == 0
            continue
        break
    assert room >= 4  # segments
    handle.wait()
    assert not any(buffer.retired for buffer in specs)
    if wire is None:
        for buffer in specs:
            assert_views_equal(buffer, tensors)


@can_swap
@on_ranks(2)
def test_a_reduction_without_memory_keeps_its_gradients_and_can_be_tried_again():
    recycler, tensors = Small("cpu"), full_tensors()
    buffers = [make(recycler=recycler, reduction=CastReduction()) for _ in range(2)]
    for buffer in buffers:
        fill_views(buffer, tensors)
    before, reduction = recycler.stats.lent_bytes, ReduceScatter(buffers)
    for room in range(2):  # for what is received and what is sent
        recycler.left = room
        with pytest.raises(torch.OutOfMemoryError):
            reduction.start()
        assert recycler.stats.lent_bytes == before
    recycler.left = 2
    reduction.start().wait()
    for buffer in buffers:
        assert_locals_equal(buffer, tensors)


@on_ranks(1)
def test_one_rank_with_one_dtype_has_one_memory_unless_told_otherwise():
    buffer = make()
    assert buffer.aliased
    tensors = full_tensors()
    load(buffer, tensors)
    Gather([buffer]).start().wait()
    assert_views_equal(buffer, tensors)
    assert buffer.full[0].data_ptr() == buffer.shard[0].data_ptr()
    buffer.views["bias"].fill_(7.0)
    assert buffer.local_views["bias"].eq(7.0).all()
    buffer.release()
    assert storage_bytes(buffer.shard) > 0
    separate = make(alias=False)
    load(separate, tensors)
    Gather([separate]).start().wait()
    assert_views_equal(separate, tensors)
    assert separate.full[0].data_ptr() != separate.shard[0].data_ptr()


@can_swap
def test_threads_share_a_recycler_and_get_memory_of_the_size_that_they_ask_for():
    recycler, problems = Recycler("cpu"), []

    def work(number: int) -> None:
        storages = [torch.UntypedStorage(0) for _ in range(4)]
        try:
            for step in range(1000):
                for storage in storages:
                    recycler.allocate(storage, 64 * (1 + (number + step) % 3))
                assert {storage.nbytes() for storage in storages} == {64 * (1 + (number + step) % 3)}
                for storage in storages:
                    recycler.recycle(storage)
                if step % 20 == 0:
                    recycler.trim()
        except Exception as error:
            problems.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not problems
    assert recycler.stats.lent_bytes == 0


class Watching(Recycler):
    """Fills parked blocks with a pattern, which must still be there when they are used again or given back."""

    def __init__(self, device):
        super().__init__(device)
        self.parked = {}

    def recycle(self, storage):
        address, size = storage.data_ptr(), storage.nbytes()
        super().recycle(storage)
        ctypes.memset(address, 0xA5, size)
        self.parked[address] = size

    def allocate(self, storage, nbytes):
        super().allocate(storage, nbytes)
        self.check(storage.data_ptr())

    def trim(self):
        for address in list(self.parked):
            self.check(address)
        super().trim()

    def check(self, address):
        size = self.parked.pop(address, 0)
        assert ctypes.string_at(address, size) == b"\xa5" * size


@can_swap
@pytest.mark.parametrize("transport", ["collectives", "peer_memory"])
@on_ranks(3)
def test_released_memory_is_not_written_to(transport):
    recycler, mesh = Watching("cpu"), mesh_of()
    buffers = [
        make(mesh=mesh, full_dtype=torch.bfloat16, transport=transport, recycler=recycler) for _ in range(3)
    ]
    gather, reduce = Gather(buffers[:2]), ReduceScatter(buffers[2:], op="sum")
    for _ in range(3):
        gather.start().wait()
        buffers[2].materialize()
        fill_views(buffers[2], full_tensors())
        reduce.start().wait()
        for buffer in buffers:
            buffer.release()
    recycler.trim()


def test_memory_of_a_storage_that_died_while_lent_is_not_counted():
    recycler, storage = Recycler("cpu"), torch.UntypedStorage(0)
    recycler.allocate(storage, 4096)
    assert recycler.stats.lent_bytes == 4096
    del storage
    gc.collect()
    assert recycler.stats.lent_bytes == 0


@on_ranks(3)
def test_a_shard_given_away_belongs_to_those_who_hold_it():
    buffer = make("split", dtype=torch.float32, full_dtype=torch.bfloat16)
    fill_views(buffer, full_tensors())
    ReduceScatter([buffer], op="sum").start().wait()
    name = next(name for name, view in buffer.local_views.items() if view.numel())
    kept = buffer.local_views[name]
    values = kept.clone()
    buffer.give_shard()
    for what in ("shard", "local_views"):
        with pytest.raises(RuntimeError, match=f"{what} after give_shard; call new_shard first"):
            getattr(buffer, what)
    buffer.new_shard()
    fill_views(buffer, full_tensors(seed=5))
    ReduceScatter([buffer], op="sum").start().wait()
    assert torch.equal(kept, values)  # the memory given away is not the buffer's any more
    assert buffer.local_views[name].data_ptr() != kept.data_ptr()
    assert_locals_equal(buffer, {n: 3 * value for n, value in full_tensors(seed=5).items()})
    buffer.release()


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@on_ranks("shape")
def test_ragged_tensors_are_the_shard_itself(shape):
    """An optimizer step on the ragged tensors is in the next gather, with nothing copied back."""
    buffer = make(mesh=mesh_of(*shape))
    load(buffer, full_tensors())
    with record_collectives() as record:
        tensors = buffer.ragged_tensors(requires_grad=True)
    assert record.kinds == []
    shards = {shard.untyped_storage().data_ptr() for shard in buffer.shard}
    for name, tensor in tensors.items():
        assert isinstance(tensor, RaggedDTensor)
        assert tuple(tensor.shape) == tuple(buffer.layout.spec(name).shape)
        assert tensor.to_local().untyped_storage().data_ptr() in shards
        tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD(tensors.values(), lr=1.0).step()
    Gather([buffer]).start().wait()
    for name, want in full_tensors().items():
        assert buffer.views[name].equal(want - 1), name
        assert tensors[name].full_tensor().equal(want - 1), name


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no transparent huge pages",
)
def test_the_kernel_has_noted_that_large_memory_of_a_recycler_wants_huge_pages():
    recycler, storage = Recycler("cpu"), torch.UntypedStorage(0)
    recycler.allocate(storage, 4 * huge_pages.SMALLEST)
    assert "hg" in _flags_of(storage.data_ptr() + huge_pages.SMALLEST)


def _flags_of(address):
    """The flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_shards_on_another_device_gather_and_reduce_the_same_values(world_size, layout):
    tensors, each = full_tensors(), [full_tensors(seed=r + 1) for r in range(world_size)]
    total = {name: sum(one[name] for one in each) for name in tensors}
    for dtype, full_dtype in PAIRS:
        buffer = make(layout, dtype=dtype, full_dtype=full_dtype, shard_device="cpu:0")
        assert buffer.offloaded
        assert not buffer.aliased
        load(buffer, tensors)
        Gather([buffer]).start().wait()
        assert_views_equal(buffer, tensors)
        for times, accumulate in ((1, False), (2, True)):
            fill_views(buffer, each[dist.get_rank()])
            ReduceScatter([buffer], op="sum", divide=2).start(accumulate=accumulate).wait()
            assert_locals_equal(buffer, {name: t * times / 2 for name, t in total.items()})
        buffer.release()


def shrink_and_gather(layout, dtype, full_dtype, size):
    buffer = make(layout, dtype=dtype, full_dtype=full_dtype)
    tensors = full_tensors()
    load(buffer, tensors)
    groups = [
        dist.new_group([*range(first, first + size)]) for first in range(0, dist.get_world_size(), size)
    ]
    group = groups[dist.get_rank() // size]
    Gather([buffer]).start().wait()
    buffer.shrink(group)
    assert not buffer.gathered.present
    zero(buffer.shard)  # what was kept is what comes back, not the shards
    with record_collectives() as record:
        Gather([buffer]).start().wait()
    assert_views_equal(buffer, tensors)
    sent = sum(shard.numel() for shard in buffer.full) * full_dtype.itemsize * (size - 1) / size
    assert record.bytes_sent == sent
    buffer.release()
    Gather([buffer]).start().wait()  # kept for one gather only
    assert all(not view.any() for view in buffer.views.values())
    buffer.shrink(group)
    load(buffer, tensors)
    buffer.forget_neighbors()
    Gather([buffer]).start().wait()
    assert_views_equal(buffer, tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shrunk_buffer_is_gathered_again_among_few_ranks(layout):
    for dtype, full_dtype in PAIRS:
        run_ranks(4, shrink_and_gather, layout, dtype, full_dtype, 2)


@on_ranks(3)
def test_a_group_whose_size_does_not_divide_is_refused():
    buffer = make("planned")
    buffer.materialize()
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match="cannot shrink to 2 ranks, which does not divide 3"):
            buffer.shrink(pair)
