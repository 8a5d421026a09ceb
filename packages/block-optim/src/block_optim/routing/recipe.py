"""An optimizer's options, stated once for `fully_shard` and for the optimizer itself."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from block_optim.core.base import BlockOptimizer
from block_optim.core.policy import BlockRequest, make_policy
from block_optim.routing.routes import mixed_optimizer_for, options_by_route, routes_of
from layout_planner import Block


class Recipe:
    """The block policy of an optimizer, and the optimizer with the same options, so that they cannot disagree.

        recipe = Recipe(AdamW8bit, lr=1e-3, block=Tile(32, 32))
        fully_shard(layer, block_policy=recipe)             recipe(name, parameter) -> block or None
        optimizer = recipe(model.named_parameters())        recipe(parameters) -> the optimizer

    On torch's `fully_shard`, which takes no policy, it builds the optimizer only. Communicates nothing.

    Args:
        kind: a class of optimizer, or a model that is not sharded yet: matrices to Muon, the rest to AdamW, as
            `mixed_optimizer_for` does; ``recipe(model)`` then builds the optimizer.
        units, world_size, max_padding: as in `BlockOptimizer.block_policy`.
        options: of the optimizer, or of `mixed_optimizer_for`.

    Raises:
        TypeError: an option that the optimizer does not have.
        ValueError: an option out of its range; units without world_size.
    """

    def __init__(
        self,
        kind: type[BlockOptimizer] | nn.Module,
        *,
        units: Iterable[nn.Module] | None = None,
        world_size: int | None = None,
        max_padding: float = 0.05,
        **options: Any,
    ) -> None:
        self._options = options
        if isinstance(kind, nn.Module):
            self._kind = None  # not the model, whose parameters would stay
            self._policy = make_policy(_requests_of(kind, options), units, world_size, max_padding)
        else:
            self._kind = kind
            self._policy = kind.block_policy(units, world_size, max_padding=max_padding, **options)

    @overload
    def __call__(self, params: str, param: torch.Tensor) -> Block | None: ...
    @overload
    def __call__(self, params: Any) -> BlockOptimizer: ...
    def __call__(self, params: Any, param: torch.Tensor | None = None) -> Block | BlockOptimizer | None:
        """The block of a parameter, from its name and itself; or the optimizer of parameters, or of the model."""
        if param is not None:
            return self._policy(params, param)
        if self._kind is None:
            return mixed_optimizer_for(params, **self._options)
        return self._kind(params, **self._options)


def _requests_of(model: nn.Module, options: Mapping[str, Any]) -> Callable[[str, torch.Tensor], BlockRequest]:
    """The block that each parameter's algorithm would like, by the options of `mixed_optimizer_for`."""
    bound = inspect.signature(mixed_optimizer_for).bind(model, **options)
    bound.apply_defaults()
    args, params = bound.arguments, dict(model.named_parameters())
    routes = routes_of(model, others=args["others"], overrides=args["overrides"] or {})
    requests: Any = WeakTensorKeyDictionary()  # an id may belong to another tensor later
    for route, own in options_by_route(routes, args["others"], args["muon"], args["adamw"]):
        name, kind = route.names[0], route.kind
        assert kind is not None
        block = kind.block_of(name, params[name], kind.all_options(own))
        requests[params[name]] = BlockRequest(name, route.shape, block, not kind.requires_blocks)

    def request(name: str, param: torch.Tensor) -> BlockRequest:
        known: BlockRequest | None = requests.get(param)
        return known or BlockRequest(name, tuple(param.shape), None)

    return request
