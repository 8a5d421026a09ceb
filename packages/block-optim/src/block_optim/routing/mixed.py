"""Several algorithms as one optimizer: one step, one state dict, one check for non-finite gradients.

    Mixed.param_groups   [ {algorithm: muon, ..}  {algorithm: adamw, ..}  {algorithm: muon, ..} ]
                              |                         |                     |
    algorithms           [ Muon: its groups' options, states, update     AdamW ... ]

Groups, states and the step are `BlockOptimizer`'s; an algorithm is an optimizer without groups, of which only
the methods of `Algorithm` are used.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.adam.adamw import AdamW
from block_optim.adam.adamw8bit import AdamW8bit
from block_optim.core.base import BlockOptimizer
from block_optim.core.gradients import StepGradients
from block_optim.core.params import Group
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


def kind_of(algorithm: object) -> Kind | None:
    """The class of an algorithm, from its name or the class itself; None if it is not known."""
    if isinstance(algorithm, type) and issubclass(algorithm, BlockOptimizer):
        return algorithm
    return ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None


def name_of(kind: Kind) -> str:
    """Name of an algorithm in groups and state dicts: the known name, or else the class's."""
    return next((name for name, known in ALGORITHMS.items() if known is kind), kind.__name__)


def check_known(kind: Kind, options: Set[str]) -> None:
    """Raise ValueError if an algorithm does not have one of these options."""
    if unknown := sorted(options - kind.all_options({}).keys()):
        names = ", ".join(map(repr, unknown))
        raise ValueError(f"algorithm {name_of(kind)!r} has no option {names} for a group")


class _Defaults(dict[str, Any]):
    """Defaults of `Mixed`. Schedulers find the option that they cycle in all groups in it; new groups do not get it."""

    cycled: str | None = None

    def __contains__(self, key: object) -> bool:
        return key == self.cycled or super().__contains__(key)


