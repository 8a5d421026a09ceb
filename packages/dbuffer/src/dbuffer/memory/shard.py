"""The shard of a buffer: this rank's slices, one storage a segment, which may be given away and made again."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ragged_shard import DeviceLayer, PinnedMemory

from .geometry import Geometry
from .huge_pages import SMALLEST, prefer_huge_pages
from .recycler import check_aligned

_NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


class ShardMemory:
    """This rank's slices and the views into them.

    Args:
        device: where they are.
        pinned_for: the device whose copies page-locked memory is for; None: the memory is not page-locked.

    Attributes:
        flats: 1-D, `shard_size` elements each, one a segment; empty after `give`.
        views: this rank's slice of each tensor, in its local shape.
        gaps: the runs of `flats` that hold padding.
    """

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device, pinned_for: DeviceLayer | None
    ) -> None:
        self._geometry = geometry
        self._dtype, self._device = dtype, device
        self._pinned: list[PinnedMemory] = []  # one a segment, or none
        if pinned_for is not None:
            for segment in geometry.layout.segments:
                self._pinned.append(PinnedMemory(pinned_for, segment.shard_size, dtype))
        self.flats: tuple[torch.Tensor, ...] = ()
        self.views = _NOTHING
        self.gaps: list[torch.Tensor] = []
        self.allocate(zeroed=True)

    def allocate(self, *, zeroed: bool = False) -> None:
        """Allocate memory, also again after `give`; uninitialised, padding too, unless `zeroed`."""
        geometry = self._geometry
        flats: list[torch.Tensor] = []
        for index, segment in enumerate(geometry.layout.segments):
            if self._pinned:
                flat = self._pinned[index].empty()
            else:
                flat = torch.empty(segment.shard_size, dtype=self._dtype, device=self._device)
                if flat.nbytes >= SMALLEST:
                    prefer_huge_pages(flat)
            if zeroed:
                flat.zero_()
            check_aligned(flat.data_ptr())
            flats.append(flat)
        views: dict[str, torch.Tensor] = {}
        for name, part in geometry.slices.items():  # one op a view; in steps too, gradients get new memory
            views[name] = flats[part.segment].as_strided(part.local_shape, part.local_stride, part.begin)
        self.views = MappingProxyType(views)
        if geometry.gaps:
            self.gaps = geometry.gaps_in(flats)
        self.flats = tuple(flats)  # last: an interrupt before leaves no shard, not one without views or gaps

    def give(self) -> None:
        """Detach the memory: it belongs to the tensors that still view it, and is freed with the last of them."""
        self.flats, self.views, self.gaps = (), _NOTHING, []
