"""The blocks that this rank owns of each tensor, and the memory of their states.

owned run of a tensor, flat         |-------- strip --------|-------- strip --------|
as a matrix                          rows x all columns; a block is some of the columns
states of the tensor's shape         the same run: momentum, second moments
factors, roots, bases                one 1-D tensor for each side, block after block
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from block_optim.core._torch_compat import local_of
from block_optim.core.holding import Holding
from block_optim.core.params import Group, Param
from block_optim.core.pieces import run
from block_optim.shampoo.grid import Grid, grid_of
from block_optim.shampoo.strips import StripAssignment, assign_strips

ROWS, COLS = "rows", "cols"
SIDES = (ROWS, COLS)


@dataclass(slots=True, eq=False)
class OwnedBlock:
    """One block that this rank owns."""

    tensor: "TensorPlan"
    # rows, cols: its size
    rows: int
    cols: int
    column: int  # its first one, of a strip that begins at element `offset` of the owned run
    offset: int
    # among all blocks of this size in the model, in the optimizer's order: the same at every world size
    number: int
    # its elements of each state, by name; see `TensorPlan.bind`
    views: dict[str, Tensor] = field(default_factory=dict)

    def of(self, flat: Tensor) -> Tensor:
        """This block (rows, cols) of an owned run."""
        width = self.tensor.grid_of_blocks.cols
        strip = flat[self.offset : self.offset + self.rows * width].view(self.rows, width)
        return strip[:, self.column : self.column + self.cols]

    def dim(self, side: str) -> int:
        """Size along one side."""
        return self.rows if side == ROWS else self.cols

    def diagonal(self, side: str) -> bool:
        """Whether the factor of a side is diagonal."""
        return self.tensor.diagonal(side)


class TensorPlan:
    """One parameter: its grid, the strips of it that this rank owns, and their blocks."""

    def __init__(self, param: Param, number: int, grid: Grid | None, holding: Holding) -> None:
        # Without a grid it goes element by element: it is cut anywhere, and nothing of it moves.
        self.param, self.number, self.grid, self.holding = param, number, grid, holding
        self.assignment: StripAssignment | None = None
        self.blocks: list[OwnedBlock] = []
        self._sides: dict[str, str | None] = {}  # of each state; None: it has the parameter's shape
        # the dtype of all arithmetic
        self.compute = torch.float64 if param.dtype == torch.float64 else torch.float32

    @property
    def group(self) -> Group:
        """The parameter's options."""
        return self.param.group

    @property
    def grid_of_blocks(self) -> Grid:
        """The grid of a tensor that has one."""
        assert self.grid is not None
        return self.grid

    @property
    def moves(self) -> bool:
        """Whether strips of it are exchanged, between any ranks."""
        return self.assignment is not None and bool(self.assignment.moving)

    @property
    def owned_numel(self) -> int:
        """How many elements this rank works on: one run."""
        if self.assignment is None:
            return self.holding.numel
        start, stop = self.assignment.owned_range
        return stop - start

    def own(self, assignment: StripAssignment, counts: dict[tuple[int, int], int]) -> None:
        """Take this rank's strips; `counts` numbers the blocks of each size over the whole model, from 0."""
        self.assignment = assignment
        grid, own_strips = self.grid_of_blocks, assignment.owned
        base = assignment.owned_range[0]
        for index in range(grid.num_strips):
            strip = grid.strip(index)
            for column, width in grid.columns:
                size = (strip.rows, width)
                if index in own_strips:
                    self.blocks.append(OwnedBlock(self, *size, column, strip.start - base, counts[size]))
                counts[size] += 1

    def zeros(self, numel: int | None = None) -> Tensor:
        """Zeros in the compute dtype, by default as many as this rank holds elements."""
        numel = self.param.local.numel() if numel is None else numel
        return torch.zeros(numel, dtype=self.compute, device=self.param.device)

    def add_owned(self, state: dict[str, Tensor], name: str) -> None:
        """Add a state of zeros of the parameter's shape, each strip on its owner; locally it may be taken flat."""
        if self.moves:
            assert self.assignment is not None
            local = self.zeros(self.owned_numel)
            state[name] = self.holding.state(local, self.param.shape, self.assignment.elements())
        else:
            state[name] = self.param.zeros(self.compute)
        self._sides[name] = None

    def add_sides(self, state: dict[str, Tensor], kind: str, *, diagonal: bool = True) -> None:
        """Add a 1-D state of zeros for each side, with each block's factor or root or basis on the block's owner.

        Without `diagonal` only for sides whose factors are full.
        """
        assert self.assignment is not None
        grid = self.grid_of_blocks
        for side in [side for side in SIDES if diagonal or not self.diagonal(side)]:
            lengths = [0] * self.holding.num_ranks
            for index, owner in enumerate(self.assignment.owners):
                rows = grid.strip(index).rows
                lengths[owner] += sum(self._numel(side, rows, width) for _, width in grid.columns)
            local = self.zeros(lengths[self.holding.rank])
            state[f"{kind}_{side}"] = self.holding.state(local, (sum(lengths),), lengths)
            self._sides[f"{kind}_{side}"] = side

    def diagonal(self, side: str) -> bool:
        """Whether the factors of a side are diagonal."""
        return self.grid_of_blocks.diagonal_rows if side == ROWS else self.grid_of_blocks.diagonal_cols

    def _numel(self, side: str, rows: int, cols: int) -> int:
        dim = rows if side == ROWS else cols
        return dim if self.diagonal(side) else dim * dim

    def flat(self, name: str) -> Tensor | None:
        """This rank's elements of a state, 1-D; None if the tensor has no such state."""
        state = self.param.states.get(name)
        return None if state is None else local_of(state).view(-1)

    def bind(self, state: Mapping[str, Tensor]) -> None:
        """Point the blocks' views to the memory that the states have now."""
        for name, side in self._sides.items() if self.blocks else ():
            flat = local_of(state[name]).view(-1)
            if side is None:
                views = [block.of(flat) for block in self.blocks]
            else:
                views = list(flat.split([self._numel(side, block.rows, block.cols) for block in self.blocks]))
            for block, view in zip(self.blocks, views, strict=True):
                block.views[name] = view


