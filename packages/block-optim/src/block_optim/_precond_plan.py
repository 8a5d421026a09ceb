"""What this rank does for each tensor: the blocks it owns, where their state lies, and when their turn comes.

owned run of a tensor, flat         |-------- strip --------|-------- strip --------|
as a matrix                          rows x all columns; a block is some of the columns
states of the tensor's shape         the same run: momentum, second moments
factors, roots, bases                one 1-D tensor for each side, block after block
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from block_optim import _precond_math as pm
from block_optim._params import Param
from block_optim._shampoo_blocks import Grid, grid_of
from block_optim._shampoo_owners import Cut, Loads, Ownership, assign, cut_of
from block_optim._torch_compat import foreach_copy_, local_of

ROWS, COLS = "rows", "cols"
SIDES = (ROWS, COLS)


class Block:
    """One block that this rank owns.

    Attributes:
        rows, cols: its size.
        number: among all blocks of this size in the model, in the optimizer's order: the same at every world size.
        views: its part of each state, by name; the states keep their memory for life.
    """

    __slots__ = ("cols", "column", "number", "offset", "rows", "tensor", "views")

    def __init__(
        self, tensor: "TensorPlan", rows: int, cols: int, column: int, offset: int, number: int
    ) -> None:
        self.tensor, self.rows, self.cols, self.column = tensor, rows, cols, column
        self.offset, self.number = offset, number
        self.views: dict[str, Tensor] = {}

    def part(self, flat: Tensor) -> Tensor:
        """This block (rows, cols) of an owned run."""
        width = self.tensor.grid_of_blocks.cols
        strip = flat[self.offset : self.offset + self.rows * width].view(self.rows, width)
        return strip[:, self.column : self.column + self.cols]

    def dim(self, side: str) -> int:
        """Size along one side."""
        return self.rows if side == ROWS else self.cols

    def diagonal(self, side: str) -> bool:
        """Whether the factor of a side is diagonal."""
        grid = self.tensor.grid_of_blocks
        return grid.diagonal_rows if side == ROWS else grid.diagonal_cols


class TensorPlan:
    """One parameter: how it is cut, which of its strips this rank owns, and their blocks.

    Attributes:
        grid: its blocks, or None where it goes element by element (it is then cut anywhere, and nothing of it moves).
        compute: the dtype that everything is computed in: fp32, or fp64 for fp64 parameters.
    """

    def __init__(self, param: Param, number: int, group: dict[str, Any], grid: Grid | None, cut: Cut) -> None:
        self.param, self.number, self.group, self.grid, self.cut = param, number, group, grid, cut
        self.ownership: Ownership | None = None
        self.blocks: list[Block] = []
        self.compute = torch.float64 if param.dtype == torch.float64 else torch.float32

    @property
    def grid_of_blocks(self) -> Grid:
        """The grid of a tensor that has one."""
        assert self.grid is not None
        return self.grid

    @property
    def moves(self) -> bool:
        """Whether strips of it travel, here or between other ranks."""
        return self.ownership is not None and bool(self.ownership.moving)

    @property
    def owned_range(self) -> tuple[int, int]:
        """The elements that this rank works on: one run."""
        return self.cut.own if self.ownership is None else self.ownership.owned_range

    @property
    def owned_numel(self) -> int:
        """How many these are."""
        start, stop = self.owned_range
        return stop - start

    def own(self, ownership: Ownership, counts: dict[tuple[int, int], int]) -> None:
        """Take over this rank's strips; `counts` numbers the blocks of each size over the whole model."""
        self.ownership = ownership
        grid, mine = self.grid_of_blocks, ownership.owned
        base = ownership.owned_range[0]
        for index in range(grid.num_strips):
            strip = grid.strip(index)
            for block in grid.blocks(strip):
                size = (block.rows, block.cols)
                if index in mine:
                    self.blocks.append(
                        Block(self, *size, block.column, strip.start - base, counts.setdefault(size, 0))
                    )
                counts[size] = counts.get(size, 0) + 1

    def like_param(self, dtype: torch.dtype) -> Tensor:
        """A state of zeros in the parameter's own placement."""
        return self.param.wrap(torch.zeros_like(self.param.local, dtype=dtype))

    def like_owned(self, dtype: torch.dtype) -> Tensor:
        """A state of zeros of the parameter's shape, each strip on its owner; its local part may be taken flat."""
        if not self.moves:
            return self.like_param(dtype)
        assert self.ownership is not None
        local = torch.zeros(self.owned_numel, dtype=dtype, device=self.param.device)
        return self.cut.state(local, self.param.shape, self.ownership.elements())

    def like_blocks(self, size: Callable[[int, int], int], dtype: torch.dtype) -> Tensor:
        """A 1-D state of zeros with `size(rows, cols)` elements for each block, on the block's owner."""
        assert self.ownership is not None
        grid, units = self.grid_of_blocks, [0] * len(self.cut.ranges)
        for index, owner in enumerate(self.ownership.owners):
            strip = grid.strip(index)
            units[owner] += sum(size(strip.rows, width) for _, width in grid.columns)
        local = torch.zeros(units[self.cut.rank], dtype=dtype, device=self.param.device)
        return self.cut.state(local, (sum(units),), units)

    def show(self, name: str, state: Tensor, size: Callable[[int, int], int]) -> None:
        """Give each block its view of a state made by `like_blocks`."""
        local, at = local_of(state), 0
        for block in self.blocks:
            count = size(block.rows, block.cols)
            block.views[name] = local[at : at + count]
            at += count

    def show_owned(self, name: str, state: Tensor) -> None:
        """Give each block its view of a state made by `like_owned`."""
        flat = local_of(state).view(-1)
        for block in self.blocks:
            block.views[name] = block.part(flat)


