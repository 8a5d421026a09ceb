"""The gathered memory of a buffer: one storage a segment, empty at rest, and every tensor that will ever view it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from .geometry import Geometry
from .recycler import Recycled, Recycler

Flats = tuple[torch.Tensor, ...]


class GatheredMemory(Recycled):
    """Storages that come and go, and views that stay."""

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, recycler: Recycler, alias: Flats | None = None
    ) -> None:
        super().__init__(recycler)
        self.dtype = dtype
        layout = geometry.layout
        itemsize = dtype.itemsize * layout.world_size
        if alias is None:
            for segment in layout.segments:
                storage = torch.UntypedStorage(0, device=recycler.device)
                self._storages.append((storage, segment.shard_size * itemsize))
            self.materialize()
            self.flats = self._flats(dtype)  # the gathered buffers, 1-D, one a segment
            # The same memory with separate version counters: a gather that writes there changes nothing for autograd.
            self.raw = self._flats(dtype)
            self.own = slices(self.raw, geometry.rank, layout.world_size)  # of `raw`, one a segment
        else:
            self.flats = self.raw = self.own = alias
            self.present = True
        views = {}
        for name, s in geometry.slices.items():
            views[name] = self.flats[s.segment].narrow(0, s.offset, s.numel).view(s.shape)
        # one tensor for each of the layout's, in its own shape
        self.views: Mapping[str, torch.Tensor] = MappingProxyType(views)
        self.own_gaps = geometry.gaps_in(self.own)  # the padding in `own`
        self.release()

    def _flats(self, dtype: torch.dtype) -> Flats:
        device = self._recycler.device
        flats = []
        for storage, nbytes in self._storages:
            empty = torch.empty(0, dtype=dtype, device=device)
            flats.append(empty.set_(storage, 0, (nbytes // dtype.itemsize,), (1,)))
        return tuple(flats)

    def hold_nothing(self) -> None:
        """Hold no memory and no views: the wire form keeps gathered tensors elsewhere."""
        for storage, nbytes in self._storages:
            self._recycler.allocate(storage, nbytes)  # of the construction
            self._recycler.drop(storage)
        self._storages.clear()
        self.flats = self.raw = self.own = ()
        self.own_gaps = []
        self.views = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class NeighborSlices:
    """The part that `DBuffer.shrink` keeps of the gathered memory, until the next gather among a smaller group.

    gathered, 4 ranks   |  S  |  S  |  S  |  S  |
    rank 0 keeps        |  S  |  S  |                in a group of 2: gathered again from one neighbor only
    """

    flats: Flats  # 1-D, one a segment, of equal size on all ranks of the group
    group: dist.ProcessGroup  # whose slices make up the whole, in the order of its ranks
    ready: object  # the event after which they may be read


def slices(flats: Flats, rank: int, size: int) -> Flats:
    """A rank's slice of each flat tensor, which has equal slices of `size` ranks."""
    lengths = [flat.numel() // size for flat in flats]
    return tuple(flat.narrow(0, rank * n, n) for flat, n in zip(flats, lengths, strict=True))
