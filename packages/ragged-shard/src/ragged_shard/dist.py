"""How ranks compare values and raise errors together: on every rank, or on none. `DISTRIBUTED` is for isinstance.

    raise_on_all_ranks(error, "load")     one rank's error -> the same error on every rank; else every rank's value
    same_on_all_ranks({"batch": "12"})    a value that differs -> ValueError on every rank, with the ranks of each value
    with on_all_ranks("load") as values:  both, at the end of a block in which ranks work alone
    gather_from_ranks(value)              one small object of every rank

`groups` are the process groups to compare over, one after the other: the axes of a mesh reach all of its ranks. They
default to the group of all ranks; without process groups there is one rank.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ragged_shard._torch_compat import DISTRIBUTED, groups_by_name
from ragged_shard.device import CPU, is_cpu

__all__ = [
    "DISTRIBUTED",
    "equal_on_all_ranks",
    "equalize_group_counts",
    "gather_from_ranks",
    "installed_versions",
    "list_ranks",
    "movable",
    "on_all_ranks",
    "own_error_first",
    "raise_on_all_ranks",
    "same_on_all_ranks",
]

T = TypeVar("T")
Groups = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None

_log = logging.getLogger(__name__)
_LATE = 1.0  # seconds after which a rank with an error logs it, if it waits for the others still
_WORDS = 4  # of 62 bits, of a digest
# Types that every rank can raise again; any other error arrives as a RuntimeError that names its type.
_KINDS: tuple[type[Exception], ...] = (
    ImportError, NotImplementedError, FileNotFoundError, OSError, TypeError, ValueError, RuntimeError,
)  # fmt: skip


def gather_from_ranks(value: T, groups: Groups = None) -> list[T]:
    """Returns every rank's `value`, in rank order. One all-gather of pickled objects on each group."""
    values: list[Any] = [value]
    for group in _groups(groups):
        received: list[Any] = [None] * group.size()
        dist.all_gather_object(received, values, group=group)
        values = [item for items in received for item in items]
    return values


def raise_on_all_ranks(
    error: Exception | None, caller: str, value: T | None = None, groups: Groups = None
) -> list[T]:
    """Raises the lowest rank's error on every rank if any rank passes one; returns every rank's `value` otherwise.

    The message begins with `caller` and names the rank. One all-gather of pickled objects on each group.
    """
    with own_error_first(error):
        reports = gather_from_ranks((_rank(), _described(error), value), groups)
    for failed_rank, described, _ in sorted(reports, key=itemgetter(0)):
        if described is not None:
            kind, message = described
            where = f" on rank {failed_rank}" if len(reports) > 1 else ""
            raise kind(f"{caller or 'call'}{where}: {message}") from error
    values: list[Any] = [value for *_, value in reports]
    return values


def same_on_all_ranks(
    values: Mapping[str, object], groups: Groups = None, *, error: Exception | None = None, caller: str = ""
) -> None:
    """Compares named values, by their text, over all ranks.

    One all-reduce of 64 bytes on each group; if ranks differ, two all-gathers of pickled objects.

    Args:
        error: raised on every rank, as in `raise_on_all_ranks`, before values are compared.
        caller: begins every message.

    Raises:
        ValueError: on every rank, with the first name whose values differ and the ranks that have each.
    """
    texts = {name: str(value) for name, value in values.items()}
    with own_error_first(error):
        equal = equal_on_all_ranks(f"{texts} {None if error is None else repr(error)}", groups)
    if equal and error is None:
        return
    raise_on_all_ranks(error, caller, groups=groups)
    by_rank = sorted(gather_from_ranks((_rank(), texts), groups), key=itemgetter(0))
    for name in dict.fromkeys(name for _, values_there in by_rank for name in values_there):
        ranks: dict[str, list[int]] = {}
        for rank, values_there in by_rank:
            ranks.setdefault(values_there.get(name, "absent"), []).append(rank)
        if len(ranks) > 1:
            shown = "; ".join(f"{value} on {list_ranks(which)}" for value, which in ranks.items())
            prefix = f"{caller}: " if caller else ""
            raise ValueError(f"{prefix}ranks do not agree on {name}: {shown}")
    raise AssertionError("digests differ, and the values do not")


