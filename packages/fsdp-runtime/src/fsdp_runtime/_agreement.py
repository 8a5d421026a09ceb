"""One rank's problem is everyone's: all ranks raise the same error, or none does."""

from typing import Any

import torch.distributed as dist

_KINDS: tuple[type[Exception], ...] = (
    ImportError, NotImplementedError, FileNotFoundError, OSError, TypeError, ValueError,
)  # fmt: skip


def agree(
    caller: str, problem: Exception | None, answer: Any = None, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Raise on every rank where one has a problem, with the first rank's words; else every rank's answer, in order.

    Communicates one all-gather of pickled objects where there are several ranks.
    """
    answers: list[Any] = [(_said(problem), answer)]
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks > 1:
        answers = [None] * ranks
        dist.all_gather_object(answers, (_said(problem), answer), group=group)
    for rank, (said, _) in enumerate(answers):
        if said is not None:
            kind, text = said
            where = f" on rank {rank}" if ranks > 1 else ""
            raise kind(f"{caller}{where}: {text}") from problem
    return [given for _, given in answers]


def _said(problem: Exception | None) -> tuple[type[Exception], str] | None:
    if problem is None:
        return None
    kind = next((kind for kind in _KINDS if isinstance(problem, kind)), RuntimeError)
    known = isinstance(problem, (*_KINDS, RuntimeError)) and not isinstance(problem, KeyError)
    return kind, str(problem) if known else f"{type(problem).__name__}: {problem}"