class Plan:
    """All tensors of an optimizer; grows with its groups."""

    def __init__(self) -> None:
        self.tensors: dict[Tensor, TensorPlan] = {}
        self._loads: dict[str, list[int]] = {}
        self._added = 0

    def add(self, params: Sequence[Param], everyone: Iterable[Param]) -> list[TensorPlan]:
        """Plan parameters of one group. Communicates nothing; the result is the same on every rank.

        Blocks are numbered over ``everyone``, the optimizer's parameters, so that blocks of a parameter that is frozen
        at first have the numbers that they would have had.
        """
        result: list[TensorPlan] = []
        for param in params:
            if param.tensor in self.tensors:
                continue
            grid = grid_of(tuple(param.shape), param.group)
            if grid is not None:
                holding = param.work_holding().in_order()
            else:  # each rank works on its elements
                holding = Holding(param.mesh, (), (), 0, (run(0, param.local.numel()),))
            result.append(TensorPlan(param, self._added, grid, holding))
            self._added += 1
        gridded = [t for t in result if t.grid is not None]
        assigned = assign_strips([(t.grid_of_blocks, t.holding) for t in gridded], self._loads)
        own = {t.param.tensor: (t, a) for t, a in zip(gridded, assigned, strict=True)}
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for param in everyone:
            if param.tensor in own:
                tensor, assignment = own[param.tensor]
                tensor.own(assignment, counts)
            elif (grid := grid_of(tuple(param.shape), param.group)) is not None:
                for size in grid.blocks():
                    counts[size] += 1
        self.tensors.update((t.param.tensor, t) for t in result)
        return [self.tensors[param.tensor] for param in params]
