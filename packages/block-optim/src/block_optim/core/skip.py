"""A step that the device skips: the host launches it without knowing, and nothing that it wrote stays.

flag            0-d, on the device; not 0 where some gradient on some rank is not finite
`unless`        around writes: puts back, bit by bit, what was there where the flag is set
`PendingFlags`  counts of steps on the host are put back when the flag is read: when the next step begins. The
                device had it before that step's gradients, so the host waits for nothing that it has just launched.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from block_optim.core import device as devices
from block_optim.core._torch_compat import foreach_copy_
from block_optim.core.scratch import packed

T = TypeVar("T")

PORTION = 64 << 20  # bytes of which copies are kept at a time


@contextmanager
def unless(flag: torch.Tensor | None, written: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back what tensors held before the body where ``flag`` is not 0. None: does nothing.

    Args:
        flag: 0-d, on the tensors' device. It is not read by the host.
        written: the tensors that the body writes. Copies of them exist meanwhile.
    """
    if flag is None:
        yield
        return
    tensors = list(written)
    before = [t.clone() for t in tensors]
    yield
    skip = flag != 0
    for tensor, old in zip(tensors, before, strict=True):
        torch.where(skip, old, tensor, out=tensor)


def portions(
    flag: torch.Tensor | None, items: Sequence[T], nbytes: Callable[[T], int]
) -> Iterator[Sequence[T]]:
    """Split the work: one batch without ``flag``; else batches of about `PORTION` bytes, which are backed up first."""
    if flag is None:
        yield items
        return
    yield from packed(items, nbytes, PORTION)


class PendingFlags:
    """Flags of launched steps, and the host's step counts from before them."""

    def __init__(self) -> None:
        self._pending: list[tuple[devices.HostFuture, list[torch.Tensor], tuple[torch.Tensor, ...]]] = []

    def add(self, flag: torch.Tensor, counts: list[torch.Tensor], before: torch.Tensor | None) -> None:
        """Add a launched step, the counts that it raised on the host and, stacked, their values before."""
        old = () if before is None else before.unbind()
        self._pending.append((devices.copy_to_host_async(flag), counts, old))

    def skipped(self, *, wait: bool = False) -> int:
        """Number of skipped steps that have not been reported yet; counts on the host are rolled back.

        Without ``wait`` only flags that have arrived are read, and those that counts on the host depend on.
        """
        skipped = 0
        while self._pending and (wait or self._pending[0][1] or self._pending[0][0].has_arrived()):
            flag, counts, before = self._pending.pop(0)
            if flag.read().item():
                skipped += 1
                if counts:
                    foreach_copy_(counts, list(before))
        return skipped
