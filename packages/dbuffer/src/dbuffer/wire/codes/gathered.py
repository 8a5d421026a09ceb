"""Received codes and scales of whole tensors, instead of gathered values.

codes            |   rank 0   |   rank 1   |   rank 2   |    as received: a tensor's are contiguous
received scales  | rank 0 |   | rank 1     | rank 2  |  |    padded; those of a cut tile occur twice
scales           | tensor a | tensor b | tensor c |          copied: each tensor's, row-major over tiles
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from ...memory.recycler import Recycler, Scratch
from ..tiles import RowRun
from .planes import CodePlanes
from .tensor import BlockQuantizedTensor


class GatheredCodes:
    """Gathered tensors that stay codes.

    Attributes:
        views: a `BlockQuantizedTensor` for each of the layout's tensors, in its shape. Always the same objects.

    Args:
        planes: positions of the received codes and scales.
        dtype: dtype of the values.
        codes: memory of the planes of codes, one a segment.
        recycler: source of the scales' memory.

    Raises:
        ValueError: a code is not a byte.
    """

    def __init__(
        self, planes: CodePlanes, dtype: torch.dtype, codes: Sequence[Scratch], recycler: Recycler
    ) -> None:
        if not planes.like_values:
            raise ValueError(
                f"codes of {planes.format} can only be read back: with read_back=False each must be a byte"
            )
        first, index = _scales_of_tensors(planes)
        self._index = torch.tensor(index, dtype=torch.int32, device=recycler.device)
        self._codes = codes
        self._scales = Scratch(recycler, 4 * len(index))
        self._written = self._scales.flat.view(torch.float32)
        # Separate version counters: to autograd a gather is no change of the views.
        for scratch in (*codes, self._scales):
            scratch.materialize()  # `set_` would give an empty storage memory that nobody takes back
        flats = [_alias(scratch.flat) for scratch in codes]
        scales = _alias(self._scales.flat).view(torch.float32)
        views = {}
        for at, segment in enumerate(planes.layout.segments):
            for name, offset in zip(segment.names, segment.offsets, strict=True):
                spec = planes.layout.spec(name)
                grid = planes.format.grid(spec.shape)
                views[name] = BlockQuantizedTensor(
                    flats[at].narrow(0, offset, spec.numel),
                    scales.narrow(0, first[at, offset], grid.num_scales),
                    planes.format,
                    RowRun(grid, 0, grid.rows),
                    spec.shape,
                    dtype,
                )
        names = [spec.name for spec in planes.layout.tensors]
        self.views: Mapping[str, torch.Tensor] = MappingProxyType({name: views[name] for name in names})
        self.release()

    def materialize(self) -> None:
        """Allocate the scales, for use on the current stream."""
        self._scales.materialize()

    def take(self, received: torch.Tensor) -> None:
        """Copy each tensor's scales together."""
        torch.index_select(received, 0, self._index, out=self._written)

    def release(self) -> None:
        """Free codes and scales. On CUDA call it on the stream of the last use."""
        for scratch in (*self._codes, self._scales):
            scratch.release()

    def retire(self) -> None:
        """Never use the memory of the scales again; the owner of the codes does the same."""
        self._scales.retire()


def num_gathered_scales(planes: CodePlanes) -> int:
    """Number of scales of all tensors of a layout, each tile's once."""
    return sum(planes.format.grid(spec.shape).num_scales for spec in planes.layout.tensors)


def _scales_of_tensors(planes: CodePlanes) -> tuple[dict[tuple[int, int], int], list[int]]:
    """First scale of each tensor, by its segment and offset; and the received position of each scale."""
    first, count = {}, 0
    for at, segment in enumerate(planes.layout.segments):
        for name, offset in zip(segment.names, segment.offsets, strict=True):
            first[at, offset] = count
            count += planes.format.grid(planes.layout.spec(name).shape).num_scales
    index = [0] * count
    for rank in range(planes.layout.world_size):
        for at, runs in enumerate(planes.runs(rank)):
            for run in runs:
                grid = run.grid
                begin, end = grid.scales_of(run.start, run.stop)
                tensor = first[at, run.element - run.start * grid.columns]
                arrived = rank * planes.num_scales + run.scales
                index[tensor + begin : tensor + end] = range(arrived, arrived + end - begin)
    return first, index


def _alias(flat: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same memory, with a separate version counter."""
    return flat.new_empty(0).set_(flat.untyped_storage(), 0, flat.shape, (1,))
