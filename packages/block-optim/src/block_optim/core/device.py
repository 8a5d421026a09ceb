"""Differences between a CPU and devices with asynchronous ops."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from ragged_shard import CPU, device_layer, is_cpu


class HostFuture(Protocol):
    """A small tensor that is being copied to the host."""

    def has_arrived(self) -> bool:
        """Whether `read` will not wait."""
        ...

    def read(self) -> torch.Tensor:
        """The tensor, on the host; waits for it."""
        ...


class _HostCopy:
    def __init__(self, value: torch.Tensor) -> None:
        self._host = torch.empty(value.shape, dtype=value.dtype, device=CPU, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._layer = device_layer(value.device)
        self._event = self._layer.record()

    def has_arrived(self) -> bool:
        return self._layer.has_completed(self._event)

    def read(self) -> torch.Tensor:
        self._layer.wait_on_host(self._event)
        return self._host


_stand_in: Callable[[torch.Tensor], HostFuture] | None = None


def runs_ahead(device: torch.device) -> bool:
    """Whether ops on this device are asynchronous, so that `.item()` synchronizes."""
    return not is_cpu(device) or _stand_in is not None


def is_capturing() -> bool:
    """Whether a CUDA graph captures the ops of this thread."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_accelerator(device: torch.device) -> bool:
    """Whether batched and fp16 matrix products are faster on this device."""
    return not is_cpu(device) and device.type != "meta"


def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch's fused kernel reads the skip flag on this device, so that the host does not wait for it."""
    return device.type == "cuda"


def per_device(device: torch.device, *, cpu: int, accelerator: int) -> int:
    """A size that depends on whether work is done in cache or by many multiprocessors."""
    return cpu if is_cpu(device) else accelerator


def copy_to_host_async(value: torch.Tensor) -> HostFuture:
    """Start copying a small tensor to the host, behind what is queued now. Nothing waits."""
    return (_stand_in or _HostCopy)(value)


@contextmanager
def stand_in(copy: Callable[[torch.Tensor], HostFuture]) -> Iterator[None]:
    """Testing hook: treat the CPU as an asynchronous device whose device-to-host copy is ``copy``."""
    global _stand_in
    before, _stand_in = _stand_in, copy
    try:
        yield
    finally:
        _stand_in = before


def is_first_rank() -> bool:
    """Whether this process is the one that reports for all: rank 0, or the only one."""
    return not (dist.is_initialized() and dist.get_rank())
