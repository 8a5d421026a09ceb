"""Page-locked memory: exactly the bytes asked for, reused and unregistered only after the device's last use."""

import gc
import logging

import pytest
import torch

from ragged_shard import PinnedMemory, device_layer
from ragged_shard.testing import RaceError, SimulatedDevice

NUMEL = 1000  # 4000 bytes, which torch's allocator would round up to 4096


@pytest.fixture
def device():
    with SimulatedDevice("cpu:0") as found:
        yield found


@pytest.fixture
def copied(device):
    """Start copying a tensor to the device, on a stream that nobody waits for."""
    stream, kept = device.new_stream(), []

    def copy(tensor):
        with device.on(stream, ()):
            kept.append(torch.empty(NUMEL, device="cpu:0").copy_(tensor, non_blocking=True))

    yield copy
    device.wait(device.record(stream))


def test_exactly_the_bytes_needed_are_registered_and_the_memory_is_zero(device):
    memory = PinnedMemory(device, NUMEL, torch.float32)
    tensor = memory.zeros()
    assert device.registered == {tensor.data_ptr(): NUMEL * 4}
    assert tensor.untyped_storage().nbytes() == NUMEL * 4
    assert (tensor.dtype, tensor.shape, tensor.any().item()) == (torch.float32, (NUMEL,), False)
    assert tensor.data_ptr() % 4096 == 0


@pytest.mark.parametrize("first", ["the tensor", "the memory"])
def test_memory_is_unregistered_once_its_owner_and_its_last_view_are_gone(device, first):
    memory = PinnedMemory(device, NUMEL, torch.float32)
    view = memory.zeros()[10:20]
    held = {"the tensor": view, "the memory": memory}
    del memory, view
    held.pop(first)
    gc.collect()
    assert len(device.registered) == 1
    held.clear()
    gc.collect()
    assert not device.registered


def test_pages_serve_the_next_tensor_after_the_device_has_read_the_last(device, copied, monkeypatch):
    memory = PinnedMemory(device, NUMEL, torch.float32)
    first = memory.zeros()
    address = first.data_ptr()
    copied(first)
    del first
    second = memory.empty()
    assert second.data_ptr() == address
    second.fill_(1)
    copied(second)
    del second
    with monkeypatch.context() as patched:
        patched.setattr(device, "synchronize", lambda: None)
        with pytest.raises(RaceError, match="no order after the read"):
            memory.empty().fill_(2)
    device.synchronize()


def test_a_tensor_that_is_still_viewed_keeps_its_pages(device):
    memory = PinnedMemory(device, NUMEL, torch.float32)
    kept = memory.zeros()[:5]
    memory.empty().fill_(1)
    assert not kept.any()
    assert len(device.registered) == 2
    del kept
    gc.collect()
    assert len(device.registered) == 1


def test_a_device_that_refuses_gets_torchs_pinned_memory_and_one_line_in_the_log(device, monkeypatch, caplog):
    def refuse(address, nbytes):
        raise RuntimeError("error 2")

    monkeypatch.setattr(device, "register_memory", refuse)
    with caplog.at_level(logging.WARNING):
        tensors = [PinnedMemory(device, NUMEL, torch.float32).zeros() for _ in range(3)]
    assert all(device.block_of(tensor.untyped_storage()).pinned for tensor in tensors)
    assert [record.getMessage() for record in caplog.records] == [
        "cpu:0 does not register 4000 bytes of CPU memory (error 2); torch's pinned allocator may round up"
    ]


def test_a_device_without_registration_gets_torchs_pinned_memory(device, monkeypatch):
    monkeypatch.setattr(SimulatedDevice, "registers_memory", False)
    tensor = PinnedMemory(device, NUMEL, torch.float32).zeros()
    assert device.block_of(tensor.untyped_storage()).pinned
    assert not device.registered


def test_no_elements_need_no_pages(device):
    assert PinnedMemory(device, 0, torch.float32).zeros().shape == (0,)
    assert not device.registered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
def test_cuda_copies_from_registered_memory_without_blocking_and_reuses_it():
    layer = device_layer("cuda")
    memory = PinnedMemory(layer, NUMEL, torch.float32)
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    host = memory.zeros()
    assert host.is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    on_device = torch.arange(NUMEL, dtype=torch.float32, device="cuda")
    torch.cuda._sleep(200_000_000)
    host.copy_(on_device, non_blocking=True)
    event = layer.record()
    assert not layer.has_completed(event)  # the copy did not block
    address = host.data_ptr()
    del host
    again = memory.empty()
    assert again.data_ptr() == address
    assert layer.has_completed(event)  # the pages were not given out before
    assert torch.equal(again, on_device.cpu())
    del again, memory
    gc.collect()
    assert not torch.empty(NUMEL).is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
def test_a_refused_registration_leaves_no_error_behind_on_cuda():
    layer = device_layer("cuda")
    tensor = PinnedMemory(layer, NUMEL, torch.float32).zeros()
    with pytest.raises(RuntimeError, match="cudaHostRegister gave error"):
        layer.register_memory(tensor.data_ptr(), NUMEL * 4)  # registered already
    assert torch.ones(4, device="cuda").sum().item() == 4
