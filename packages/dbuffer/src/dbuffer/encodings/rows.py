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

    Raises:
        ValueError: a cut of the layout goes through a row or a tile, by the tensor's name. On first use.
    """

    layout: Layout
    format: BlockFormat

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one rank's codes and scales: of the rank that has most."""
        return max(end for _, end in self._rows)

    def of_rank(self, rank: int, begin: int = 0) -> list[RunList]:
        """A rank's runs by segment, from the start of its shard, of its row's bytes and of these as fp32.

        Args:
            rank: on the shard axis.
            begin: offset of these codes and scales in a longer row; a multiple of 16.
        """
        runs, _ = self._rows[rank]
        return [RunList(run.moved(0, begin, begin // 4, 0) for run in in_segment) for in_segment in runs]

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
    def _rows(self) -> list[tuple[list[list[RowRun]], int]]:
        return [self._row(rank) for rank in range(self.layout.world_size)]

    def _row(self, rank: int) -> tuple[list[list[RowRun]], int]:
        """A rank's runs by segment, from the start of its shard and its row, and the end of the row."""
        by_segment, codes, scales = [], 0, 0
        for segment in self.layout.segments:
            runs, codes = [], aligned(codes)
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
        begin = aligned(codes)
        placed = [[run.moved(0, 0, begin // 4, 0) for run in runs] for runs in by_segment]
        return placed, aligned(begin + 4 * scales)


def aligned(nbytes: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-nbytes // 16) * 16
