"""Codes and scales of whole tensors where they arrived, in place of gathered values.

codes            |   rank 0   |   rank 1   |   rank 2   |    as they arrived: a tensor's lie together
received scales  | rank 0 |   | rank 1     | rank 2  |  |    padded; those of a cut tile are there twice
scales           | tensor a | tensor b | tensor c |          copied from there: each tensor's, row-major over tiles
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from ...memory.recycler import Recycler
from ...memory.scratch import Scratch
from ..tiles import RowRun
from .planes import CodePlanes
from .tensor import BlockQuantizedTensor


class GatheredCodes:
    """Gathered tensors that stay codes.

    Attributes:
        views: a `BlockQuantizedTensor` for each of the layout's tensors, in its own shape. Always the same objects.

    Args:
        planes: where codes and scales of all ranks arrive.
        dtype: of the values.
        codes: memory of the planes of codes, one a segment.
        recycler: where memory for the scales comes from.

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
        # The views' memory has version counters of its own: a gather is no change in autograd's eyes.
        flats = [_alias(one.flat) for one in codes]
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

    def materialize(self) -> None:
        """Have memory for scales, for use on the current stream."""
        self._scales.materialize()

    def take(self, received: torch.Tensor) -> None:
        """Copy each tensor's scales together."""
        torch.index_select(received, 0, self._index, out=self._written)

    def release(self) -> None:
        """Free codes and scales. On CUDA call it on the stream of the last use."""
        for one in (*self._codes, self._scales):
            one.release()

    def condemn(self) -> None:
        """Never use the memory of the scales again; that of the codes is its owner's to condemn."""
        self._scales.condemn()


def num_gathered_scales(planes: CodePlanes) -> int:
    """How many scales all tensors of a layout have together, each tile's once."""
    return sum(planes.format.grid(spec.shape).num_scales for spec in planes.layout.tensors)


def _scales_of_tensors(planes: CodePlanes) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Where each tensor's scales begin, by its segment and offset; and where each of them lies in what arrives."""
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
    """Another tensor on the same memory, with a version counter of its own."""
    return flat.new_empty(0).set_(flat.untyped_storage(), 0, flat.shape, (1,))
