"""Counting what passes torch's dispatcher: calls, collectives, bytes written, and live memory by kind.

    with Tally(world_size) as tally:
        with tally.part("forward"): ...
    tally.parts["forward"].calls, .collectives, .wire_bytes, .copied, .written
    tally.memory.peak, .peak_by_kind

What is counted of an op is generic: every tensor that its schema says it writes, and every result with memory of
its own, counts with its bytes as *written*; if the op does nothing but copy, cast or join, as *copied* too. Ops that
a kernel calls inside itself are part of that op. Collectives count apart, with what this rank receives by the usual
ring formulas. The size of every storage that was seen is looked at before each op and when it dies: what storages gain,
lose or exchange is counted once somebody computes with it.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard import RaggedDTensor

# Ops that only move values: copies, casts, joins.
COPIES = {
    "aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::stack",
    "aten::constant_pad_nd", "aten::_chunk_cat", "aten::split_with_sizes_copy", "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy", "fsdp::chunk_cat",
}  # fmt: skip
# Memory without values, or labels: neither calls of interest nor writes.
SILENT = {"profiler::_record_function_enter_new", "profiler::_record_function_exit"}
EMPTY = {
    f"aten::{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
}
# What this rank receives: (argument that counts, factor as a function of the number of ranks).
WIRE = {
    "all_gather": lambda sent, received, ranks: sent * (ranks - 1),
    "reduce_scatter": lambda sent, received, ranks: sent * (ranks - 1) / ranks,
    "all_reduce": lambda sent, received, ranks: 2 * sent * (ranks - 1) / ranks,
    "all_to_all": lambda sent, received, ranks: received * (ranks - 1) / ranks,
    "broadcast": lambda sent, received, ranks: sent,
    "other": lambda sent, received, ranks: sent,
}


@dataclass
class Part:
    """Counts of one part of a step.

    Attributes:
        calls: dispatcher calls by op; views and allocations included, collectives and profiler labels not.
        collectives: launches by kind.
        wire_bytes: received by this rank.
        copied, written: bytes by kind of the memory they went to.
    """

    calls: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    wire_bytes: float = 0.0
    copied: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    _writes: list[tuple["Block", int, bool]] = field(default_factory=list)

    def sort_writes(self) -> None:
        """Count the writes under the kinds that their memory turned out to be."""
        for block, nbytes, copy in self._writes:
            self.written[block.kind] += nbytes
            if copy:
                self.copied[block.kind] += nbytes
        self._writes.clear()


@dataclass(eq=False)
class Block:
    """One storage: what it is for, and its bytes now."""

    kind: str = "temporaries"
    nbytes: int = 0
    is_shard: bool = False  # of gradients: what a reduction leaves


class Memory:
    """Live bytes of every storage that was seen, by kind. Kinds may be told late; the peak is taken by replay."""

    def __init__(self, parked: Callable[[], int]) -> None:
        self._blocks: weakref.WeakKeyDictionary[torch.UntypedStorage, Block] = weakref.WeakKeyDictionary()
        self._events: list[tuple[Block, int]] = []
        self._parked, self._parked_bytes = Block("parked"), parked

    def block(self, storage: torch.UntypedStorage, kind: str = "temporaries") -> Block:
        """The record of a storage; a new one is entered as of this kind."""
        block = self._blocks.get(storage)
        if block is None:
            block = self._blocks[storage] = Block(kind)
            weakref.finalize(storage, self._change, block, 0).atexit = False
            self._change(block, storage.nbytes())
        return block

    def look(self) -> None:
        """Note what storages have gained and lost since the last look, losses first, and what is parked."""
        blocks = [(block, storage.nbytes()) for storage, block in self._blocks.items()]
        blocks.append((self._parked, self._parked_bytes()))
        changed = [
            (nbytes - block.nbytes, block, nbytes) for block, nbytes in blocks if nbytes != block.nbytes
        ]
        for _, block, nbytes in sorted(changed, key=lambda change: change[0]):
            self._change(block, nbytes)

    def _change(self, block: Block, nbytes: int) -> None:
        if block.nbytes != nbytes:
            self._events.append((block, nbytes - block.nbytes))
            block.nbytes = nbytes

    def restart(self) -> None:
        """Forget the past: the peak is taken from here on, beginning with what is live."""
        self.look()
        live = [block for block in (*self._blocks.values(), self._parked) if block.nbytes]
        self._events = [(block, block.nbytes) for block in live]

    def peak(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """Most bytes at once; what they were; and the most of each kind by itself, at whatever time."""
        now: Counter[str] = Counter()
        each: Counter[str] = Counter()
        at_peak: dict[str, int] = {}
        most = total = 0
        for block, change in self._events:
            now[block.kind] += change
            total += change
            each[block.kind] = max(each[block.kind], now[block.kind])
            if total > most:
                most, at_peak = total, dict(now)
        kinds = {kind: nbytes for kind, nbytes in sorted(at_peak.items()) if nbytes}
        return most, kinds, {kind: nbytes for kind, nbytes in sorted(each.items()) if nbytes}

    def floor(self, unit: int) -> int:
        """Most bytes at once of what no runtime can do without.

        That is all but parked memory, what of gathered parameters is more than `unit` bytes, and the same of gradients
        apart from their shards. A runtime's own temporaries count with the activations.
        """
        now: Counter[str] = Counter()
        most = 0
        for block, change in self._events:
            now["shards" if block.is_shard else block.kind] += change
            spared = now["parked"] + sum(max(now[kind] - unit, 0) for kind in ("gathered", "gradients"))
            most = max(most, sum(now.values()) - spared)
        return most


class Tally(TorchDispatchMode):
    """Counts while entered; see the module's docstring."""

    def __init__(self, ranks: int, parked: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.ranks = ranks
        self.memory = Memory(parked)
        self.parts: dict[str, Part] = {}
        self._part = Part()

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """Count under this name."""
        before, self._part = self._part, self.parts.setdefault(name, Part())
        try:
            yield self._part
        finally:
            self._part = before

    def mark(self, kind: str, tensors: Iterable[Any], *, force: bool = False) -> None:
        """Say what the memory of tensors is for. The first word counts, unless forced."""
        for tensor in tensors:
            local = _local(tensor)
            if local is not None:
                block = self.memory.block(local.untyped_storage())
                if force or block.kind == "temporaries":
                    block.kind = kind

    def mark_shards(self, gradients: Iterable[Any]) -> None:
        """Say which gradients are shards that a reduction has left."""
        for tensor in gradients:
            local = _local(tensor)
            if local is not None:
                self.memory.block(local.untyped_storage()).is_shard = True

    def sort_writes(self) -> None:
        """Call when all kinds are known."""
        for part in self.parts.values():
            part.sort_writes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, RaggedDTensor)) for t in types):
            return NotImplemented  # its own dispatch first: what it then does on local tensors comes here
        kwargs = kwargs or {}
        self.memory.look()
        result = func(*args, **kwargs)
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._collective(name, args, result)
        elif name not in SILENT:
            self._part.calls[name] += 1
            self._writes(name, func._schema, args, kwargs, result)
        return result

    def _writes(self, name: str, schema: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {self.memory.block(t.untyped_storage()) for t in tensors}
        targets = []
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                targets += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        written = [(self.memory.block(t.untyped_storage()), t.nbytes) for t in targets]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                block = self.memory.block(tensor.untyped_storage())
                if block not in known:
                    written.append((block, tensor.nbytes))
        if name == "fsdp::all_gather_copy_in":  # its schema does not say which part of the output it writes
            written = [(self.memory.block(result[0].untyped_storage()), result[0].nbytes)]
        if name not in EMPTY:
            self._part._writes += [(block, nbytes, name in COPIES) for block, nbytes in written if nbytes]

    def _collective(self, name: str, args: Any, result: Any) -> None:
        short = name.split("::")[1].strip("_")
        kind = collective_of(short)
        if kind is None:
            return
        tensors = [[t for t in tree_leaves(a) if isinstance(t, torch.Tensor)] for a in args[:2]]
        received = sum(t.nbytes for t in tensors[0])
        sent = sum(t.nbytes for t in tensors[1]) if len(tensors) > 1 and tensors[1] else received
        self._part.collectives[kind] += 1
        self._part.wire_bytes += WIRE[kind](sent, received, self.ranks)
        if kind == "all_gather":
            self.mark("gathered", tensors[0])
        if kind == "reduce_scatter":
            self.mark("gradients", itertools.chain(*tensors))


def collective_of(op: str) -> str | None:
    """`allgather_base`, `reduce_scatter_tensor_coalesced`, `allreduce`, ... as one of the keys of WIRE."""
    flat = op.replace("_", "")
    for kind in WIRE:
        if flat.startswith(kind.replace("_", "")):
            return kind
    return None if flat.startswith(("wait", "barrier", "monitoredbarrier")) else "other"


def _local(tensor: Any) -> torch.Tensor | None:
    if isinstance(tensor, (DTensor, RaggedDTensor)):
        return tensor.to_local()
    return tensor if isinstance(tensor, torch.Tensor) else None
