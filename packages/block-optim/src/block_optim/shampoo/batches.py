"""Batches of equal blocks, and their states as batched matrices."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from block_optim.core._torch_compat import foreach_copy_
from block_optim.shampoo import linalg
from block_optim.shampoo.plan import COLS, ROWS, OwnedBlock
from ragged_shard.device import is_cpu


@dataclass
class Batch:
    """Equal blocks that are worked on together; `capacity` is how many matrices a batched operand has."""

    blocks: Sequence[OwnedBlock]
    capacity: int
    rows: int
    cols: int
    compute: torch.dtype
    device: torch.device

    def matrices(self, views: Iterable[Tensor]) -> Tensor:
        """(capacity, rows, cols) of views of that size, followed by zeros."""
        return gather(list(views), self.capacity, self.rows, self.cols, self.compute)

    def state(self, name: str) -> Tensor:
        """(capacity, rows, cols) of a state of the parameter's shape."""
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

    def side(self, kind: str, side: str) -> Tensor:
        """Factors, roots or bases of one side: (capacity, d, d), or (capacity, d) where they are diagonal."""
        views = [block.views[f"{kind}_{side}"] for block in self.blocks]
        return load_square(views, self.dim(side), self.diagonal(side), self.capacity, self.compute)

    def put_side(self, kind: str, side: str, values: Tensor) -> None:
        """Write them back."""
        store_square([block.views[f"{kind}_{side}"] for block in self.blocks], values)


def batches(blocks: Iterable[OwnedBlock]) -> list[Batch]:
    """All blocks in batches of equal ones: of one size, one kind of factors and one dtype."""
    classes: dict[Hashable, list[OwnedBlock]] = defaultdict(list)
    for block in blocks:
        kinds = (block.diagonal(ROWS), block.diagonal(COLS))
        tensor = block.tensor
        classes[block.rows, block.cols, kinds, tensor.compute, tensor.param.device].append(block)
    result: list[Batch] = []
    for members in classes.values():
        rows, cols, tensor = members[0].rows, members[0].cols, members[0].tensor
        size = linalg.chunk_size(max(rows, cols), max(rows, cols))
        device = tensor.param.device
        result += [
            Batch(chunk, capacity(len(chunk), size, device), rows, cols, tensor.compute, device)
            for chunk in linalg.chunks(members, size)
        ]
    return result


def capacity(count: int, size: int, device: torch.device) -> int:
    """Matrices in a batched operand: all that fit on an accelerator, where their number must not depend on owners."""
    return count if is_cpu(device) else size


def gather(views: Sequence[Tensor], count: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Copies of views of (rows, cols) in a batch of `count`, zeros behind them."""
    batch = linalg.empty_batch(count, rows, cols, dtype=dtype, device=views[0].device)
    batch[len(views) :].zero_()
    foreach_copy_(list(batch[: len(views)]), list(views))
    return batch


def load_square(
    views: Sequence[Tensor], dim: int, diagonal: bool, count: int, compute: torch.dtype
) -> Tensor:
    """(count, d, d) of flat states that are matrices, or (count, d) of diagonal ones."""
    if diagonal:
        return gather([v[None] for v in views], count, 1, dim, compute)[:, 0]
    return gather([v.view(dim, dim) for v in views], count, dim, dim, compute)


def store_square(views: Sequence[Tensor], values: Tensor) -> None:
    """Write (count, d, d) or (count, d) back; further ones are dropped."""
    foreach_copy_(list(views), list(values[: len(views)].flatten(1)))
