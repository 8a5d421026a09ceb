"""Batches of equal blocks, and their states as batched matrices."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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

    def matrices(self, views: Iterable[Tensor]) -> Tensor:
        """(capacity, rows, cols) of views of that size, followed by zeros."""
        first = self.blocks[0]
        return gather(list(views), self.capacity, first.rows, first.cols, first.tensor.compute)

    def state(self, name: str) -> Tensor:
        """(capacity, rows, cols) of a state of the parameter's shape."""
        return self.matrices(block.views[name] for block in self.blocks)

    def put(self, name: str, values: Tensor) -> None:
        """Write a state of the parameter's shape back."""
        foreach_copy_([b.views[name] for b in self.blocks], list(values[: len(self.blocks)]))

    def side(self, kind: str, side: str) -> Tensor:
        """Factors, roots or bases of one side: (capacity, d, d), or (capacity, d) where they are diagonal."""
        return load_square([(block, side) for block in self.blocks], kind, self.capacity)

    def put_side(self, kind: str, side: str, values: Tensor) -> None:
        """Write them back."""
        store_square([block.views[f"{kind}_{side}"] for block in self.blocks], values)


def batches(blocks: Iterable[OwnedBlock]) -> list[Batch]:
    """All blocks in batches of equal ones: of one size, one kind of factors and one dtype."""
    classes: dict[tuple[Any, ...], list[OwnedBlock]] = defaultdict(list)
    for block in blocks:
        kinds = (block.diagonal(ROWS), block.diagonal(COLS))
        tensor = block.tensor
        classes[block.rows, block.cols, kinds, tensor.compute, tensor.param.device].append(block)
    result: list[Batch] = []
    for (rows, cols, *_, device), members in classes.items():
        dim = max(rows, cols)
        result += [Batch(chunk, capacity(len(chunk), dim, device)) for chunk in linalg.chunks(members, dim)]
    return result


def capacity(count: int, dim: int, device: torch.device) -> int:
    """Matrices in a batched operand: all that fit on an accelerator, where their number must not depend on owners."""
    return count if is_cpu(device) else linalg.chunk_size(dim)


def gather(views: Sequence[Tensor], count: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Copies of views of (rows, cols) in a batch of `count`, zeros behind them."""
    batch = linalg.empty_batch(count, rows, cols, dtype=dtype, device=views[0].device)
    batch[len(views) :].zero_()
    foreach_copy_(list(batch[: len(views)]), list(views))
    return batch


def load_square(items: Sequence[tuple[OwnedBlock, str]], kind: str, count: int) -> Tensor:
    """(count, d, d) of a state of equal sides, by its kind, or (count, d) where it is diagonal."""
    block, side = items[0]
    dim, compute = block.dim(side), block.tensor.compute
    views = [block.views[f"{kind}_{side}"] for block, side in items]
    if block.diagonal(side):
        return gather([v[None] for v in views], count, 1, dim, compute)[:, 0]
    return gather([v.view(dim, dim) for v in views], count, dim, dim, compute)


def store_square(views: Sequence[Tensor], values: Tensor) -> None:
    """Write (count, d, d) or (count, d) back; further ones are dropped."""
    foreach_copy_(list(views), list(values[: len(views)].flatten(1)))
