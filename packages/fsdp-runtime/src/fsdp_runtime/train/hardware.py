"""Devices of this machine: names, memory, and copies that do not block."""

import resource

import torch
import torch.distributed as dist

from ragged_shard.device import CPU, is_cpu

from .errors import TrainError


def pick_device(asked: str) -> torch.device:
    """The kind of device; "auto" is the accelerator if there is one. Raises `TrainError` if this machine lacks it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = {"cpu": CPU, "auto": CPU}
    if accelerator is not None:
        kinds["auto"] = kinds[accelerator.type] = torch.device(accelerator.type)
    if asked not in kinds:
        raise TrainError(f"--device {asked}: this machine has {', '.join(sorted(kinds))}")
    return kinds[asked]


def own_device(asked: str, local_rank: int) -> torch.device:
    """The device of this rank, made the current one: the only visible one, or the one with the local rank's index."""
    kind = pick_device(asked)
    if is_cpu(kind):
        return kind
    index = 0 if torch.accelerator.device_count() == 1 else local_rank
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def backends(device: torch.device) -> str:
    """Backends of a process group for tensors of the device and of the CPU."""
    own, cpu = (dist.get_default_backend_for_device(kind) for kind in (device, CPU))
    return cpu if is_cpu(device) else f"{CPU.type}:{cpu},{device.type}:{own}"


def memory_mb(device: torch.device) -> float:
    """Peak memory of this rank so far, MB: allocated memory of an accelerator, or resident memory on CPU."""
    if not is_cpu(device):
        return torch.accelerator.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's copy on the device, queued behind earlier work; the host does not wait."""
    return tensor if is_cpu(device) else tensor.pin_memory().to(device, non_blocking=True)
