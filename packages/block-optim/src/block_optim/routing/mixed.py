"""Several algorithms as one optimizer: one step, one state dict, one check for non-finite gradients.

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
from typing_extensions import override

from block_optim.adam.adamw import AdamW
from block_optim.adam.adamw8bit import AdamW8bit
from block_optim.core.base import BlockOptimizer, DeferredGroups
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_lr
from block_optim.core.params import Group, Param
from block_optim.core.policy import Policy
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


_GROUP_KEYS = ("params", "param_names", "name", "algorithm", "lr", "initial_lr")  # of any algorithm


def kind_of(algorithm: object) -> Kind | None:
    """The class of an algorithm, from its name or the class itself; None if it is not known."""
    if isinstance(algorithm, type) and issubclass(algorithm, BlockOptimizer):
        return algorithm
    return ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None


def name_of(kind: Kind) -> str:
    """Name of an algorithm in groups and state dicts: the known name, or else that of the class."""
    return next((name for name, known in ALGORITHMS.items() if known is kind), kind.__name__)


class Mixed(BlockOptimizer):
    """An optimizer whose param groups name their algorithm.

    Args:
        params: groups, each with a key ``algorithm`` and any options of that algorithm; what a group leaves out has
            that algorithm's default. An algorithm is "muon", "adamw", "adamw8bit", "shampoo", "soap", or any subclass
            of `BlockOptimizer`, which the group and state dicts then name by its class name. Options of a whole
            algorithm (``bucket_bytes`` of Muon) are taken from its first group.
        lr: learning rate of groups without one.
        skip_nonfinite: see `BlockOptimizer`; the check is made once, for all groups.

    `mixed_optimizer_for` makes the groups from a model. State keys are the algorithms' own. Communicates what they do.

    Raises:
        ValueError: a group without a known algorithm, or an option that its algorithm refuses.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        *,
        skip_nonfinite: bool = True,
    ) -> None:
        self.routes: tuple[Any, ...] = ()  # of `mixed_optimizer_for`, if it made the groups
        self._kinds: dict[str, Kind] = dict(ALGORITHMS)
        self._shared: dict[str, dict[str, Any]] = {}  # options of whole algorithms
        super().__init__(params, {"lr": lr, "algorithm": None}, skip_nonfinite=skip_nonfinite)

    @classmethod
    def block_policy(cls, *_: Any, **__: Any) -> Policy:
        """Not supported: the block of a parameter depends on the algorithm of its group.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "Mixed has no block policy: use block_policy_for(model, overrides=...), which follows the same "
            "rules as mixed_optimizer_for, or a function that asks the block_policy of each parameter's algorithm"
        )

    @property
    def optimizers(self) -> dict[str, BlockOptimizer]:
        """The optimizer of each algorithm in use, for inspection. Do not step it."""
        return dict(self._optimizers)

    # ---------------------------------------------------------------- methods of the base class

    @override
    def setup(self) -> None:
        self._optimizers: dict[str, BlockOptimizer] = {}
        self._split: tuple[int, list[tuple[BlockOptimizer, list[int]]]] = (-1, [])

    @override
    def prepare(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.prepare()

    @override
    def invalidate(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer._bind()
        self._split = (-1, [])

    @override
    def synchronize(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.synchronize()

    @override
    def check_options(self, group: Group) -> None:
        algorithm = group["algorithm"]
        kind = self._kinds.get(algorithm) if isinstance(algorithm, str) else kind_of(algorithm)
        if kind is None:
            raise ValueError(
                f"a group of {len(group['params'])} parameters (first: {_first_of(group)}) has "
                f"algorithm={algorithm!r}: expected one of {', '.join(self._kinds)}, or a subclass of BlockOptimizer"
            )
        name = algorithm if isinstance(algorithm, str) else name_of(kind)
        if self._kinds.setdefault(name, kind) is not kind:
            raise ValueError(f"two algorithms are called {name!r}: {kind} and {self._kinds[name]}")
        group["algorithm"] = name

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to an algorithm, with options of that algorithm only.

        Raises:
            ValueError: an option or a parameter that does not fit, named; the optimizer is as it was.
        """
        if isinstance(param_group, dict) and (kind := kind_of(param_group.get("algorithm"))) is not None:
            known = {*_GROUP_KEYS, *kind.all_options({})}
            if unknown := sorted(param_group.keys() - known):
                names = ", ".join(map(repr, unknown))
                raise ValueError(f"algorithm {name_of(kind)!r} has no option {names} for a group")
        super().add_param_group(param_group)

    def _check_options(self, group: Group) -> None:
        group["lr"] = check_lr(group["lr"])  # the others are for the algorithm to check
        self.check_options(group)

    def _host(self, group: Group) -> BlockOptimizer:
        return self._optimizers[group["algorithm"]]

    def _param(self, group: Group, i: int, before: int) -> Param:
        return self._host(group)._param(group, i, before)

    def _sync_options(self) -> None:
        super()._sync_options()
        for optimizer in self._optimizers.values():
            optimizer._sync_options()

    def _read_groups(self) -> None:
        for group in self.param_groups:
            if id(group) not in self._options:
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
                self._check_options(group)
        for name in dict.fromkeys(group["algorithm"] for group in self.param_groups):
            if name not in self._optimizers:
                self._start(name)
        for name, optimizer in self._optimizers.items():
            groups = [g for g in self.param_groups if g["algorithm"] == name]
            for group in groups:
                self._check_shared(name, group)
            optimizer.param_groups = groups
            optimizer._read_groups()
        capturable = {name: o.capturable for name, o in self._optimizers.items()}
        if len(set(capturable.values())) > 1:
            raise ValueError(
                f"capturable differs between algorithms: {capturable}; a CUDA graph captures all or none"
            )
        self.capturable = True in capturable.values()
        self._optimizers = {name: o for name, o in self._optimizers.items() if o.param_groups}
        super()._read_groups()

    def _start(self, name: str) -> None:
        """Build the optimizer of an algorithm from its first group."""
        kind, group = self._kinds[name], next(g for g in self.param_groups if g["algorithm"] == name)
        shared = {key: group.pop(key) for key in kind.shared_options if key in group}
        shared = self._shared.setdefault(name, shared)
        optimizer = kind(DeferredGroups([group]), **shared)
        optimizer.state, made = self.state, optimizer.state
        for tensor, state in made.items():
            self.state.setdefault(
                tensor, state
            )  # a state that the user assigned before is copied by `_read_states`
        self._made.update(optimizer._made)
        optimizer._made = self._made
        self._optimizers[name] = optimizer

    def _check_shared(self, name: str, group: Group) -> None:
        """Take options that hold for a whole algorithm out of a group; raise if they differ from its own."""
        optimizer = self._optimizers[name]
        for key in [key for key in self._kinds[name].shared_options if key in group]:
            value, own = group[key], getattr(optimizer, key)
            if value is not None and value != own:
                raise ValueError(
                    f"algorithm {name!r}: {key}={value!r} in one group, {own!r} in its first one; it is an option of "
                    "the whole algorithm"
                )
            if key not in optimizer.defaults:
                del group[key]

    def _read_states(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.state = self.state
            optimizer._read_states()
        self._trained = [p for t, p in self._params.items() if t in self._made]
        self._bind()

    def _make_states(self, params: list[Param]) -> None:
        """Let the algorithms make the states."""
        for optimizer in self._optimizers.values():
            optimizer._make_states(
                [optimizer._params[p.tensor] for p in params if p.tensor in optimizer._params]
            )

    @property
    @override
    def supports_found_inf(self) -> bool:
        return all(optimizer.supports_found_inf for optimizer in self._optimizers.values())

    @override
    def step_was_skipped(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step_was_skipped()

    @override
    def update(self, active: StepGradients) -> None:
        version, split = self._split
        if version != active.version:
            owners = [self._host(param.group) for param in active.params]
            split = [
                (optimizer, [i for i, owner in enumerate(owners) if owner is optimizer])
                for optimizer in self._optimizers.values()
            ]
            self._split = (active.version, split)
        for optimizer, positions in split:
            optimizer.update(active.select(positions))

    @override
    def format_of(self, group: Group) -> dict[str, Any]:
        return {"algorithm": group["algorithm"]}

    def __getstate__(self) -> dict[str, Any]:
        kept = {"routes": self.routes, "_kinds": self._kinds, "_shared": self._shared}
        return {**super().__getstate__(), **kept}


def _first_of(group: Group) -> object:
    """Name of a group's first parameter for messages."""
    names = group.get("param_names") or [f"shape {tuple(p.shape)}" for p in group["params"][:1]]
    return names[0] if names else "none"
