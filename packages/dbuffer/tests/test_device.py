"""On CPU streams and events mean nothing, and code written for them runs."""

import pytest
from dbuffer_helpers import assert_views_equal, full_tensors, load, make

from dbuffer import Gather, Recycler, device_layer, shared_recycler
from ragged_shard.testing import on_ranks


@on_ranks(2)
def test_collectives_take_streams_and_events_on_cpu():
    buffer, tensors = make(), full_tensors()
    layer = buffer.layer
    stream = layer.new_stream()
    assert stream is layer.current_stream() is None
    load(buffer, tensors)
    handle = Gather([buffer]).start(stream=stream, after=[layer.record()])
    with layer.on(stream):
        handle.wait()
    layer.wait(layer.record(stream), stream)
    layer.synchronize()
    assert_views_equal(buffer, tensors)


def test_a_device_that_is_neither_cpu_nor_the_accelerator_raises():
    with pytest.raises(ValueError, match="device meta: expected cpu or the accelerator of this machine"):
        device_layer("meta")


def test_one_recycler_of_the_process_serves_all_who_bring_none():
    assert shared_recycler("cpu") is shared_recycler("cpu")
    assert isinstance(shared_recycler("cpu"), Recycler)
