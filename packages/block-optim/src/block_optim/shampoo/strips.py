"""Owners of strips, and the exchange of strips that no rank holds whole with their owners.

    ranks hold    |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|      (any contiguous runs in rank order)
    strips        |-- s0 --|-- s1 --|-- s2 --|-- s3 --|-- s4 --|- s5 -|

    s0 and s5 are whole on ranks 0 and 3: those own them, nothing is exchanged
    s1 is cut between 0 and 1: one of the two owns it; its gradient goes there, its update comes back

Ownership never runs against rank order, so the state of a tensor's strips, laid end to end, is a `RaggedShard` of one
1-D tensor: it goes through checkpoints at any world size, and memory is exactly the owned blocks. Where FSDP alone cuts
a tensor, that follows from owners being holders. Where tensor parallelism cuts it, too, the ranks of both are taken in
the order of the first element that they hold, and owners of equal strips are exchanged until they are in that order:

    columns cut in two    strip   holders    least loaded    in order
    ranks 0 1 | 2 3       s0      0 1        1               0
                          s1      0 1        0               1
                          s2      2 3        2               2
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from block_optim.core.assign import Job, assign, loads
from block_optim.core.exchange import CopyExchange, Exchange, GradientPresence, TransferStream
from block_optim.core.holding import Holding, Range
from block_optim.core.pieces import Piece
from block_optim.core.scratch import Scratch
from block_optim.shampoo.grid import Grid

Pairs = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StripAssignment:
    """Owner of each strip of one tensor."""

    grid: Grid
    holding: Holding
    owners: tuple[int, ...]  # rank of each strip, in the holding's order: never decreasing
    # (rank, elements) of each strip's holders; () where every rank holds all
    holders: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def moving(self) -> list[int]:
        """The strips that their owners do not hold whole."""
        return [i for i, ranks in enumerate(self.holders) if [rank for rank, _ in ranks] != [self.owners[i]]]

    @property
    def owned(self) -> range:
        """This rank's strips: consecutive."""
        own_strips = [i for i, owner in enumerate(self.owners) if owner == self.holding.rank]
        return range(own_strips[0], own_strips[-1] + 1) if own_strips else range(0)

    @property
    def owned_range(self) -> Range:
        """The elements that this rank owns: one run."""
        strips = self.owned
        if not strips:
            return 0, 0
        return self.grid.strip(strips[0]).start, self.grid.strip(strips[-1]).stop

    def elements(self) -> list[int]:
        """Elements of the tensor that each rank owns."""
        totals = [0] * self.holding.num_ranks
        for index, owner in enumerate(self.owners):
            strip = self.grid.strip(index)
            totals[owner] += strip.stop - strip.start
        return totals


def assign_strips(
    tensors: Sequence[tuple[Grid, Holding]], before: dict[str, list[int]]
) -> list[StripAssignment]:
    """Owners of all strips of all tensors: the same on every rank, from global metadata alone.

    The tensors are in an order that all ranks share; to `before`, each rank's work by process group, theirs is added.
    """
    by_group: dict[str, list[tuple[int, Job]]] = defaultdict(list)
    for number, (grid, holding) in enumerate(tensors):
        name = "" if holding.group is None else holding.group.group_name
        before.setdefault(name, [0] * holding.num_ranks)
        for strip in map(grid.strip, range(grid.num_strips)):
            ranks = holding.holders((strip.start, strip.stop))
            job = Job(grid.cost(strip), strip.stop - strip.start, ranks, among_holders=not holding.copies)
            by_group[name].append((number, job))
    owners: list[list[int]] = [[] for _ in tensors]
    holders: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in tensors]
    for name, numbered in by_group.items():
        jobs, load = [job for _, job in numbered], before[name]
        result = assign(jobs, len(load), load)
        before[name] = loads(jobs, result, len(load), load)
        for (number, job), owner in zip(numbered, result, strict=True):
            owners[number].append(owner)
            holders[number].append(job.holders)
    return [
        StripAssignment(grid, holding, _ascending(own, ranks), tuple(ranks))
        for (grid, holding), own, ranks in zip(tensors, owners, holders, strict=True)
    ]


def _ascending(owners: Sequence[int], holders: Sequence[tuple[tuple[int, int], ...]]) -> tuple[int, ...]:
    """The owners of one tensor's strips in an order that never decreases, each between the strip's holders."""
    between = (
        min(max(owner, ranks[0][0]), ranks[-1][0]) if ranks else owner
        for owner, ranks in zip(sorted(owners), holders, strict=True)
    )
    return tuple(accumulate(between, max))


