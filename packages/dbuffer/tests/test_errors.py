"""Wrong use raises, on every rank, with names and the way out."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import make
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Gather
from ragged_shard.testing import on_ranks


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_a_buffer_with_a_collective_under_way_refuses_until_it_is_waited_for(world_size):
    buffer = make(full_dtype=torch.bfloat16)
    handle = Gather([buffer]).start()
    assert buffer.in_flight is handle
    for act in (buffer.release, Gather([buffer]).start, buffer.forget_neighbors):
        with pytest.raises(RuntimeError, match="under way; call wait"):
            act()
    states = [handle.completed]
    handle.wait()
    handle.wait()
    assert [*states, handle.completed] == [False, True]
    busy = [buffer.in_flight]
    buffer.wait()
    Gather([buffer]).start()
    buffer.wait()
    assert [*busy, buffer.in_flight] == [None, None]
    buffer.release()
    buffer.release()


@on_ranks(2)
def test_a_collective_that_fails_says_which_and_of_which_buffers_each_time():
    group = dist.new_group(timeout=timedelta(seconds=2))  # its own, so that what breaks is not used again
    mesh = DeviceMesh.from_group(group, "cpu")
    buffers = [make(mesh=mesh, name=name) for name in ("layers.7", "layers.8")]
    if dist.get_rank() == 1:
        return
    handle = Gather(buffers).start()
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"all_gather of layers\.7, layers\.8 failed") as caught:
            handle.wait()
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert not handle.completed
    for buffer in buffers:
        buffer.release()
