"""User errors: one line, the same on every rank; and how lines reach the terminal."""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from ragged_shard.dist import gather_from_ranks, own_error_first, same_on_all_ranks

_LONGEST = 1600  # characters of a message
# Messages of gloo, NCCL, torch's stores and peer memory on ranks that outlive another one.
_GONE = re.compile(
    r"gloo|NCCL|connection (closed|reset|refused)|pair closure|broken pipe|has ended or given up|timed out",
    re.IGNORECASE,
)


class TrainError(Exception):
    """A mistake of the user, or a machine that could not do what was asked; the message is the one line printed."""


def one_line(error: BaseException) -> str:
    """An exception as one line, cut in the middle if long: a `TrainError`'s message, else its type and message."""
    text = " ".join(str(error).split())
    if not isinstance(error, TrainError):
        return f"{type(error).__name__}: {text[:400]}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Ranks leave this block together, or every rank raises the error of the lowest rank that failed.

    Raises `TrainError`. Costs one gather of small objects: for phases in which ranks work alone (reading files), not in
    a step. The block itself must not communicate after a point where it can fail.
    """
    message: str | None = None
    cause: Exception | None = None
    try:
        yield
    except (TrainError, OSError) as error:
        message = str(error) if isinstance(error, TrainError) else f"{doing}: {one_line(error)}"
        cause = error
    with own_error_first(cause):
        messages = gather_from_ranks(message)
    failed = [rank for rank, text in enumerate(messages) if text is not None]
    if failed:
        text = messages[failed[0]]
        everywhere = messages == [text] * len(messages)
        raise TrainError(text if everywhere else f"rank {failed[0]}: {text}") from cause


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
    """Print a line on stderr. Drops it if stderr is closed (a pipe, a terminal that is gone)."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def check_agreement(values: Mapping[str, Any]) -> None:
    """Compare values over all ranks as `same_on_all_ranks` does; where they differ every rank raises `TrainError`."""
    try:
        same_on_all_ranks(values)
    except ValueError as error:
        raise TrainError(str(error)) from None
