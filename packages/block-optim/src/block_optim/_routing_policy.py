"""The block policy that goes with `param_groups_for`: said before sharding, with the same routes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from block_optim._adamw8bit import AdamW8bit
from block_optim._muon_policy import Policy, Wish, matrix_block, policy_of
from block_optim._routing import Route, routes_of


def block_policy_for(
    model: nn.Module,
    *,
    others: str = "adamw",
    overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
    adamw8bit: Mapping[str, Any] | None = None,
    units: Iterable[nn.Module] | None = None,
    world_size: int | None = None,
    max_padding: float = 0.05,
) -> Policy:
    """A policy ``(name, parameter) -> block or None`` for `fully_shard`, each parameter's by its algorithm.

    Muon's matrices are kept whole (with ``units`` where that pays, as `Muon.block_policy` says), 8-bit AdamW's tensors
    on the grid of their blocks; the rest may be cut anywhere. Communicates nothing.

    Args:
        model: before it is sharded.
        others: as in `param_groups_for`.
        overrides: as in `param_groups_for`.
        adamw8bit: the options of its ``block_policy``: ``block``, ``min_8bit_numel``, ``quantize``.
        units: the modules that are sharded as one group each; None keeps every matrix whole.
        world_size: ranks over which a unit is sharded; needed with ``units``.
        max_padding: padding that whole matrices are worth, as a share of a unit.

    Raises:
        ValueError: as `param_groups_for`; units without world_size.
    """
    eight = AdamW8bit.block_policy(**(adamw8bit or {}))
    routes: dict[str, Route] = {
        r.names[0]: r for r in routes_of(model, others=others, overrides=overrides or {})
    }
    wishes: dict[int, tuple[torch.Tensor, Wish]] = {}
    for name, param in model.named_parameters():
        route = routes[name]
        if route.algorithm == "muon":
            how = dict(route.options).get("matrices", "auto")
            wish = Wish(name, route.shape, matrix_block(name, route.shape, how))
        else:
            block = eight(name, param) if route.algorithm == "adamw8bit" else None
            wish = Wish(name, route.shape, block, optional=False)
        wishes[id(param)] = (param, wish)
    if units is None:
        return lambda name, param: wishes[id(param)][1].block if id(param) in wishes else None
    groups: list[list[tuple[torch.Tensor, Wish]]] = []
    seen: set[int] = set()
    for unit in units:
        fresh = [p for p in unit.parameters() if id(p) not in seen]
        seen.update(id(p) for p in fresh)
        groups.append([wishes[id(p)] for p in fresh])
    return policy_of(groups, world_size, max_padding)