class Plan:
    """All tensors of an optimizer; grows with its groups."""

    def __init__(self) -> None:
        self.tensors: dict[Tensor, TensorPlan] = {}
        self._loads = Loads()
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, group: dict[str, Any], params: Sequence[Param]) -> list[TensorPlan]:
        """Plan the parameters of one group: nothing is communicated, every rank comes to the same."""
        found: list[TensorPlan] = []
        for param in params:
            grid = group_grid(group, tuple(param.shape))
            cut = _anyhow(param) if grid is None else cut_of(param)
            found.append(TensorPlan(param, len(self.tensors) + len(found), group, grid, cut))
        gridded = [(t, t.grid) for t in found if t.grid is not None]
        owned = assign([(grid, t.cut) for t, grid in gridded], self._loads)
        for (tensor, _), ownership in zip(gridded, owned, strict=True):
            tensor.own(ownership, self._counts)
        self.tensors.update((t.param.param, t) for t in found)
        return found


def group_grid(group: dict[str, Any], shape: tuple[int, ...]) -> Grid | None:
    """The grid that a group's options give a tensor."""
    return grid_of(
        shape, group["max_preconditioner_dim"], diagonal_above=group["diagonal_above"], how=group["matrices"]
    )


def _anyhow(param: Param) -> Cut:
    """A tensor that goes element by element is worked on where it lies, however that is."""
    return Cut(param.mesh, None, 0, ((0, param.local.numel()),))


# ---- batches of blocks


@dataclass
class Batch:
    """Equal blocks that are worked on together; `room` is how many matrices a batched operand has (more on CUDA)."""

    blocks: Sequence[Block]
    room: int
    rows: int
    cols: int
    compute: torch.dtype
    device: torch.device

    def matrices(self, views: Iterable[Tensor]) -> Tensor:
        """(room, rows, cols) of views of that size; zeros behind them."""
        return gather(list(views), self.room, self.rows, self.cols, self.compute, self.device)

    def state(self, name: str) -> Tensor:
        """(room, rows, cols) of a state of the parameter's shape."""
        return self.matrices(block.views[name] for block in self.blocks)

    def put(self, name: str, values: Tensor) -> None:
        """Write a state of the parameter's shape back."""
        foreach_copy_([b.views[name] for b in self.blocks], list(values[: len(self.blocks)]))

    def dim(self, side: str) -> int:
        """Size along one side."""
        return self.rows if side == ROWS else self.cols

    def diagonal(self, side: str) -> bool:
        """Whether the factors of a side are diagonal."""
        return self.blocks[0].diagonal(side)

    def side(self, kind: str, side: str, packed: bool) -> Tensor:
        """Factors, roots or bases of one side: (room, d, d), or (room, d) where they are diagonal."""
        views = [block.views[f"{kind}_{side}"] for block in self.blocks]
        return load_square(views, self.dim(side), self.diagonal(side), packed, self.room, self.compute)

    def put_side(self, kind: str, side: str, values: Tensor, packed: bool) -> None:
        """Write them back."""
        store_square([block.views[f"{kind}_{side}"] for block in self.blocks], values, packed)


def batches(blocks: Iterable[Block], key: Callable[[Block], Any] = lambda block: None) -> list[Batch]:
    """All blocks in batches of equal ones: of one size, one kind of factors, one dtype, and one `key`."""
    classes: dict[Any, list[Block]] = defaultdict(list)
    for block in blocks:
        kinds = (block.diagonal(ROWS), block.diagonal(COLS))
        classes[
            block.rows, block.cols, kinds, block.tensor.compute, block.tensor.param.device, key(block)
        ].append(block)
    found: list[Batch] = []
    for (rows, cols, _, compute, device, _), members in classes.items():
        size = pm.chunk_size(max(rows, cols), max(rows, cols))
        found += [
            Batch(part, room(len(part), size, device), rows, cols, compute, device)
            for part in pm.chunks(members, size)
        ]
    return found


def room(count: int, size: int, device: torch.device) -> int:
    """Matrices in a batched operand: all that fit on CUDA, where the number must not depend on who owns what."""
    return count if device.type == "cpu" else size


def gather(
    views: Sequence[Tensor], count: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copies of views of (rows, cols) in a batch of `count`, zeros behind them."""
    batch = pm.empty_batch(count, rows, cols, dtype=dtype, device=device)
    batch[len(views) :].zero_()
    foreach_copy_(list(batch[: len(views)]), list(views))
    return batch


def load_square(
    views: Sequence[Tensor], dim: int, diagonal: bool, packed: bool, count: int, compute: torch.dtype
) -> Tensor:
    """(count, d, d) of flat states that are matrices, packed or not, or (count, d) of diagonal ones."""
    device = views[0].device
    if diagonal:
        return gather([v[None] for v in views], count, 1, dim, compute, device)[:, 0]
    if packed:
        flat = gather([v[None] for v in views], count, 1, views[0].numel(), compute, device)[:, 0]
        return pm.unpack(flat, dim)
    return gather([v.view(dim, dim) for v in views], count, dim, dim, compute, device)


def store_square(views: Sequence[Tensor], values: Tensor, packed: bool) -> None:
    """Write (count, d, d) or (count, d) back; what lies behind the views' number is dropped."""
    values = values[: len(views)]
    if values.dim() == 3:
        values = pm.pack(values) if packed else values.reshape(len(views), -1)
    foreach_copy_(list(views), list(values))
