"""The block policy that goes with `mixed_optimizer_for`: made before sharding, with the same routes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from block_optim.core.policy import BlockRequest, Policy, make_policy
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
        others: as in `mixed_optimizer_for`.
        overrides: as in `mixed_optimizer_for`.
        adamw8bit: options of `AdamW8bit`: ``block``, ``min_8bit_numel``, ``quantize``.
        units: the modules that are sharded as one group each, inner ones first; None keeps every matrix whole.
        world_size: ranks over which a unit is sharded; needed with ``units``.
        max_padding: padding that whole matrices are worth, as a share of a unit.

    Raises:
        ValueError: as `mixed_optimizer_for`; units without world_size.
    """
    params = dict(model.named_parameters())
    requests: Any = WeakTensorKeyDictionary()  # an id may be that of another tensor later
    for route in routes_of(model, others=others, overrides=overrides or {}):
        name, kind = route.names[0], route.kind
        shared = adamw8bit or {} if route.algorithm == "adamw8bit" else {}
        block, optional = None, True
        if kind is not None:
            block = kind.block_of(name, params[name], kind.all_options({**shared, **dict(route.options)}))
            optional = not kind.requires_blocks
        requests[params[name]] = BlockRequest(name, route.shape, block, optional)

    def request(name: str, param: torch.Tensor) -> BlockRequest:
        known: BlockRequest | None = requests.get(param)
        return known or BlockRequest(name, tuple(param.shape), None)

    return make_policy(request, units, world_size, max_padding)
