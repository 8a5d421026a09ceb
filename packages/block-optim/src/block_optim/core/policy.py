"""Block policies for `fully_shard`: blocks that rank boundaries may not cut, except where padding costs too much.

A block that is whole on a rank saves an optimizer its trips in every step, or is needed for its states to exist at all.
It costs padding: all shards of a unit are as large as the largest, so a unit that holds one large matrix whole makes
every rank pay for it. The planner knows how much.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from layout_planner import Block, Elements, Rows, TensorSpec, Tile, Whole, plan

Policy = Callable[[str, torch.Tensor], Block | None]


@dataclass(frozen=True)
class BlockRequest:
    """A tensor and the block that its optimizer would like."""

    name: str  # unlike the names of others in its unit
    shape: tuple[int, ...]  # of the global tensor
    block: Block | None  # None where it may be cut anywhere
    optional: bool = True  # whether it can do without, at the price of communication


def make_policy(
    request: Callable[[str, torch.Tensor], BlockRequest],
    units: Iterable[torch.nn.Module] | None,
    world_size: int | None,
    max_padding: float,
) -> Policy:
    """The policy that grants requests: all of them or, with units, those within the allowance of padding.

    The arguments are those of `BlockOptimizer.block_policy`, and the request of a parameter by its name in its unit.
    """
    if units is None:
        return lambda name, param: request(name, param).block
    if world_size is None or world_size < 1:
        raise ValueError(f"a block policy for units needs world_size, at least 1 rank; got {world_size!r}")
    # Weak keys: units keep the policy, which must not keep the unsharded parameters.
    blocks: Any = WeakTensorKeyDictionary()
    for unit in units:
        own = [(p, request(name, p)) for name, p in unit.named_parameters() if p not in blocks]
        granted = fit_requests([w for _, w in own], world_size, max_padding)
        for param, wanted in own:
            blocks[param] = granted[wanted.name]
    return lambda name, param: blocks.get(param)


def fit_requests(
    requests: Sequence[BlockRequest], world_size: int, max_padding: float
) -> Mapping[str, Block | None]:
    """The blocks of a unit's tensors, by name: the largest optional ones are given up until the padding is allowed.

    Tensors of one shape and block stay together. Plans the unit at most once for each of these kinds.
    """
    numel = sum(math.prod(w.shape) for w in requests)
    kinds = {(w.shape, str(w.block)): w for w in requests if w.optional and w.block is not None}

    def blocks() -> dict[str, Block | None]:
        return {
            w.name: None if w.optional and (w.shape, str(w.block)) not in kinds else w.block for w in requests
        }

    def padding(chosen: dict[str, Block | None]) -> int:
        specs = [
            TensorSpec(w.name, w.shape, chosen[w.name] or Rows(1)) for w in requests if math.prod(w.shape)
        ]
        return plan(specs, world_size).padding if specs else 0

    allowed = padding({w.name: None if w.optional else w.block for w in requests}) + max_padding * numel
    while kinds and padding(blocks()) > allowed:
        del kinds[max(kinds, key=lambda kind: (_block_numel(kinds[kind]), kind))]
    return blocks()


def _block_numel(request: BlockRequest) -> int:
    match request.block:
        case Rows(count) | Tile(count, _):
            return count * request.shape[-1]
        case Elements(count):
            return count
        case Whole():
            return math.prod(request.shape)
    return 0