class StripExchange:
    """The strips that travel over one process group in one dtype, the compute dtype, so that nothing is lost.

    `tensors` are the assignments of those with moving strips, by their numbers: all of copies, or none of them.
    """

    def __init__(
        self, tensors: dict[int, StripAssignment], names: list[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        holding = next(iter(tensors.values())).holding
        assert holding.group is not None
        self.numbers, self._tensors, self._rank = list(tensors), tensors, holding.rank
        self.copies, self._lane = holding.copies, TransferStream(device)
        self._presence = GradientPresence(holding.group, len(tensors), device, names if self.copies else ())
        self._strips = [(number, index) for number, t in tensors.items() for index in t.moving]
        owners = [tensors[number].owners[index] for number, index in self._strips]
        self._exchange: Exchange | CopyExchange
        if self.copies:
            strips = [tensors[number].grid.strip(index) for number, index in self._strips]
            numels = [strip.stop - strip.start for strip in strips]
            self._exchange = CopyExchange(holding, owners, numels, dtype, Scratch(device), "strips")
            self.bytes_per_step = (holding.num_ranks - 1) * sum(numels) * dtype.itemsize
            return
        holders = [tensors[number].holders[index] for number, index in self._strips]
        self._exchange = Exchange(holding, owners, holders, dtype, Scratch(device), "strips")
        moved = sum(n for o, ranks in zip(owners, holders, strict=True) for rank, n in ranks if rank != o)
        self.bytes_per_step = 2 * moved * dtype.itemsize

    def agree(self, present: Sequence[bool]) -> list[bool]:
        """Find the tensors with a gradient on any rank: one all_reduce of a byte for each."""
        return self._presence.all_reduce(present)()

    def gather(self, local: Mapping[int, Tensor], owned: Mapping[int, Tensor]) -> None:
        """Bring gradients to their owners: one all_to_all_single; of copies, nothing is sent.

        `local` are this rank's elements of each tensor that takes part, flat; `owned`, which are filled, those it owns.
        """
        for local_part, owned_part in self._kept(local, owned):
            owned_part.copy_(local_part)
        if self.copies:
            return
        for local_part, packed in self._sent(local):
            packed.copy_(local_part)
        self._exchange.to_owners(self._lane)()
        for owned_part, packed in self._received(owned):
            owned_part.copy_(packed)

    def scatter(self, owned: Mapping[int, Tensor], local: Mapping[int, Tensor]) -> None:
        """Bring updates back: `gather` the other way round."""
        for owned_part, packed in self._received(owned):
            packed.copy_(owned_part)
        self._exchange.back(self._lane)()
        for local_part, packed in self._sent(local):
            local_part.copy_(packed)
        for local_part, owned_part in self._kept(local, owned):
            local_part.copy_(owned_part)

    def _kept(self, local: Mapping[int, Tensor], owned: Mapping[int, Tensor]) -> Pairs:
        """The elements that this rank both holds and owns, in each of the two."""
        for number, own in owned.items():
            t = self._tensors[number]
            for piece in t.holding.pieces(self._rank, *t.owned_range):
                yield piece.here(local[number]), self._in_owned(number, piece, own)

    def _sent(self, local: Mapping[int, Tensor]) -> Pairs:
        """The elements that others own: in this rank's memory, and in the exchange."""
        for i, part in self._exchange.parts.items():
            number, index = self._strips[i]
            if number in local:
                for piece, packed in self._packed(number, index, self._rank, part):
                    yield piece.here(local[number]), packed

    def _received(self, owned: Mapping[int, Tensor]) -> Pairs:
        """The elements that others hold: in this rank's own strips, and in the exchange."""
        for (i, rank), part in self._exchange.owned.items():
            number, index = self._strips[i]
            if number in owned:
                for piece, packed in self._packed(number, index, rank, part):
                    yield self._in_owned(number, piece, owned[number]), packed

    def _packed(self, number: int, index: int, rank: int, packed: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces of a strip on a rank, each with its place in the exchanged part of the strip."""
        t = self._tensors[number]
        strip, at = t.grid.strip(index), 0
        for piece in t.holding.pieces(rank, strip.start, strip.stop):
            yield piece, packed[at : at + piece.numel].view(piece.shape)
            at += piece.numel

    def _in_owned(self, number: int, piece: Piece, owned: Tensor) -> Tensor:
        """A piece of a tensor in this rank's own strips of it."""
        return piece.moved(-self._tensors[number].owned_range[0]).of(owned)
