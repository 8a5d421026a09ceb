"""Devices of this machine: their names, memory and times."""

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ragged_shard.device import CPU, device_layer, is_cpu

from .errors import TrainError

DEVICES = ("cpu", "cuda")  # that can be asked for; "auto" takes any accelerator


def pick_device(asked: str) -> torch.device:
    """The kind of device of a run.

    Raises:
        TrainError: torch knows no such kind.
    """
    if asked != "auto":
        try:
            return torch.device(asked)
        except RuntimeError:
            raise TrainError(f"--device {asked!r}: expected one of auto, {', '.join(DEVICES)}") from None
    accelerator: torch.device | None = torch.accelerator.current_accelerator(check_available=True)
    return CPU if accelerator is None else torch.device(accelerator.type)


def own_device(asked: str, local_rank: int) -> torch.device:
    """The device of this rank, made the current one: that of its local rank, or the only one that it sees.

    Raises:
        TrainError: fewer devices than local ranks, and more than one.
    """
    kind = pick_device(asked)
    if is_cpu(kind):
        return kind
    visible = torch.accelerator.device_count()
    if 1 < visible <= local_rank:
        raise TrainError(
            f"local rank {local_rank} has no {kind.type} device: {visible} are visible; start one rank a device, "
            "or show each rank one (as Slurm's --gpus-per-task=1 does)"
        )
    index = 0 if visible == 1 else local_rank
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def backends(device: torch.device) -> str:
    """Backends of a process group for tensors of the device and of the CPU."""
    own, cpu = (dist.get_default_backend_for_device(kind) for kind in (device, CPU))
    return cpu if is_cpu(device) else f"{CPU.type}:{cpu},{device.type}:{own}"


def check_present(asked: str) -> None:
    """Raises TrainError if this machine does not have the device."""
    if asked not in ("auto", CPU.type, pick_device("auto").type):
        raise TrainError(f"--device {asked}: torch finds no {asked.upper()} device here")


def memory_mb(device: torch.device) -> float:
    """Peak memory of this rank so far, MB: allocated memory of an accelerator, or resident memory on CPU."""
    if not is_cpu(device):
        return torch.accelerator.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, copied behind what is queued; the host does not wait."""
    return tensor if is_cpu(device) else tensor.pin_memory().to(device, non_blocking=True)


def copy_to_host(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start copying a 1-D tensor to the host; the result reads it, and waits for what was queued before alone."""
    layer = device_layer(values.device)
    if not layer.asynchronous:
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, device=CPU, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = layer.record()

    def read() -> list[float]:
        layer.wait_on_host(event)
        return [float(value) for value in host]

    return read


@dataclass
class StepClock:
    """Wall and CPU seconds between calls of `lap`. On an accelerator, `lap` waits for the device only if told to."""

    device: torch.device
    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=lambda: sum(os.times()[:2]))

    def lap(self, synchronize: bool = False) -> tuple[float, float]:
        """Wall and CPU seconds of this process since the last lap."""
        if synchronize and not is_cpu(self.device):
            torch.accelerator.synchronize(self.device)
        now, used = time.perf_counter(), sum(os.times()[:2])
        passed = now - self.wall, used - self.cpu
        self.wall, self.cpu = now, used
        return passed
