"""Several algorithms as one optimizer: one step, one state dict, one answer about non-finite gradients.

    Mixed.param_groups   [ {algorithm: muon, ..}  {algorithm: adamw, ..}  {algorithm: muon, ..} ]
                              |      the same dicts       |                     |
    optimizers           [ Muon: groups 0, 2        AdamW: group 1 ]

Each is an ordinary optimizer that shares its groups' dicts and its states with the whole, so that schedulers,
checkpoints and torch's helpers, which see the whole, reach it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from block_optim.adam.adamw import AdamW
from block_optim.adam.adamw8bit import AdamW8bit
from block_optim.core.active import Active
from block_optim.core.base import BlockOptimizer, MoreGroupsFollow
from block_optim.core.params import Group, Param
from block_optim.muon.muon import Muon
from block_optim.shampoo.shampoo import Shampoo
from block_optim.shampoo.soap import SOAP

Kind = type[BlockOptimizer]

ALGORITHMS: Mapping[str, Kind] = {
    "muon": Muon,
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "shampoo": Shampoo,
    "soap": SOAP,
}


def kind_of(algorithm: object) -> Kind | None:
    """The class of an algorithm that is named or given; None if it is not known."""
    if isinstance(algorithm, type) and issubclass(algorithm, BlockOptimizer):
        return algorithm
    return ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None


def name_of(kind: Kind) -> str:
    """What a group and a state dict call an algorithm: a known one's name, or else the class's."""
    return next((name for name, known in ALGORITHMS.items() if known is kind), kind.__name__)


class Mixed(BlockOptimizer):
    """An optimizer whose param groups name their algorithm.

    Args:
        params: groups, each with a key ``algorithm`` and any options of that algorithm; what a group leaves out has
            that algorithm's default. An algorithm is "muon", "adamw", "adamw8bit", "shampoo", "soap", or any subclass
            of `BlockOptimizer`, which the group and state dicts then name by its class name. Options that hold for
            all groups of an algorithm (``bucket_bytes`` of Muon) are said in its first group.
        lr: of groups that do not say.
        skip_nonfinite: see `BlockOptimizer`; the check is made once, for all groups.

    `param_groups_for` makes the groups from a model. State keys are the algorithms' own. Communicates what they do.

    Raises:
        ValueError: a group without a known algorithm, or an option that its algorithm refuses.
    """

    def __init__(
        self, params: ParamsT, lr: float | torch.Tensor = 1e-3, *, skip_nonfinite: bool = True
    ) -> None:
        self.routes: tuple[Any, ...] = ()  # what went where and why, if `param_groups_for` made the groups
        self._kinds: dict[str, Kind] = dict(ALGORITHMS)
        self._shared: dict[str, dict[str, Any]] = {}  # options of whole algorithms
        super().__init__(params, {"lr": lr, "algorithm": None}, skip_nonfinite=skip_nonfinite)

    @property
    def optimizers(self) -> dict[str, BlockOptimizer]:
        """The optimizer of each algorithm in use; to look at, not to step."""
        return dict(self._optimizers)

    # ---------------------------------------------------------------- what the base class asks for

    def setup(self) -> None:
        """Begin without algorithms."""
        self._optimizers: dict[str, BlockOptimizer] = {}
        self._owner: dict[torch.Tensor, BlockOptimizer] = {}
        self._split: tuple[int, list[tuple[BlockOptimizer, list[int]]]] = (-1, [])

    def prepare(self) -> None:
        """All groups are there."""
        for optimizer in self._optimizers.values():
            optimizer.prepare()

    def invalidate(self) -> None:
        """Parameters or states have changed."""
        for optimizer in self._optimizers.values():
            optimizer._forget()
        self._split = (-1, [])

    def synchronize(self) -> None:
        """Complete what runs next to the step."""
        for optimizer in self._optimizers.values():
            optimizer.synchronize()

    def check_group(self, group: Group, params: list[Param]) -> None:
        """Raise ValueError unless the group's algorithm takes it; that makes the states, too."""
        name, kind = self._algorithm(group, params)
        group["algorithm"] = name
        shared = {key: group.pop(key) for key in kind.shared_options if key in group}
        optimizer = self._optimizers.get(name)
        if optimizer is None:
            shared = self._shared.get(name, shared)
            optimizer = kind(MoreGroupsFollow([group]), **shared)
            self._check_known(group, optimizer)
            self._optimizers[name], self._shared[name] = optimizer, shared
            return
        for key, value in shared.items():
            if value is not None and value != getattr(optimizer, key):
                raise ValueError(
                    f"algorithm {name!r}: {key}={value!r} in one group, {getattr(optimizer, key)!r} in its first one; "
                    "it is an option of the whole algorithm"
                )
        self._check_known(group, optimizer)
        optimizer.add_param_group(group)

    def _algorithm(self, group: Group, params: list[Param]) -> tuple[str, Kind]:
        """The name and class of a group's algorithm; a class becomes known by its name."""
        given = group["algorithm"]
        kind = self._kinds.get(given) if isinstance(given, str) else kind_of(given)
        if kind is None:
            raise ValueError(
                f"a group of {len(params)} parameters (first: {params[0].name if params else 'none'}) has "
                f"algorithm={given!r}: expected one of {', '.join(self._kinds)}, or a subclass of BlockOptimizer"
            )
        name = given if isinstance(given, str) else name_of(kind)
        if self._kinds.setdefault(name, kind) is not kind:
            raise ValueError(f"two algorithms are called {name!r}: {kind} and {self._kinds[name]}")
        return name, kind

    def _check_known(self, group: Group, optimizer: BlockOptimizer) -> None:
        known = {"params", "param_names", "algorithm", "initial_lr", *self.defaults, *optimizer.defaults}
        if unknown := sorted(set(group) - known):
            raise ValueError(
                f"algorithm {group['algorithm']!r} has no option {', '.join(map(repr, unknown))} for a group"
            )

    def init_states(self, group: Group, params: list[Param]) -> None:
        """Show the states that the group's algorithm has made."""
        optimizer = self._optimizers[group["algorithm"]]
        for param in params:
            self._owner[param.tensor] = optimizer
            self.state[param.tensor] = optimizer.state[param.tensor]
            param.master = optimizer._params[param.tensor].master

    def update(self, active: Active) -> None:
        """Let each algorithm update its own."""
        version, split = self._split
        if version != active.version:
            owners = [self._owner[param.tensor] for param in active.params]
            split = [
                (optimizer, [i for i, owner in enumerate(owners) if owner is optimizer])
                for optimizer in self._optimizers.values()
            ]
            self._split = (active.version, split)
        for optimizer, positions in split:
            optimizer.update(active.select(positions))

    def reset_state(self, param: Param) -> None:
        """As the parameter's algorithm does."""
        self._owner[param.tensor].reset_state(param)

    def _format_options_of(self, group: Group) -> tuple[str, ...]:
        return ("algorithm", *self._optimizers[group["algorithm"]].format_options)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"routes": self.routes, "_kinds": self._kinds, "_shared": self._shared}
        return {**super().__getstate__(), **kept}
