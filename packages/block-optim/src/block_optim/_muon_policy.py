"""Which matrices to keep whole: a block policy for `fully_shard` under which Muon moves less, where that pays.

A whole matrix saves its two trips in every step. It costs padding: all shards of a group are as large as the
largest, so a group that holds one large matrix whole makes every rank pay for it. The planner knows how much.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim._muon_matrices import matrices_of
from layout_planner import Rows, TensorSpec, Whole, plan

Policy = Callable[[str, torch.Tensor], Any]


@dataclass(frozen=True)
class Wish:
    """A tensor of a group, and the block that it would like.

    Attributes:
        optional: whether it can do without (a matrix can, at the price of its trips).
    """

    name: str
    shape: tuple[int, ...]
    block: Any
    optional: bool = True


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

    def wish(name: str, param: torch.Tensor) -> Wish:
        return Wish(name, tuple(param.shape), matrix_block(name, tuple(param.shape), matrices))

    if units is None:
        return lambda name, param: wish(name, param).block
    return policy_of(_groups(units, wish), world_size, max_padding)


def _groups(
    units: Iterable[torch.nn.Module], wish: Callable[[str, torch.Tensor], Wish]
) -> list[list[tuple[torch.Tensor, Wish]]]:
    """The parameters of each unit that no earlier unit has."""
    seen: set[int] = set()
    found: list[list[tuple[torch.Tensor, Wish]]] = []
    for unit in units:
        params = [(name, p) for name, p in unit.named_parameters() if id(p) not in seen]
        seen.update(id(p) for _, p in params)
        found.append([(p, wish(name, p)) for name, p in params])
    return found


def policy_of(
    groups: Sequence[Sequence[tuple[torch.Tensor, Wish]]], world_size: int | None, max_padding: float
) -> Policy:
    """The policy that grants each group's wishes within the allowance of padding; by the parameters' identity."""
    if world_size is None or world_size < 1:
        raise ValueError(
            f"a block policy for units needs world_size, a positive number of ranks; got {world_size!r}"
        )
    blocks: dict[int, tuple[torch.Tensor, Any]] = {}  # with the tensors, so that identities are not reused
    for group in groups:
        granted = grant([wish for _, wish in group], world_size, max_padding)
        blocks.update({id(p): (p, granted[wish.name]) for p, wish in group})
    return lambda name, param: blocks[id(param)][1] if id(param) in blocks else None


def grant(wishes: Sequence[Wish], world_size: int, max_padding: float) -> Mapping[str, Any]:
    """The blocks of a group's tensors, by name: the largest optional ones are given up until the padding is allowed.

    Tensors of one shape and block stay together. At most one plan for each of these kinds.
    """
    numel = sum(math.prod(w.shape) for w in wishes)
    kinds = {(w.shape, str(w.block)): w for w in wishes if w.optional and w.block is not None}

    def blocks() -> dict[str, Any]:
        return {
            w.name: None if w.optional and (w.shape, str(w.block)) not in kinds else w.block for w in wishes
        }

    def padding(chosen: dict[str, Any]) -> int:
        specs = [TensorSpec(w.name, w.shape, chosen[w.name] or Rows(1)) for w in wishes if math.prod(w.shape)]
        return plan(specs, world_size).padding if specs else 0

    allowed = padding({w.name: None if w.optional else w.block for w in wishes}) + max_padding * numel
    while kinds and padding(blocks()) > allowed:
        del kinds[max(kinds, key=lambda kind: (_block_numel(kinds[kind]), kind))]
    return blocks()


def matrix_block(name: str, shape: tuple[int, ...], matrices: str) -> Any:
    """Whole(), or for a stack as many rows as its matrices have; None where there is no matrix."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    found = matrices_of(name, shape, matrices)
    if len(found) == 1:
        return Whole()
    alike = len({m.rows for m in found}) == 1 and len(found[0].runs) == 1
    # One of them, or all that one matrix of the stack is cut into.
    return Rows(found[0].rows if alike else shape[-2])


def _block_numel(wish: Wish) -> int:
    return math.prod(wish.shape) if isinstance(wish.block, Whole) else wish.block.count * wish.shape[-1]
