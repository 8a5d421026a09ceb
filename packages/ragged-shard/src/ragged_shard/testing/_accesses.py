"""Reads and writes of ops, and the state of a block of memory: parts of the simulated device."""

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]  # for each stream's number how many of its ops have happened before


class RaceError(AssertionError):
    """Two accesses to memory without an order, or memory given back too early."""


@dataclass(frozen=True)
class Access:
    stream: int
    stream_name: str
    time: int
    writes: bool
    low: int
    high: int
    what: str

    def __str__(self) -> str:
        kind = "write" if self.writes else "read"
        return f"{kind} of bytes {self.low} to {self.high} by {self.what} on {self.stream_name}"


@dataclass(eq=False)
class Block:
    """Memory at one address, from its allocation until it is given back."""

    address: int
    nbytes: int
    home: Any
    on_host: bool
    pinned: bool
    accesses: list[Access] = field(default_factory=list)


@dataclass
class Pools:
    """Memory of a caching allocator: for each stream bytes in use, and their peak.

    Attributes:
        used: by the name of the stream that memory was allocated on.
        peak: of each.
    """

    used: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """The sum of the peaks: memory cached for one stream is not given to another."""
        return sum(self.peak.values())

    def add(self, name: str, nbytes: int) -> None:
        """Count bytes that were allocated, or with a negative number given back."""
        self.used[name] = self.used.get(name, 0) + nbytes
        self.peak[name] = max(self.peak.get(name, 0), self.used[name])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors that are not views of others."""
    return [
        t
        for t in tree_leaves(tree)
        if isinstance(t, torch.Tensor) and not (t.is_meta or t.is_sparse or isinstance(t, FakeTensor))
    ]


def arguments(schema: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an op reads, and the tensors that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [
            t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and not t.is_meta and not t.is_sparse
        ]
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors)
    return reads, writes


def is_non_blocking(schema: Any, args: Any, kwargs: Any) -> bool:
    """Whether a copy was asked not to make the host wait."""
    for index, argument in enumerate(schema.arguments):
        if argument.name == "non_blocking":
            flag = args[index] if index < len(args) else kwargs.get("non_blocking")
            return bool(flag)
    return False


def makes_room(func: Any) -> bool:
    """Whether an op gives memory and writes nothing."""
    name: str = func._schema.name
    return name.startswith(("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_"))


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one behind the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + int(last) + 1) * tensor.itemsize


def join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        if clock.get(number, 0) < time:
            clock[number] = time


def where() -> str:
    """The innermost lines of code that is neither torch's nor this file's."""
    frame: Any = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < 4:
        path = frame.f_code.co_filename
        if not path.startswith((_TORCH, _PYTHON, _HERE)):
            lines.append(f"{os.path.basename(path)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


_HERE = __file__.rpartition(os.sep)[0]
_TORCH = next(iter(torch.__path__))
_PYTHON = os.path.dirname(os.__file__) + os.sep + "contextlib"
# Ops that give the host something that the device has computed.
SYNCS = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
)
