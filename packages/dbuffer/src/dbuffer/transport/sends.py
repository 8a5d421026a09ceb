"""A mover that uses the group's own sends and receives.

Before the tensors each rank sends a digest of what it exchanges (its number, label and sizes). The tensors' tags
are made of the digest too, so that a tensor never arrives in the place of another one.
"""

import hashlib
import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from .digest import DIGEST_BYTES, digest
from .protocol import Work

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
        number, group = next(self._numbers), self._group()
        expected = {peer: digest(number, label, tensors) for peer, tensors in takes.items()}
        received = {peer: torch.empty(DIGEST_BYTES, dtype=torch.uint8) for peer in takes}
        works: list[Work] = []

        def start(work: Work | None) -> None:
            assert work is not None, "this rank is not in the process group"
            works.append(work)

        for peer, into in received.items():
            start(dist.irecv(into, group=group, group_src=peer, tag=number % _TAGS))
        for peer, tensors in gives.items():
            sent = torch.tensor(list(digest(number, label, tensors)), dtype=torch.uint8)
            start(dist.isend(sent, group=group, group_dst=peer, tag=number % _TAGS))
        agreed = len(works)
        for peer, tensors in takes.items():
            for index, tensor in enumerate(tensors):
                start(dist.irecv(tensor, group=group, group_src=peer, tag=_tag(expected[peer], index)))
        for peer, tensors in gives.items():
            mine = digest(number, label, tensors)
            for index, tensor in enumerate(tensors):
                start(dist.isend(tensor, group=group, group_dst=peer, tag=_tag(mine, index)))
        return _Sent(label, works[:agreed], works[agreed:], expected, received, (gives, takes))


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

    def wait(self) -> None:
        """See `Work`."""
        for work in self._agreement:
            work.wait()
        for peer, expected in self._expected.items():
            if bytes(self._received[peer].tolist()) != expected:
                raise RuntimeError(
                    f"rank {peer} of the group takes part in another exchange than this rank's {self._label}, or in "
                    "one of other sizes; all ranks must make the same calls in the same order"
                )
        for work in self._tensors:
            work.wait()

    def is_completed(self) -> bool:
        """See `Work`."""
        return all(work.is_completed() for work in [*self._agreement, *self._tensors])


def _tag(agreed: bytes, index: int) -> int:
    mixed = hashlib.blake2b(agreed + index.to_bytes(4), digest_size=8).digest()
    return _TAGS + int.from_bytes(mixed) % _TAGS
