"""Memory that is allocated once and used again in every step, and work in chunks that fit into it."""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from ragged_shard.device import is_cpu

T = TypeVar("T")

# Elements worked on together: the size of the scratch of elementwise kernels.
CPU_CHUNK, ACCELERATOR_CHUNK = 1 << 18, 1 << 24


class Scratch:
    """Buffers on a device, by name and dtype, that grow to the largest request and stay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape; it overlaps earlier results with the same name and dtype."""
        view = self._views.get((name, shape, dtype))
        if view is not None:
            return view
        numel = math.prod(shape)
        result = self._buffers.get((name, dtype))
        if result is None or result.numel() < numel:
            result = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype, device=self.device)
            for old in [key for key in self._views if key[0] == name and key[2] == dtype]:
                del self._views[old]
        view = self._views[name, shape, dtype] = result[:numel].view(shape)
        return view

    def reserve(self, other: "Scratch") -> None:
        """Make every buffer as large as the other scratch has it, so that none grows later."""
        for (name, dtype), buffer in other._buffers.items():
            self.take(name, (buffer.numel(),), dtype)


def per_device(device: torch.device, *, cpu: int, accelerator: int) -> int:
    """A size that depends on whether work is done in cache or by many multiprocessors."""
    return cpu if is_cpu(device) else accelerator


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
