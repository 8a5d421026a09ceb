"""Work in chunks: how many elements at a time, and what fits into a batch."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from block_optim.core.device import per_device

T = TypeVar("T")

# Elements worked on together: what the scratch of elementwise kernels holds.
CPU_CHUNK, ACCELERATOR_CHUNK = 1 << 18, 1 << 24


def chunk_on(device: torch.device) -> int:
    """Elements to work on together."""
    return per_device(device, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK)


def packed(items: Iterable[T], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """Batches of neighboring items, each of at most ``limit`` in size or of one item."""
    batches: list[list[T]] = []
    room = 0
    for item in items:
        if not batches or size(item) > room:
            batches.append([])
            room = limit
        batches[-1].append(item)
        room -= size(item)
    return batches
