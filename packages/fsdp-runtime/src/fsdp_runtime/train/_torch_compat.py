"""Names of torch that are private, and what reads them. Tried with torch 2.11 and 2.13."""

from typing import Any

import torch
from torch._subclasses import FakeTensorMode


def fake_mode() -> Any:
    """Tensors with shapes, dtypes and devices, but without memory."""
    return FakeTensorMode()


def memory_events(profiler: Any) -> list[tuple[int, int, str]]:
    """(time in ns, bytes, name) of what a `torch.profiler.profile(profile_memory=True)` saw, in order.

    Allocations are positive and frees negative; marks made with `record_function` are in between, with 0 bytes.
    """
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            if event.device_type() == torch.autograd.DeviceType.CPU:
                found.append((event.start_ns(), event.nbytes(), ""))
        elif event.name().startswith("fsdp_train::"):
            found.append((event.start_ns(), 0, event.name()))
    return sorted(found, key=lambda event: event[0])
