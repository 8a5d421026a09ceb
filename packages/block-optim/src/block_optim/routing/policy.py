"""The block policy that goes with `param_groups_for`: made before sharding, with the same routes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from block_optim.core.policy import Policy, Wish, policy_of
from block_optim.routing.routes import Override, routes_of


def block_policy_for(
    model: nn.Module,
    *,
    others: str = "adamw",
    overrides: Mapping[str, Override] | None = None,
    adamw8bit: Mapping[str, Any] | None = None,
    units: Iterable[nn.Module] | None = None,
    world_size: int | None = None,
    max_padding: float = 0.05,
) -> Policy:
    """A policy ``(name, parameter) -> block or None`` for `fully_shard`, each parameter's by its algorithm.

    As `BlockOptimizer.block_policy` of the algorithms: Muon's matrices are kept whole (with ``units`` where that pays),
    8-bit AdamW's tensors on the grid of their blocks; the rest may be cut anywhere. Communicates nothing.

    Args:
        model: before it is sharded.
        others: as in `param_groups_for`.
        overrides: as in `param_groups_for`.
        adamw8bit: options of `AdamW8bit`: ``block``, ``min_8bit_numel``, ``quantize``.
        units: the modules that are sharded as one group each, inner ones first; None keeps every matrix whole.
        world_size: ranks over which a unit is sharded; needed with ``units``.
        max_padding: padding that whole matrices are worth, as a share of a unit.

    Raises:
        ValueError: as `param_groups_for`; units without world_size.
    """
    params = dict(model.named_parameters())
    wishes: dict[int, Wish] = {}
    for route in routes_of(model, others=others, overrides=overrides or {}):
        name, kind = route.names[0], route.kind
        given = adamw8bit or {} if route.algorithm == "adamw8bit" else {}
        block, optional = None, True
        if kind is not None:
            block = kind.block_of(name, params[name], kind.all_options({**given, **dict(route.options)}))
            optional = not kind.requires_blocks
        wishes[id(params[name])] = Wish(name, route.shape, block, optional)

    def wish(name: str, param: torch.Tensor) -> Wish:
        return wishes.get(id(param), Wish(name, tuple(param.shape), None))

    return policy_of(wish, units, world_size, max_padding)
