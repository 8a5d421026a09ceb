"""Differences between a CPU and accelerators."""

import torch
import torch.distributed as dist

from ragged_shard.device import is_cpu


def is_capturing() -> bool:
    """Whether a CUDA graph captures the ops of this thread."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def per_device(device: torch.device, *, cpu: int, accelerator: int) -> int:
    """A size that depends on whether work is done in cache or by many multiprocessors."""
    return cpu if is_cpu(device) else accelerator


def is_first_rank() -> bool:
    """Whether this process is the one that reports for all: rank 0, or the only one."""
    return not (dist.is_initialized() and dist.get_rank())
