"""Flat runs: neighbouring tensors of one storage are one tensor to an elementwise kernel.

storage     | a a a a a b b b . . . c c c c c c c c |        a, b, c: local tensors; '.': memory between them
runs        |<------------->|     |<------------->|        one call updates each
states      | a a a a a b b b . . . c c c c c c c c |        allocated in the same order, so they are runs, too
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_ALIGN = 16  # elements between the runs of a flat space: 64 bytes of fp32


@dataclass(frozen=True)
class Run:
    """Neighbours in one storage: which tensors, and how far the run reaches from the first one's first element."""

    members: tuple[int, ...]
    numel: int


def offset_of(tensor: torch.Tensor) -> int:
    """Offset of the tensor's first element in its storage."""
    return int(tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def find_runs(tensors: Sequence[torch.Tensor], keys: Sequence[Hashable] | None = None) -> list[Run]:
    """The runs that plain, dense tensors make, in the order of their first member; empty tensors are in none.

    Tensors of one run agree in storage, dtype, device and key.
    """

    def place(i: int) -> tuple[str, int, int, int]:
        tensor = tensors[i]
        return str(tensor.dtype), tensor.untyped_storage().data_ptr(), offset_of(tensor), i

    order = sorted((i for i, t in enumerate(tensors) if t.numel()), key=place)
    groups: list[list[int]] = []
    end, previous = 0, None
    for i in order:
        tensor = tensors[i]
        where = (tensor.dtype, tensor.untyped_storage().data_ptr(), keys[i] if keys else None)
        if groups and where == previous and offset_of(tensor) == end:
            groups[-1].append(i)
        else:
            groups.append([i])
        end, previous = offset_of(tensor) + tensor.numel(), where
    ends = [offset_of(tensors[group[-1]]) + tensors[group[-1]].numel() for group in groups]
    runs = [Run(tuple(g), end - offset_of(tensors[g[0]])) for g, end in zip(groups, ends, strict=True)]
    return sorted(runs, key=lambda run: min(run.members))


class FlatSpace:
    """A flat address space for the states of some local tensors: neighbours stay neighbours."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.shapes = [tuple(t.shape) for t in tensors]
        self.strides = [tuple(t.stride()) for t in tensors]
        self.offsets = [0] * len(tensors)  # where each tensor begins
        end = 0
        for run in find_runs(tensors):
            base = offset_of(tensors[run.members[0]])
            for i in run.members:
                self.offsets[i] = end + offset_of(tensors[i]) - base
            end += -(-run.numel // _ALIGN) * _ALIGN
        self.numel = end  # elements of a buffer over the whole space

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor's elements of a buffer, in its own shape and strides."""
        return [
            buffer.as_strided(shape, stride, offset)
            for shape, stride, offset in zip(self.shapes, self.strides, self.offsets, strict=True)
        ]


def joint_runs(lists: Sequence[Sequence[torch.Tensor]], keys: Sequence[Hashable]) -> list[Run]:
    """The runs of the first list's tensors in which all lists are runs, with members at the same distances.

    So that one kernel may walk over parameters, gradients and states together.
    """
    first = lists[0]

    def key(i: int) -> Any:
        # Neighbours share these exactly where every list keeps them at the first list's distance.
        return (
            keys[i],
            *(
                (t[i].untyped_storage().data_ptr(), t[i].dtype, offset_of(t[i]) - offset_of(first[i]))
                for t in lists[1:]
            ),
        )

    return find_runs(first, [key(i) for i in range(len(first))])