@contextlib.contextmanager
def on_all_ranks(caller: str, groups: Groups = None) -> Iterator[dict[str, object]]:
    """Ranks leave the block together, or all raise: an error of one rank, or named values that differ between ranks.

    Yields the dict for the values. The block itself must not communicate after a point where it can fail. Communicates
    and raises as `same_on_all_ranks`.
    """
    values: dict[str, object] = {}
    problem: Exception | None = None
    try:
        yield values
    except Exception as error:  # the other ranks must not wait for this one
        problem = error
    same_on_all_ranks(values, groups, error=problem, caller=caller)


@contextlib.contextmanager
def own_error_first(error: Exception | None) -> Iterator[None]:
    """Around an exchange with other ranks: raises this rank's error if they are lost, logs it if they are late.

    An error that ranks raise together has to reach them; it must not stay hidden if one of them never comes.
    """
    if error is None:
        yield
        return
    late = threading.Timer(_LATE, _log.error, ("waiting for the other ranks, to raise there too: %r", error))
    late.daemon = True
    late.start()
    try:
        yield
    except RuntimeError as lost:
        raise error from lost
    finally:
        late.cancel()


def equal_on_all_ranks(text: str, groups: Groups = None) -> bool:
    """Whether all ranks pass the same text. One all-reduce of 64 bytes on each group."""
    digest = hashlib.sha256(text.encode()).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") >> 2 for i in range(_WORDS)]
    both = torch.tensor(words + [-word for word in words])
    for group in _groups(groups):
        both = movable(both, group)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, negated_smallest = both.view(2, _WORDS).tolist()
    return bool(largest == [-word for word in negated_smallest])


def equalize_group_counts(groups: Sequence[dist.ProcessGroup], device_type: str) -> None:
    """Let all ranks be in equally many process groups, by one-rank groups: before a group that only these ranks make.

    torch names such a group (`use_local_synchronization=True`) by how many groups a rank is in, and ranks with
    different names wait for each other until the timeout. One all-reduce of 8 bytes on each group.

    Args:
        groups: together they connect the ranks, as the axes of a mesh do.
    """
    count = len(groups_by_name())
    most = torch.tensor(count, device=device_type)
    for group in groups:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    for _ in range(int(most) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="to be counted")


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of `packages` and of Python, {"the version of torch": ...}, to compare between ranks.

    A package that is missing has the version "not installed". Communicates nothing.
    """
    versions = {f"the version of {name}": _version(name) for name in packages}
    return {**versions, "the version of Python": ".".join(platform.python_version_tuple()[:2])}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def list_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Rank numbers for a message: "rank 1", "ranks 0, 2"."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks[:most]))}{more}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _groups(groups: Groups) -> list[dist.ProcessGroup]:
    if not dist.is_initialized():
        return []
    if groups is None or isinstance(groups, dist.ProcessGroup):
        groups = [dist.group.WORLD if groups is None else groups]  # type: ignore[list-item]
    return [group for group in groups if group.size() > 1]


def movable(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor where the group can move it: itself, or a copy on the accelerator if it moves no CPU tensors.

    With `CPUOffloadPolicy` parameters are in CPU memory, and groups of ``init_process_group("nccl")`` move none of it.
    """
    device = _device(group) if is_cpu(tensor.device) else tensor.device
    return tensor if device == tensor.device else tensor.to(device)


def _device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group's backends move: the CPU if they do."""
    if f"{CPU.type}:" in dist.get_backend_config(group):
        return CPU
    device = torch.accelerator.current_accelerator(check_available=True)
    return CPU if device is None else device


def _described(error: Exception | None) -> tuple[type[Exception], str] | None:
    if error is None:
        return None
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), None)
    return (RuntimeError, f"{type(error).__name__}: {error}") if kind is None else (kind, str(error))