class Mixed(BlockOptimizer):
    """An optimizer whose param groups name their algorithm.

    Args:
        params: groups, each with a key ``algorithm`` and any options of that algorithm; the others have its defaults.
            An algorithm is "muon", "adamw", "adamw8bit", "shampoo", "soap", or any subclass of `BlockOptimizer`,
            which the group and state dicts then name by its class name. Options of a whole
            algorithm (``fused`` of AdamW) are taken from its first group.
        lr: learning rate of groups without one.

    `mixed_optimizer_for` makes the groups from a model. State keys are the algorithms' own. Communicates as they do.

    Schedulers that cycle momentum (`OneCycleLR`, `CyclicLR`) move Muon's ``momentum`` and others' first beta. If some
    algorithm has no ``betas``, they write ``momentum`` into every group, which `step` moves to the betas.

    Raises:
        ValueError: a group without a known algorithm, or an option that its algorithm refuses.
    """

    defaults: _Defaults

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-3) -> None:
        self.routes: tuple[Any, ...] = ()  # of `mixed_optimizer_for`, if it made the groups
        self._kinds: dict[str, Kind] = dict(ALGORITHMS)
        # Attributes that a copy has for algorithms until they are made.
        self._kept: dict[str, dict[str, Any]] = {}
        self._algorithms: dict[str, BlockOptimizer]
        super().__init__(params, _Defaults({"lr": lr, "algorithm": None}))

    @classmethod
    def block_policy(cls, *_: Any, **__: Any) -> Policy:
        """Not supported: the block of a parameter depends on the algorithm of its group.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "Mixed has no block policy: use Recipe(model, overrides=...), which follows the same "
            "rules as mixed_optimizer_for, or a function that asks the block_policy of each parameter's algorithm"
        )

    @property
    def optimizers(self) -> dict[str, BlockOptimizer]:
        """The optimizer of each algorithm in use, for inspection. Do not step it."""
        return dict(self._algorithms)

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to an algorithm, with options of that algorithm; further keys are the caller's own.

        Raises:
            ValueError: an option or a parameter that does not fit, named; the optimizer is as it was.
        """
        if isinstance(param_group, dict) and (kind := kind_of(param_group.get("algorithm"))) is not None:
            others = {option for other in ALGORITHMS.values() for option in other.all_options({})}
            check_known(kind, param_group.keys() & others)
        super().add_param_group(param_group)

    @override
    def _algorithm_of(self, group: Group) -> BlockOptimizer:
        return self._algorithms[group["algorithm"]]

    @override
    def _read_groups(self) -> None:
        for group in self.param_groups:
            if id(group) not in self.known_options:
                self._enter(group)
        used = {group["algorithm"] for group in self.param_groups}
        self._algorithms = {name: each for name, each in self._algorithms.items() if name in used}
        super()._read_groups()
        self._share()
        self._show_cycled()

    def _show_cycled(self) -> None:
        options = [algorithm.defaults for algorithm in self._algorithms.values()]
        if options and all("betas" in own for own in options):
            self.defaults.cycled = "betas"
        else:
            some = any("betas" in own or "momentum" in own for own in options)
            self.defaults.cycled = "momentum" if some else None

    @override
    def _sync_options(self) -> None:
        for group in self.param_groups:
            algorithm = self._algorithms.get(str(group.get("algorithm")))
            if algorithm is not None and "momentum" in group and "momentum" not in algorithm.defaults:
                momentum = group.pop("momentum")
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
        super()._sync_options()

    def _enter(self, group: Group) -> None:
        """Name the algorithm of a new group, and take options that hold for all of it out of the group."""
        algorithm = group.get("algorithm")
        kind = self._kinds.get(algorithm) if isinstance(algorithm, str) else kind_of(algorithm)
        if kind is None:
            names = group.get("param_names") or [f"shape {tuple(p.shape)}" for p in group["params"]]
            raise ValueError(
                f"a group of {len(group['params'])} parameters (first: {names[0] if names else 'none'}) has "
                f"algorithm={algorithm!r}: expected one of {', '.join(self._kinds)}, or a subclass of BlockOptimizer"
            )
        name = algorithm if isinstance(algorithm, str) else name_of(kind)
        if self._kinds.setdefault(name, kind) is not kind:
            raise ValueError(f"two algorithms are called {name!r}: {kind} and {self._kinds[name]}")
        group["algorithm"] = name
        group.setdefault("lr", self.defaults["lr"])
        shared = {key: group.pop(key) for key in kind.shared_options if key in group}
        if name not in self._algorithms:
            made = self._algorithms[name] = kind(None, **shared)
            if kept := self._kept.pop(name, None):
                made.__dict__.update(kept)
                made.setup()
            made.defaults = {"algorithm": name, **made.defaults}
            made.format_options = ("algorithm", *made.format_options)  # type: ignore[misc]
            self._share()
        for key, value in shared.items():
            own = getattr(self._algorithms[name], key)
            if value is not None and value != own:
                raise ValueError(
                    f"algorithm {name!r}: {key}={value!r} in one group, {own!r} in its first one; it is an option of "
                    "the whole algorithm"
                )

    def _share(self) -> None:
        """Give each algorithm its part of the parameters, and the states."""
        for name, algorithm in self._algorithms.items():
            algorithm.param_groups = [g for g in self.param_groups if g["algorithm"] == name]
            algorithm.members = [p for p in self.members if p.group["algorithm"] == name]
            algorithm.trained = [p for p in self.trained if p.group["algorithm"] == name]
            algorithm.state, algorithm.known_options = self.state, self.known_options

    # ---------------------------------------------------------------- methods of an algorithm, of all

    @override
    def setup(self) -> None:
        self._algorithms = {}
        self._split: tuple[int, list[tuple[BlockOptimizer, list[int]]]] = (-1, [])

    @override
    def prepare(self) -> None:
        for algorithm in self._algorithms.values():
            algorithm.prepare()

    @override
    def invalidate(self) -> None:
        self._share()
        for algorithm in self._algorithms.values():
            algorithm.invalidate()

    @override
    def update(self, active: StepGradients) -> None:
        version, split = self._split
        if version != active.version:
            names = [param.group["algorithm"] for param in active.params]
            split = [
                (algorithm, [i for i, other in enumerate(names) if other == name])
                for name, algorithm in self._algorithms.items()
            ]
            self._split = (active.version, split)
        for algorithm, positions in split:
            algorithm.update(active.select(positions))

    @override
    def copied_attributes(self) -> dict[str, Any]:
        parts = {name: algorithm.copied_attributes() for name, algorithm in self._algorithms.items()}
        return {"routes": self.routes, "_kinds": self._kinds, "_kept": parts}
