"""Strips that no rank holds whole: their gradients go to owners, their updates come back.

    each rank holds parts of strips                         an owner works on whole strips
      parts of gradients   -- one all_to_all_single -->       gradients
      parts of updates     <-- one all_to_all_single --       updates

Everything travels in the compute dtype, so that nothing is lost. An owner's own part does not travel.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from block_optim._exchange import Exchange, lane_for
from block_optim._newton_schulz import Scratch
from block_optim._shampoo_owners import Ownership


class StripExchange:
    """The strips that travel over one process group in one dtype.

    Args:
        group: the process group; ranks here are ranks in it.
        tensors: the ownership of each tensor that has moving strips, by its number.
        dtype: what travels.
        slot: a name for the buffers, unlike that of other exchanges of the optimizer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensors: Mapping[int, Ownership],
        dtype: torch.dtype,
        device: torch.device,
        slot: str,
    ) -> None:
        self._group, self._tensors, self._device = group, dict(tensors), device
        self._lane = lane_for(device)
        self.rank = next(iter(tensors.values())).cut.rank
        self._strips: list[tuple[int, int]] = []
        self._parts: list[dict[int, tuple[int, int]]] = []  # rank -> the elements of the strip that it holds
        owners: list[int] = []
        for number, owned in self._tensors.items():
            for index in owned.moving:
                strip = owned.grid.strip(index)
                ranges = [(max(a, strip.start), min(b, strip.stop)) for a, b in owned.cut.ranges]
                self._strips.append((number, index))
                self._parts.append({rank: (a, b) for rank, (a, b) in enumerate(ranges) if a < b})
                owners.append(owned.owners[index])
        lengths = [[(rank, b - a) for rank, (a, b) in parts.items()] for parts in self._parts]
        self._wire = Exchange(group, self.rank, owners, lengths, dtype, Scratch(device), slot)
        travels = sum(n for o, parts in zip(owners, lengths, strict=True) for r, n in parts if r != o)
        self.bytes_per_step = 2 * travels * dtype.itemsize

    @property
    def numbers(self) -> list[int]:
        """The tensors."""
        return list(self._tensors)

    def agree(self, present: Sequence[bool]) -> list[bool]:
        """Which tensors have a gradient on some rank: one all_reduce of a byte for each."""
        flags = torch.tensor([int(p) for p in present], dtype=torch.uint8, device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]

    def gather(self, parts: Mapping[int, Tensor], owned: Mapping[int, Tensor]) -> None:
        """Bring gradients to their owners.

        Args:
            parts: this rank's part of each tensor, flat; where a tensor has none, zeros are sent.
            owned: room for what this rank owns of each tensor, flat; filled, this rank's own part too.
        """
        for number, room in owned.items():
            ownership = self._tensors[number]
            (first, last), (start, stop) = ownership.cut.own, ownership.owned_range
            low, high = max(first, start), min(last, stop)
            if low >= high:
                continue
            if number in parts:
                room[low - start : high - start].copy_(parts[number][low - first : high - first])
            else:
                room[low - start : high - start].zero_()
        for i, sent in self._wire.held.items():
            number = self._strips[i][0]
            if number in parts:
                sent.copy_(self._held_part(i, parts[number]))
            else:
                sent.zero_()
        self._wire.to_owners(self._lane)()
        for (i, rank), received in self._wire.owned.items():
            number = self._strips[i][0]
            if number in owned:
                self._owned_part(i, rank, owned[number]).copy_(received)

    def scatter(self, owned: Mapping[int, Tensor], parts: Mapping[int, Tensor]) -> None:
        """Bring updates back: `gather` the other way round. Tensors that are missing are left as they are."""
        for (i, rank), sent in self._wire.owned.items():
            number = self._strips[i][0]
            if number in owned:
                sent.copy_(self._owned_part(i, rank, owned[number]))
        self._wire.back(self._lane)()
        for i, received in self._wire.held.items():
            number = self._strips[i][0]
            if number in parts:
                self._held_part(i, parts[number]).copy_(received)
        for number, part in parts.items():
            ownership = self._tensors[number]
            (first, last), (start, stop) = ownership.cut.own, ownership.owned_range
            low, high = max(first, start), min(last, stop)
            if low < high and number in owned:
                part[low - first : high - first].copy_(owned[number][low - start : high - start])

    def _held_part(self, i: int, flat: Tensor) -> Tensor:
        number, _ = self._strips[i]
        start, stop = self._parts[i][self.rank]
        base = self._tensors[number].cut.own[0]
        return flat[start - base : stop - base]

    def _owned_part(self, i: int, rank: int, flat: Tensor) -> Tensor:
        number, _ = self._strips[i]
        start, stop = self._parts[i][rank]
        base = self._tensors[number].owned_range[0]
        return flat[start - base : stop - base]
