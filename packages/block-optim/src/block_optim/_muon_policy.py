"""Which matrices to keep whole: a block policy for `fully_shard` under which Muon moves less, where that pays.

A whole matrix saves its two trips in every step. It costs padding: all shards of a group are as large as the
largest, so a group that holds one large matrix whole makes every rank pay for it. The planner knows how much.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from block_optim._muon_matrices import matrices_of
from layout_planner import Rows, TensorSpec, Whole, plan

Policy = Callable[[str, torch.Tensor], Any]


def muon_block_policy(
    units: Iterable[torch.nn.Module] | None = None,
    world_size: int | None = None,
    *,
    max_padding: float = 0.05,
    matrices: str = "auto",
) -> Policy:
    """A policy ``(name, parameter) -> block or None`` under which matrices lie whole on one rank.

    Without ``units`` every matrix is kept whole: `Whole()`, or one expert of a stack. With them it decides for each
    unit which shapes to keep whole: as many as pad the unit by no more than ``max_padding`` of its elements over
    what it is padded by anyway. For the rest, and for what is no matrix, it says None. Communicates nothing.

    Args:
        units: the modules that are sharded as one group each, as they are given to ``fully_shard``.
        world_size: ranks over which a unit is sharded; needed with ``units``.
        max_padding: padding that is worth it, as a share of a unit.
        matrices: how tensors are seen, as in `Muon`; a stack's block is one of its matrices.

    Raises:
        ValueError: units without world_size.
    """
    if units is None:
        return lambda name, param: _block(name, tuple(param.shape), matrices)
    if world_size is None or world_size < 1:
        raise ValueError(
            f"block_policy with units needs world_size, a positive number of ranks; got {world_size!r}"
        )
    whole: dict[int, torch.Tensor] = {}  # by identity; the values keep the identities from being reused
    for unit in units:
        params = [(name, p) for name, p in unit.named_parameters() if id(p) not in whole]
        keep = whole_shapes([(name, tuple(p.shape)) for name, p in params], world_size, max_padding, matrices)
        whole.update({id(p): p for _, p in params if tuple(p.shape) in keep})

    def policy(name: str, param: torch.Tensor) -> Any:
        return _block(name, tuple(param.shape), matrices) if id(param) in whole else None

    return policy


def whole_shapes(
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    max_padding: float,
    matrices: str = "auto",
) -> frozenset[tuple[int, ...]]:
    """The shapes of a group's matrices that are kept whole within an allowance of padding.

    Begins with all and gives up the shape with the largest block until the plan fits; at most one plan for each shape.
    """
    shapes = {shape: _block(name, shape, matrices) for name, shape in tensors}
    keep = {shape: block for shape, block in shapes.items() if block is not None}
    numel = sum(math.prod(shape) for _, shape in tensors)
    if not keep or not numel:
        return frozenset()

    def padding(kept: dict[tuple[int, ...], Any]) -> int:
        specs = [
            TensorSpec(name, shape, kept.get(shape, Rows(1))) for name, shape in tensors if math.prod(shape)
        ]
        return plan(specs, world_size).padding

    allowed = padding({}) + max_padding * numel
    while keep and padding(keep) > allowed:
        del keep[max(keep, key=lambda shape: (_block_numel(shape, keep[shape]), shape))]
    return frozenset(keep)


def _block(name: str, shape: tuple[int, ...], matrices: str) -> Any:
    """Whole(), or for a stack as many rows as its matrices have; None where there is no matrix."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    found = matrices_of(name, shape, matrices)
    if len(found) == 1:
        return Whole()
    alike = len({m.rows for m in found}) == 1 and len(found[0].runs) == 1
    return Rows(
        found[0].rows if alike else shape[-2]
    )  # one of them, or all that one matrix of the stack is cut into


def _block_numel(shape: tuple[int, ...], block: Any) -> int:
    return math.prod(shape) if isinstance(block, Whole) else block.count * shape[-1]
