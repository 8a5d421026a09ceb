"""Collectives and recycled memory on a simulated device, where an access without an order between streams raises."""

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import fill_views, full_tensors, load, make, mesh_of
from test_wire import Quantized

from dbuffer import AllReduce, Gather, Recycler, ReduceScatter, _torch_compat
from dbuffer.transport import Collectives, transport_of
from ragged_shard.device import device_layer
from ragged_shard.testing import SimulatedDevice, simulated_ranks

NBYTES = 1 << 10


@contextmanager
def device(name="cpu"):
    with SimulatedDevice(name) as found, simulated_ranks(4, rank=1):
        yield found
    assert found.accesses > 0, "nothing was checked"


def read(buffer):
    return [view.clone() for view in buffer.views.values()]


def bytes_in(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


class OwnStream(Collectives):
    """Works of the process group's own stream, as another transport may have."""

    def _is_queued(self, group, device):
        return False


@pytest.mark.parametrize("transport", ["collectives", OwnStream])
def test_collectives_on_another_stream_start_after_the_current_one(transport):
    with device() as found:
        side = found.new_stream()
        buffer = make(mesh=mesh_of(2, 2), transport=transport)
        load(buffer, full_tensors())
        Gather([buffer]).start(stream=side).wait()
        read(buffer)
        fill_views(buffer, full_tensors())
        ReduceScatter([buffer]).start(stream=side).wait()
        buffer.shard[0].mul_(2.0)
        AllReduce([buffer], op="sum").start(stream=side).wait()
        buffer.shard[0].mul_(2.0)


class Watched(Collectives):
    """Notes the stream on which each collective is started."""

    streams: ClassVar[list[str]] = []

    def _start(self, call, calls, **options):
        self.streams.append(device_layer("cpu").current_stream().name)
        return super()._start(call, calls, **options)


def test_a_collective_starts_on_the_stream_that_it_is_given():
    Watched.streams.clear()
    with device() as found:
        streams = [found.new_stream() for _ in range(3)]
        buffer = load(make(mesh=mesh_of(2, 2), transport=Watched), full_tensors())
        Gather([buffer]).start(stream=streams[0]).wait()
        ReduceScatter([buffer]).start(stream=streams[1]).wait()
        AllReduce([buffer]).start(stream=streams[2]).wait()
    assert Watched.streams == [stream.name for stream in streams]


def test_collectives_of_a_device_are_queued_on_the_current_stream_by_default():
    with device():
        group = mesh_of(4).get_group()
        pairs = [(torch.zeros(8), torch.ones(2)), (torch.zeros(4), torch.ones(1))]
        for count in (1, 2):
            assert transport_of(group, "auto").all_gather(pairs[:count], "x") is None
            work = transport_of(group, OwnStream).all_gather(pairs[:count], "x")
            assert work is not None
            work.wait()


@pytest.mark.parametrize("wire", [None, Quantized()], ids=["cast", "decoded"])
def test_every_stream_that_waits_for_a_gather_may_read(wire):
    with device() as found:
        options = {} if wire is None else {"wire": wire}
        buffer = make(mesh=mesh_of(4), align=16, full_dtype=torch.bfloat16, **options)
        load(buffer, full_tensors())
        handle = Gather([buffer]).start(stream=found.new_stream())
        handle.wait()
        other = found.new_stream()
        with found.on(other, ()):
            handle.wait()
            read(buffer)
        found.wait(found.record(other))


def test_memory_of_a_wire_forms_own_is_kept_until_it_was_decoded():
    with device() as found:
        stream = found.new_stream()
        buffer = make(mesh=mesh_of(4), align=16, full_dtype=torch.bfloat16, wire=Quantized())
        load(buffer, full_tensors())
        after = [found.record()]
        for _ in range(3):
            Gather([buffer]).start(stream=stream, after=after).wait()
            after = []  # the next gather waits for nothing of this stream's by itself


def test_slices_that_neighbors_keep_are_there_before_they_are_gathered():
    with device() as found:
        group = dist.new_group([0, 1])
        buffer = make(mesh=mesh_of(4), recycler=Recycler("cpu"))
        load(buffer, full_tensors())
        Gather([buffer]).start().wait()
        buffer.shrink(group)
        buffer.recycler.trim()  # new memory waits for no last use
        Gather([buffer]).start(stream=found.new_stream(), after=()).wait()
        read(buffer)


def test_memory_goes_back_after_its_last_use_where_storages_cannot_exchange_theirs(monkeypatch):
    monkeypatch.setattr(_torch_compat, "CAN_SWAP", False)
    with device() as found:
        buffer = make(mesh=mesh_of(4), recycler=Recycler("cpu"))
        load(buffer, full_tensors())
        Gather([buffer]).start(stream=found.new_stream()).wait()  # from whose pool the memory is
        read(buffer)
        buffer.release()


def test_dropped_memory_goes_back_to_its_pool_after_its_last_use():
    with device() as found:
        recycler, storage = Recycler("cpu"), torch.UntypedStorage(0)
        side = found.new_stream()
        with found.on(side):
            recycler.allocate(storage, NBYTES)
        found.wait(found.record(side))
        bytes_in(storage).zero_()
        recycler.drop(storage)
        with pytest.raises(KeyError):  # it is not lent any more
            recycler.drop(storage)
