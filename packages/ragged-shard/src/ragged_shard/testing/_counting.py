"""Count the bytes that a rank's collectives send, where they are dispatched.

Counted are the bytes that this rank must send to *other* ranks for the collective's result, whichever algorithm the
backend chooses (N ranks):

    all_to_all       the entries for other ranks
    all_gather       (N-1) x its input
    broadcast        (N-1) x the tensor at the source, 0 elsewhere
    reduce_scatter   (N-1)/N x the input
    all_reduce       2 (N-1)/N x the tensor (a reduce-scatter and an all-gather)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard._torch_compat import groups_by_name, is_wrapper


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, its number of ranks, and the bytes that this rank sends to others."""

    kind: str
    ranks: int
    bytes_sent: float


@dataclass
class Record:
    """The collectives of a `record_collectives` block, in order."""

    events: list[Collective] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Their kinds, in order."""
        return [event.kind for event in self.events]

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent to others in all of them."""
        return sum(event.bytes_sent for event in self.events)


# Parts of the names of c10d's and the functional collectives, of which the first that fits counts.
_KINDS = (
    "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather", "send", "recv",
    "reduce", "barrier",
)  # fmt: skip
_NOT_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd"}
_SENT = ("input", "inputs", "input_tensors", "input_tensor", "tensors", "self")  # names of arguments


class _Mode(TorchDispatchMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper(kind) and kind is not FakeTensor for kind in types):
            return NotImplemented  # the subclass runs first; its collectives come back here
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "c10d_functional") and name not in _NOT_COLLECTIVES:
            self.record.events.append(_event(name.rstrip("_"), func, args))
        return func(*args, **(kwargs or {}))


def _event(name: str, func: Any, args: Any) -> Collective:
    spelled = name.replace("alltoall", "all_to_all").replace("allgather", "all_gather")
    spelled = spelled.replace("allreduce", "all_reduce")
    kind = next((kind for kind in _KINDS if kind in spelled), None)
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}
    source = next((named[name] for name in _SENT if name in named), None)
    if kind is None or (source is None and kind != "barrier"):
        raise NotImplementedError(f"record_collectives does not know {func}")
    group = _group(args)
    ranks, rank = group.size(), group.rank()
    tensors = [t for t in tree_leaves(source) if isinstance(t, torch.Tensor)]
    size = float(sum(t.numel() * t.element_size() for t in tensors))
    if kind == "all_to_all":
        splits = named.get("input_split_sizes")
        own = splits[rank] / max(sum(splits), 1) if splits else 1 / ranks
        return Collective(kind, ranks, size - round(size * own))
    is_root = named.get("root_rank", named.get("src")) == rank
    factors: dict[str, float] = {
        "all_gather": ranks - 1,
        "broadcast": (ranks - 1) * is_root,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_reduce": 2 * (ranks - 1) / ranks,
        "send": 1,
        "reduce": 1,
    }
    return Collective(kind, ranks, size * factors.get(kind, 0))


def _group(args: Any) -> Any:
    """The process group among a collective's arguments: boxed for c10d, by name for the functional ones."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
        if isinstance(arg, ProcessGroup):
            return arg
    for arg in reversed(args):
        if isinstance(arg, str):
            try:
                return groups_by_name()[arg]
            except KeyError:
                continue
    raise RuntimeError("found no process group among the arguments of a collective")


@contextmanager
def record_collectives() -> Iterator[Record]:
    """Yields a `Record` of the collectives that this thread starts inside it.

    It sees torch.distributed's calls and DTensor's functional collectives; an unknown kind raises.
    """
    record = Record()
    with _Mode(record):
        yield record
