"""The bytes that one rank sends of a buffer: codes and scales of its rows of each tensor. Arithmetic only, no memory.

    a rank's row   | codes of segment 0 | codes of segment 1 | scales of both |
    a payload      | row of rank 0 | row of rank 1 | row of rank 2 |

All ranks' rows have the same size, and their parts begin on 16 bytes. A rank quantizes its rows of each tensor, which
are whole tiles.
"""

from dataclasses import dataclass
from functools import cached_property

from layout_planner import Layout

from .formats import BlockFormat
from .tiles import RowRun, RunList


@dataclass(frozen=True)
class CodeRows:
    """The ranks' rows of one layout in one format.

    Args:
        layout: layout of the values, cut between tiles of every tensor.
        format: format of the codes.

    Raises:
        ValueError: a cut goes through a row or a tile, by the tensor's name. On first use.
    """

    layout: Layout
    format: BlockFormat

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank's codes and scales."""
        return self._begins[-1]

    def of_rank(self, rank: int, begin: int = 0) -> list[RunList]:
        """A rank's runs by segment, from the start of its shard, of its row's bytes and of these as fp32.

        Args:
            rank: on the shard axis.
            begin: offset of these codes and scales in a longer row; a multiple of 16.
        """
        scales = begin + self._begins[-2]
        return [
            RunList(run.moved(0, begin + codes, scales // 4, 0) for run in runs)
            for codes, runs in zip(self._begins, self._runs[rank], strict=False)
        ]

    def of_all(self, begin: int = 0, width: int | None = None) -> list[RunList]:
        """All ranks' runs by segment, from the start of the gathered memory and of the payload.

        Args:
            begin: as for `of_rank`.
            width: bytes of the longer row. Defaults to `row_bytes`.
        """
        width, ranks = width or self.row_bytes, range(self.layout.world_size)
        by_rank = [self.of_rank(rank, begin) for rank in ranks]
        elements, by_segment = 0, []
        for index, segment in enumerate(self.layout.segments):
            by_segment.append(
                RunList(
                    run.moved(rank * segment.shard_size, rank * width, rank * width // 4, elements)
                    for rank in ranks
                    for run in by_rank[rank][index]
                )
            )
            elements += len(ranks) * segment.shard_size
        return by_segment

    @cached_property
    def _runs(self) -> list[list[list[RowRun]]]:
        return [self._runs_of(rank) for rank in range(self.layout.world_size)]

    @cached_property
    def _begins(self) -> list[int]:
        """Where each segment's codes, the scales, and the next row begin."""
        codes, scales = [0] * len(self.layout.segments), 0
        for by_segment in self._runs:
            for segment, runs in enumerate(by_segment):
                for run in runs:
                    end = run.codes + (run.stop - run.start) * self.format.code_bytes(run.grid.columns)
                    codes[segment] = max(codes[segment], end)
                    scales = max(scales, run.scales + run.num_scales)
        begins = [0]
        for size in (*codes, 4 * scales):
            begins.append(begins[-1] + -(-size // 16) * 16)
        return begins

    def _runs_of(self, rank: int) -> list[list[RowRun]]:
        """A rank's runs by segment: values count from its shard's start, codes from the segment's, scales from all."""
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
                run = RowRun(grid, first, last, values, codes, scales, element=offset + start)
                codes += (last - first) * self.format.code_bytes(grid.columns)
                scales += run.num_scales
                runs.append(run)
            by_segment.append(runs)
        return by_segment
