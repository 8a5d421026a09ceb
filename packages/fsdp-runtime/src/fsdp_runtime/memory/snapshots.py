"""Torch's memory snapshots of an accelerator: each live allocation, and who made it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._torch_compat import dump_memory, has_memory_snapshots, record_memory


def save_memory_snapshot(path: str | os.PathLike[str], device: torch.device) -> None:
    """Write torch's snapshot of an accelerator's memory to a file, which torch's page memory_viz draws.

    Inside `memory_history` it has who allocated what; elsewhere only what is live. Does not wait for the device.

    Raises:
        ValueError: torch writes none for this kind of device, such as the CPU.
    """
    _check(device)
    dump_memory(device, os.fspath(path))


@contextmanager
def memory_history(device: torch.device, *, events: int = 100_000) -> Iterator[None]:
    """Record allocations and frees of an accelerator inside, with their Python stacks, for `save_memory_snapshot`.

    Costs some microseconds for each. Other recordings in the process end with this one.

    Args:
        device: whose memory.
        events: of these, the last are kept.

    Raises:
        ValueError: torch records none for this kind of device, such as the CPU.
    """
    _check(device)
    record_memory(device, events)
    try:
        yield
    finally:
        record_memory(device, 0)


def _check(device: torch.device) -> None:
    if not has_memory_snapshots(device):
        raise ValueError(
            f"torch has no memory snapshots of {device}, only of CUDA and XPU devices; StepMeter measures any device"
        )
