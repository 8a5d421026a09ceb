"""Several algorithms as one optimizer: one step, one state dict, one answer about non-finite gradients.

    Mixed.param_groups   [ {algorithm: muon, ..}  {algorithm: adamw, ..}  {algorithm: muon, ..} ]
                              |      the same dicts       |                     |
    parts                [ Muon: groups 0, 2        AdamW: group 1 ]

A part is an ordinary optimizer of this package that shares its groups' dicts and its states with the whole, so that
schedulers, checkpoints and torch's helpers, which see the whole, reach it.
"""

from typing import Any

import torch

from block_optim._adamw import AdamW
from block_optim._adamw8bit import AdamW8bit
from block_optim._base import Active, BlockOptimizer
from block_optim._muon import Muon
from block_optim._muon_plan import MuonPlan
from block_optim._params import Param


class _HostedMuon(Muon):
    """Plans when the whole has given it all of its groups."""

    _hosted = True


ALGORITHMS: dict[str, type[BlockOptimizer]] = {"muon": _HostedMuon, "adamw": AdamW, "adamw8bit": AdamW8bit}


class Mixed(BlockOptimizer):
    """An optimizer whose param groups name their algorithm: "muon", "adamw" or "adamw8bit".

    Args:
        params: groups, each with a key ``algorithm`` and any options of that algorithm; what a group leaves out has
            that algorithm's default.
        lr: of groups that do not say.
        muon: options of the whole algorithm that are no group's, as ``bucket_bytes``.
        skip_nonfinite: see `BlockOptimizer`; the check is made once, for all groups.

    `param_groups_for` makes the groups from a model. State keys are the algorithms' own. Communicates what they do.

    Raises:
        ValueError: a group without a known algorithm, or an option that its algorithm refuses.
    """

    routes: tuple[Any, ...] = ()  # what went where and why, if `param_groups_for` made the groups

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        *,
        muon: dict[str, Any] | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        self._muon_options = dict(muon or {})
        super().__init__(params, {"lr": lr, "algorithm": None}, skip_nonfinite=skip_nonfinite)
        self._finish()

    @property
    def parts(self) -> dict[str, BlockOptimizer]:
        """The optimizer of each algorithm in use; to look at, not to step."""
        return dict(self._parts)

    @property
    def plan(self) -> MuonPlan:
        """Muon's plan; `print` it.

        Raises:
            ValueError: no group is Muon's.
        """
        part = self._parts.get("muon")
        if not isinstance(part, Muon):
            raise ValueError(f"no group has algorithm 'muon', only {sorted(self._parts)}; there is no plan")
        return part.plan

    # ---------------------------------------------------------------- what the base class asks for

    def _begin(self) -> None:
        self._parts: dict[str, BlockOptimizer] = {}
        self._split: tuple[int, dict[str, list[int]]] = (-1, {})
        super()._begin()

    def _finish(self) -> None:
        part = self._parts.get("muon")
        if isinstance(part, Muon):
            part._build()

    def _forget(self) -> None:
        for part in self._parts.values():
            part._forget()
        self._split = (-1, {})
        super()._forget()

    def _check_group(self, group: dict[str, Any], params: list[Param]) -> None:
        name = group["algorithm"]
        if name not in ALGORITHMS:
            raise ValueError(
                f"a group of {len(params)} parameters (first: {params[0].name if params else 'none'}) has "
                f"algorithm={name!r}: expected one of {', '.join(ALGORITHMS)}"
            )
        kind = ALGORITHMS[name]
        known = {"params", "param_names", "algorithm", "initial_lr", *self.defaults, *_options_of(kind)}
        unknown = sorted(set(group) - known)
        if unknown:
            raise ValueError(f"algorithm {name!r} has no option {', '.join(map(repr, unknown))} for a group")
        if name in self._parts:
            self._parts[name].add_param_group(group)
        else:
            options = self._muon_options if name == "muon" else {}
            self._parts[name] = kind([group], skip_nonfinite=False, **options)

    def _init_state(self, group: dict[str, Any], params: list[Param]) -> None:
        part = self._parts[group["algorithm"]]
        for param in params:
            self.state[param.param] = part.state[param.param]

    def _update(self, active: Active, found_inf: torch.Tensor | None) -> None:
        version, split = self._split
        if version != active.version:
            split = {
                name: [i for i, p in enumerate(active.params) if p.param in part._params]
                for name, part in self._parts.items()
            }
            self._split = (active.version, split)
        for name, part in self._parts.items():
            mine = split[name]
            some = Active(
                [active.params[i] for i in mine],
                [active.locals[i] for i in mine],
                [active.grads[i] for i in mine],
                active.version,
            )
            some.keeps = active.keeps
            part._update(some, None)

    def _reset_state(self, param: Param) -> None:
        next(part for part in self._parts.values() if param.param in part._params)._reset_state(param)

    def _check_saved_groups(self, saved_groups: list[dict[str, Any]]) -> None:
        super()._check_saved_groups(saved_groups)
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            for key in ("algorithm", *self._parts[group["algorithm"]]._fixed):
                if key in saved and saved[key] != group[key]:
                    raise ValueError(
                        f"param_groups[{i}]: the state dict was saved with {key}={saved[key]!r}, this optimizer has "
                        f"{key}={group[key]!r}; build it with the saved one"
                    )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon_options": self._muon_options, "routes": self.routes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._muon_options, self.routes = state["_muon_options"], state["routes"]
        super().__setstate__(state)


def _options_of(kind: type[BlockOptimizer]) -> set[str]:
    """The options that a group of an algorithm can have: those with which its constructor fills groups."""
    if kind not in _OPTIONS:
        probe = kind([torch.nn.Parameter(torch.zeros(1, 1))], skip_nonfinite=False)  # type: ignore[call-arg]
        _OPTIONS[kind] = {*probe.defaults, *probe.param_groups[0]}
    return _OPTIONS[kind]


_OPTIONS: dict[type[BlockOptimizer], set[str]] = {}
