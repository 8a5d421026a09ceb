"""User errors: one line, the same on every rank."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


class TrainError(Exception):
    """A mistake in what was asked for, or a machine that could not do it; the message is the one line printed."""


def one_line(error: BaseException) -> str:
    """An exception as one line: a `TrainError`'s message, else its type and message without line breaks."""
    text = " ".join(str(error).split())
    return text if isinstance(error, TrainError) else f"{type(error).__name__}: {text[:400]}"


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Ranks leave this block together, or all raise what the first one of them raised.

    Costs one gather of small objects. For phases in which ranks work on their own (reading files), never inside
    the step; the block itself must not communicate after a point where it can fail.

    Raises:
        TrainError: on every rank, with the message of the lowest rank that failed.
    """
    message, cause = None, None
    try:
        yield
    except (TrainError, OSError) as error:
        message = str(error) if isinstance(error, TrainError) else f"{doing}: {one_line(error)}"
        cause = error
    found: list[str | None] = [message]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, message)
    failed = [(rank, text) for rank, text in enumerate(found) if text is not None]
    if failed:
        rank, text = failed[0]
        everywhere = len({text for _, text in failed}) == 1 and len(failed) == len(found)
        raise TrainError(text if everywhere else f"rank {rank}: {text}") from cause
