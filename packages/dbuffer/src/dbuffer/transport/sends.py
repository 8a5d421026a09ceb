"""A mover that uses the group's own sends and receives.

With the tensors each rank sends a digest of what it exchanges (its number, label and sizes). The tensors' tags are
made of the digest too, so that a tensor never arrives in the place of another one. The digest is sent last: a rank
that was interrupted before has given nothing.
"""

import hashlib
import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from .digest import DIGEST_BYTES, digest
from .protocol import Work, living
from .sums import Sum
from .works import Then

_TAGS = 1 << 30  # gloo's tags are positive 32-bit numbers; digests use the lower half, tensors the upper


class Sends:
    """Exchanges as isend and irecv."""

    name = "sends"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # the registry of transports must not keep groups alive
        self._numbers = itertools.count(1)

    def exchange(
        self,
        label: str,
        gives: Mapping[int, Sequence[torch.Tensor]],
        takes: Mapping[int, Sequence[torch.Tensor]],
    ) -> Work:
        """See `Mover`."""
        number, group = next(self._numbers), living(self._group)
        what = f"{number} {label}"
        expected = {peer: digest(what, tensors) for peer, tensors in takes.items()}
        received = {peer: torch.empty(DIGEST_BYTES, dtype=torch.uint8) for peer in takes}
        agreement: list[Work] = []
        moved: list[Work] = []

        def start(works: list[Work], work: Work | None) -> None:
            assert work is not None, "this rank is not in the process group"
            works.append(work)

        for peer, into in received.items():
            start(agreement, dist.irecv(into, group=group, group_src=peer, tag=number % _TAGS))
        for peer, tensors in takes.items():
            for index, tensor in enumerate(tensors):
                tag = _tag(expected[peer], index)
                start(moved, dist.irecv(tensor, group=group, group_src=peer, tag=tag))
        mine = {peer: digest(what, tensors) for peer, tensors in gives.items()}
        for peer, tensors in gives.items():
            for index, tensor in enumerate(tensors):
                start(moved, dist.isend(tensor, group=group, group_dst=peer, tag=_tag(mine[peer], index)))
        for peer, agreed in mine.items():
            said = torch.tensor(list(agreed), dtype=torch.uint8)
            start(agreement, dist.isend(said, group=group, group_dst=peer, tag=number % _TAGS))
        return _Sent(label, agreement, moved, expected, received, (gives, takes))

    def reduce(self, label: str, gives: Mapping[int, Sequence[torch.Tensor]], total: Sum) -> Work:
        """See `Mover`. Holds what all peers give until it is waited for."""
        received = {peer: [torch.empty_like(own) for own in total.own] for peer in total.peers}

        def add_up() -> None:
            for peer in total.peers:
                for index, given in enumerate(received[peer]):
                    total.add(index, 0, given)
                total.end_peer()
            received.clear()

        then = Then(add_up)  # made first, so that no signal handler runs between the start and the return
        then.work = self.exchange(label, gives, received)
        return then


class _Sent:
    """An exchange under way; fails before the tensors where the digests differ."""

    def __init__(
        self,
        label: str,
        agreement: list[Work],
        tensors: list[Work],
        expected: Mapping[int, bytes],
        received: Mapping[int, torch.Tensor],
        held: object,
    ) -> None:
        self._label = label
        self._agreement, self._tensors = agreement, tensors
        self._expected, self._received = expected, received
        self._held = held  # gloo reads and writes it until all works have completed
        self._error: RuntimeError | None = None

    @property
    def under_way(self) -> bool:
        """Whether it may still complete."""
        return self._error is None

    def wait(self) -> None:
        """See `Work`."""
        if self._error is not None:
            raise self._error
        for work in self._agreement:
            self._wait_for(work)
        for peer, expected in self._expected.items():
            if bytes(self._received[peer].tolist()) != expected:
                self._error = RuntimeError(
                    f"rank {peer} of the group takes part in another exchange than this rank's {self._label}, or in "
                    "one of other sizes; all ranks must make the same calls in the same order"
                )
                raise self._error
        for work in self._tensors:
            self._wait_for(work)

    def _wait_for(self, work: Work) -> None:
        if (
            work.is_completed()
        ):  # a signal interrupted an earlier wait just after: gloo would expect another message
            if compat.has_failed(work):
                self._error = RuntimeError(f"a send or receive failed while {self._label} was interrupted")
                raise self._error
            return
        try:
            work.wait()
        except RuntimeError as error:
            # torch raises from C++; a signal handler's exception has passed another Python frame.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                self._error = error
            raise

    def is_completed(self) -> bool:
        """See `Work`."""
        return all(work.is_completed() for work in [*self._agreement, *self._tensors])


def _tag(agreed: bytes, index: int) -> int:
    mixed = hashlib.blake2b(agreed + index.to_bytes(4), digest_size=8).digest()
    return _TAGS + int.from_bytes(mixed) % _TAGS
