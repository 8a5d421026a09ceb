"""User errors: one line, the same on every rank. Values that all ranks must have; how lines reach the terminal."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ragged_shard.dist import gather_from_ranks, same_on_all_ranks

T = TypeVar("T")
_LONGEST = 1600  # characters of a message
# What gloo and NCCL, torch's stores and peer memory say on ranks that outlive another one.
_GONE = re.compile(
    r"gloo|NCCL|connection (closed|reset|refused)|pair closure|broken pipe|has ended or given up|timed out",
    re.IGNORECASE,
)


class TrainError(Exception):
    """A mistake in what was asked for, or a machine that could not do it; the message is the one line printed."""


def one_line(error: BaseException) -> str:
    """An exception as one line: a `TrainError`'s message, else its type and message, without line breaks.

    A message that quotes something huge is cut in the middle.
    """
    text = " ".join(str(error).split())
    if not isinstance(error, TrainError):
        return f"{type(error).__name__}: {text[:400]}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Ranks leave this block together, or all raise what the first one of them raised.

    Costs one gather of small objects. For phases in which ranks work on their own (reading files), never inside
    the step; the block itself must not communicate after a point where it can fail.

    Raises:
        TrainError: on every rank, with the message of the lowest rank that failed; and its host, if there are several.
    """
    message, cause = None, None
    try:
        yield
    except (TrainError, OSError) as error:
        message = str(error) if isinstance(error, TrainError) else f"{doing}: {one_line(error)}"
        cause = error
    messages = gather_from_ranks((message, socket.gethostname()))
    failed = [(rank, text) for rank, (text, _) in enumerate(messages) if text is not None]
    if failed:
        rank, text = failed[0]
        everywhere = len({text for _, text in failed}) == 1 and len(failed) == len(messages)
        number = named(rank, [host for _, host in messages]).removeprefix("rank ")
        raise TrainError(text if everywhere else f"rank {number}: {text}") from cause


def named(rank: int, hosts: Sequence[str]) -> str:
    """A rank, with its host where there are several; `hosts` by rank."""
    return f"rank {rank} ({hosts[rank]})" if len(set(hosts)) > 1 else f"rank {rank}"


def this_rank(rank: int) -> str:
    """`named` without communication: from the variables that torchrun or another launcher sets."""
    several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    return f"rank {rank} ({socket.gethostname()})" if several else f"rank {rank}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes, on this rank and (DCP's `failures`) on others."""
    yield error
    for wrapped in (getattr(error, "failures", None) or {}).values():
        yield from causes(wrapped[0] if isinstance(wrapped, tuple) else wrapped)
    before = error.__cause__ or error.__context__
    if before is not None:
        yield from causes(before)


def lost_contact(error: BaseException) -> bool:
    """True if an exception only reports that another rank is gone; the cause is on that rank."""
    return any(
        isinstance(cause, (dist.DistError, ConnectionError))
        or (isinstance(cause, RuntimeError) and _GONE.search(str(cause)))
        for cause in causes(error)
    )


def say(text: str) -> None:
    """Print a line on stderr. It is dropped if stderr is closed (a pipe, a terminal that is gone).

    So is all that follows, from this process: training does not end because its output does.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr.fileno())


def silence(*descriptors: int) -> None:
    """Point file descriptors to nowhere, so that what is buffered for them can be flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def check_agreement(values: Mapping[str, Any]) -> None:
    """Compare values, by their text, over all ranks.

    Collective: one all-reduce of 64 bytes; if they differ, all-gathers of the values.

    Raises:
        TrainError: on every rank, with the first name whose values differ and the ranks that have each.
    """
    try:
        same_on_all_ranks(values)
    except ValueError as error:
        raise TrainError(str(error)) from None


def check_model(model: nn.Module) -> None:
    """`check_agreement` on parameters, in their order.

    Raises:
        TrainError: they differ.
    """
    listed = enumerate(model.named_parameters())
    check_agreement({f"parameter {n}": f"{name} {tuple(p.shape)} {p.dtype}" for n, (name, p) in listed})
