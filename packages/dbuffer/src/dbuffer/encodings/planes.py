"""Positions of every rank's codes and scales in the payload of a collective: arithmetic only, no memory.

    codes    |   rank 0   |   rank 1   |   rank 2   |     one plane a segment; a byte at the element's position
    scales   | rank 0 |   | rank 1     | rank 2  |  |     one plane; each rank has room for the largest number

A rank quantizes its rows of each tensor, which are whole tiles.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from layout_planner import Layout

from .blocks import BlockFormat
from .tiles import RowRun, RunList


@dataclass(frozen=True)
class CodePlanes:
    """The planes of one layout in one format.

    Args:
        layout: layout of the values, cut between tiles of every tensor.
        format: format of the codes.

    Raises:
        ValueError: a cut goes through a row or a tile, by the tensor's name. On first use.
    """

    layout: Layout
    format: BlockFormat

    @cached_property
    def code_bytes(self) -> tuple[int, ...]:
        """Bytes of one rank's codes, by segment; multiples of 16: the shard size if a code is a byte."""
        return self._sizes[0]

    @cached_property
    def num_scales(self) -> int:
        """Number of one rank's scales; their bytes are a multiple of 16."""
        return self._sizes[1]

    @property
    def scale_bytes(self) -> int:
        """Bytes of one rank's scales."""
        return 4 * self.num_scales

    @property
    def row_bytes(self) -> int:
        """Bytes that a rank sends to each other rank: codes and scales."""
        return sum(self.code_bytes) + self.scale_bytes

    def runs(self, rank: int) -> tuple[RunList, ...]:
        """A rank's runs by segment, counted from the start of its shard, its codes and its scales."""
        return self._runs[rank]

    def gathered_runs(self, segment: int) -> RunList:
        """All ranks' runs of a segment, counted from the start of the gathered memory and planes."""
        size, codes = self.layout.segments[segment].shard_size, self.code_bytes[segment]
        return RunList(
            replace(
                run,
                values=run.values + rank * size,
                codes=run.codes + rank * codes,
                scales=run.scales + rank * self.num_scales,
            )
            for rank, runs in enumerate(self._runs)
            for run in runs[segment]
        )

    @cached_property
    def _runs(self) -> list[tuple[RunList, ...]]:
        return [self._runs_of(rank) for rank in range(self.layout.world_size)]

    @cached_property
    def like_values(self) -> bool:
        """Whether a code is a byte, so that codes are laid out like the elements."""
        grids = [self.format.grid(spec.shape) for spec in self.layout.tensors]
        return all(self.format.code_bytes(grid.columns) == grid.columns for grid in grids)

    @cached_property
    def _sizes(self) -> tuple[tuple[int, ...], int]:
        codes = [0] * len(self.layout.segments)
        scales = 0
        for by_segment in self._runs:
            for segment, runs in enumerate(by_segment):
                for run in runs:
                    end = run.codes + (run.stop - run.start) * self.format.code_bytes(run.grid.columns)
                    codes[segment] = max(codes[segment], end)
                    scales = max(scales, run.scales + run.num_scales)
        if self.like_values:
            codes = [segment.shard_size for segment in self.layout.segments]
        return tuple(-(-size // 16) * 16 for size in codes), -(-scales // 4) * 4

    def _runs_of(self, rank: int) -> tuple[RunList, ...]:
        by_segment, scales = [], 0
        for segment in self.layout.segments:
            runs, codes = [], 0
            for name, offset in zip(segment.names, segment.offsets, strict=True):
                start, stop = self.layout.local_range(name, rank)
                if start == stop:
                    continue
                grid = self.format.grid(self.layout.spec(name).shape)
                if start % grid.columns or stop % grid.columns:
                    raise ValueError(
                        f"{name}: rank {rank} holds the elements [{start}, {stop}), which cuts rows of {grid.columns}; "
                        "plan with blocks of whole rows"
                    )
                first, last = start // grid.columns, stop // grid.columns
                if not grid.is_whole(first, last):
                    raise ValueError(
                        f"{name}: rank {rank} holds the rows [{first}, {last}), which cuts tiles of {grid.tile}; "
                        "plan with blocks of whole tiles"
                    )
                values = offset + start - rank * segment.shard_size
                run = RowRun(
                    grid, first, last, values=values, scales=scales,
                    codes=values if self.like_values else codes, element=offset + start,
                )  # fmt: skip
                codes += (run.stop - run.start) * self.format.code_bytes(grid.columns)
                scales += run.num_scales
                runs.append(run)
            by_segment.append(RunList(runs))
        return tuple(by_segment)
