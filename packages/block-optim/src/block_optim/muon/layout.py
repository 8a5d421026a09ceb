"""Layout of a bucket's matrices on one rank: runs of parameters, stacks of whole matrices, exchange buffers.

    local run     elements of a matrix that this rank holds; packed into the owner's stack if this rank is the owner,
                  else into the exchange's `parts`
    remote run    elements of a matrix that this rank owns and another one holds; arrives in the exchange's `owned`
    stack         this rank's whole matrices of one shape, bf16

Where every rank holds all matrices, the stacks are in the exchange's buffer: there are no remote runs, and those local
runs that are another's are only received.

All of it is laid out once, in scratch memory that buckets share.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim.core.exchange import CopyExchange, Exchange
from block_optim.core.holding import Holding
from block_optim.core.scratch import Scratch
from block_optim.muon.assignment import AssignedMatrix
from block_optim.muon.local import LocalParam

PACKED = torch.bfloat16
EXCHANGE_SLOTS = 3  # exchanges under way or unread at once: of the next bucket, this one, the last
STACK_SLOTS = 2  # buckets whose own matrices are in memory at once


@dataclass
class LocalRun:
    """A run of a matrix that this rank holds."""

    number: int  # number of the matrix in the bucket
    param: LocalParam
    # low, high: the run's elements of the parameter's local ones
    low: int
    high: int
    # where it is packed and where its update arrives, bf16: a run is 1-D, runs at equal distances are 2-D
    packed: torch.Tensor
    own: bool  # whether this rank computes the matrix
    row: int  # the run's first row in the matrix (NorMuon)
    side: int  # the run's first row among the sent rows of the side exchange (NorMuon)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The run's elements of the parameter, its gradient or its momentum: of a flat local tensor."""
        return local[self.low : self.high].view(self.packed.shape)

    @property
    def rows(self) -> torch.Tensor:
        """NorMuon's second moments of the run's rows."""
        return self.param.rows(self.low, self.high)


@dataclass
class RemoteRun:
    """A run of a matrix that this rank computes and another rank holds."""

    number: int  # number of the matrix in the bucket
    stack: torch.Tensor  # its elements of the matrix in the stack
    packed: torch.Tensor  # where it arrives, and where its update is sent from
    row: int  # the run's first row in the matrix (NorMuon)
    rows: torch.Tensor | None  # the second moments of its rows in the side exchange (NorMuon)


class BucketLayout:
    """The memory of one bucket.

    Args:
        matrices: the bucket's matrices, equal shapes side by side.
        params: this rank's parameters by index.
        holding: of one of the parameters: the process group, and this rank in it.
        normuon: whether second moments of rows are exchanged, too.
        number: of the bucket; selects the buffers that it shares with others.
    """

    def __init__(
        self,
        matrices: Sequence[AssignedMatrix],
        params: Sequence[LocalParam],
        holding: Holding,
        *,
        normuon: bool,
        number: int,
        scratch: Scratch,
    ) -> None:
        self.matrices, self.rank, self.scratch, self.number = matrices, holding.rank, scratch, number
        # exchange, side: the exchanges of matrices and of NorMuon's rows; None where nothing is exchanged
        self.exchange: Exchange | CopyExchange | None = None
        self.side: Exchange | CopyExchange | None = None
        self.copies = holding.copies
        kind: Any = CopyExchange if self.copies else Exchange
        if any(m.bytes_sent for m in matrices):
            owners, slot = [m.owner for m in matrices], str(number % EXCHANGE_SLOTS)
            self.exchange = kind(holding, owners, [m.lengths() for m in matrices], PACKED, scratch, slot)
            if normuon:
                lengths = [m.side_lengths() for m in matrices]
                self.side = kind(holding, owners, lengths, torch.float32, scratch, f"side {slot}")
        self.stacks: list[tuple[torch.Tensor, list[int]]] = []  # (matrices of one shape, their numbers)
        self.own: dict[int, torch.Tensor] = {}  # each of this rank's own matrices, 1-D, by number
        self._lay_out_stacks()
        # local_runs, remote_runs: see the module
        self.local_runs: list[LocalRun] = []
        self.remote_runs: list[RemoteRun] = []
        for i, m in enumerate(matrices):
            self._lay_out(i, m, params[m.param])

    def _lay_out_stacks(self) -> None:
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, m in enumerate(self.matrices):
            if m.owner == self.rank:
                by_shape[m.matrix.rows, m.matrix.columns].append(i)
        total = sum(rows * columns * len(own) for (rows, columns), own in by_shape.items())
        if isinstance(self.exchange, CopyExchange):
            arena = self.exchange.own
        else:
            arena = self.scratch.take(f"stacks {self.number % STACK_SLOTS}", (total,), PACKED)
        start = 0
        for (rows, columns), own in by_shape.items():
            stop = start + rows * columns * len(own)
            stack = arena[start:stop].view(len(own), rows, columns)
            self.stacks.append((stack, own))
            self.own.update({i: stack[k].view(-1) for k, i in enumerate(own)})
            start = stop

    def _lay_out(self, i: int, m: AssignedMatrix, param: LocalParam) -> None:
        """Add the runs of a matrix that this rank holds or owns."""
        columns, exchange = m.matrix.columns, self.exchange
        for rank in [self.rank] if self.copies else [rank for rank, _ in m.holders]:
            if self.rank not in (rank, m.owner):
                continue
            at = 0  # in the elements of this matrix that the rank sends
            for piece in m.matrix.pieces(param.holding, rank):
                row, side, stop = piece.first // columns, at // columns, at + piece.numel
                if rank == self.rank == m.owner:
                    packed = piece.of(self.own[i])
                else:
                    assert exchange is not None
                    flat = exchange.parts[i] if rank == self.rank else exchange.owned[i, rank]
                    packed = flat[at:stop].view(piece.shape)
                if rank == self.rank:
                    low, own = piece.local, m.owner == rank
                    self.local_runs.append(LocalRun(i, param, low, low + piece.numel, packed, own, row, side))
                else:
                    rows = None
                    if self.side is not None:
                        rows = self.side.owned[i, rank][side : stop // columns]
                    self.remote_runs.append(RemoteRun(i, piece.of(self.own[i]), packed, row, rows))
                at = stop

    def buffers(self, name: str, runs: Sequence[LocalRun], dtype: torch.dtype) -> list[torch.Tensor]:
        """Scratch memory in the shape of each run, contiguous over all of them."""
        lengths = [run.high - run.low for run in runs]
        flat = self.scratch.take(name, (sum(lengths),), dtype).split(lengths)
        return [t.view(run.packed.shape) for t, run in zip(flat, runs, strict=True)]
