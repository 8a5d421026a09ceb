"""BlockOptimizer: what every optimizer here shares, whatever its update rule.

A subclass makes its states (`init_states`, when parameters are added) and updates (`update`, all parameters that have
gradients at once). The base class does the rest:

    step()  closure -> which gradients are there -> are they finite, on all ranks -> unscale -> update
            (a list compare)                        (one pass; 4 bytes, or none)
    state   made at construction, in the parameter's placement; loading copies into it and never replaces it
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from block_optim.core._torch_compat import foreach_div_, load_post_hooks, load_pre_hooks, local_of
from block_optim.core.active import Active, Collector
from block_optim.core.finite import DeferredFlags, GradientCheck, agreed, cut_groups, norm_is_finite
from block_optim.core.load import copy_state
from block_optim.core.options import check_lr
from block_optim.core.params import Group, Param
from block_optim.core.policy import Policy, Wish, policy_of
from block_optim.core.precision import (
    MASTER,
    check_precision,
    check_used,
    make_masters,
    take_over,
    write_back,
)
from layout_planner import Block

_LOG = logging.getLogger("block_optim")


class MoreGroupsFollow(list[Group]):
    """The first groups of an optimizer whose host adds the others, and then calls `prepare`."""


class BlockOptimizer(torch.optim.Optimizer):
    """Base of this package's optimizers, and of your own: two methods make one.

    Args:
        params: tensors, named tensors or groups, as torch's optimizers take them; plain, DTensors or RaggedDTensors.
        defaults: the options of a group and their defaults; ``lr`` among them.
        skip_nonfinite: skip, on every rank, a step whose gradients are not finite on some rank. False: no check.

    Where ``defaults`` has ``master_weights``, a group may ask for fp32 copies of its narrow parameters: `update` then
    finds them as ``p.local``, and `step` rounds them into the parameters.

    A subclass defines `init_states` and `update`, and any of the methods up to `takes_found_inf` and of the attributes
    below that do not fit as they are. Schedulers, closures, `GradScaler`, state dicts, distributed checkpoints,
    pickling and `Mixed` then work.

    Attributes:
        format_options: options that the format of states depends on; a state dict that differs in one is refused.
        shared_options: constructor arguments that hold for all groups, kept as attributes of the same name.
        requires_blocks: whether the optimizer cannot work where `block_of` is cut.

    `step` communicates nothing where the answer about finite gradients is known (``found_inf``, ``grad_norm``),
    on one rank, or with ``skip_nonfinite=False``; else one all_reduce of 4 bytes per process group that cuts a
    parameter. Beyond that it communicates what `update` does.
    """

    format_options: ClassVar[tuple[str, ...]] = ()
    shared_options: ClassVar[tuple[str, ...]] = ()
    requires_blocks: ClassVar[bool] = False
    # GradScaler then leaves found_inf and grad_scale here instead of waiting for them.
    _step_supports_amp_scaling = True

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, skip_nonfinite: bool = True) -> None:
        self.skip_nonfinite = skip_nonfinite
        self._begin()
        super().__init__(params, defaults)
        if not isinstance(params, MoreGroupsFollow):
            check_used(self.defaults, self._params.values())
            self.prepare()

    def _begin(self) -> None:
        self._params: dict[torch.Tensor, Param] = {}
        self._mastered: list[Param] = []
        self._collector = Collector()
        self._skipped = 0
        self._deferred = DeferredFlags()
        self._cut_groups: list[dist.ProcessGroup] | None = None
        self._check = GradientCheck()
        self.setup()

    # ---------------------------------------------------------------- what a subclass may define

    def check_group(self, group: Group, params: list[Param]) -> None:
        """Raise ValueError, naming it, where an option or a parameter does not fit; states are not there yet.

        May put options into their final form in ``group``.
        """

    def init_states(self, group: Group, params: list[Param]) -> None:
        """Fill ``self.state[p.tensor]``, a dict, for every `Param`.

        Make states of a parameter's shape by ``p.zeros(dtype)``: they lie as it does, and checkpoints reshard them.
        """
        raise NotImplementedError

    def update(self, active: Active) -> None:
        """Update the parameters that have gradients; `Active` iterates over (`Param`, this rank's gradient).

        A parameter's options are in ``p.group``, its memory is ``p.local``, and that of a state is
        ``local_of(self.state[p.tensor][name])``.
        """
        raise NotImplementedError

    def reset_state(self, param: Param) -> None:
        """Put a parameter's states back to what `init_states` made; here: zeros."""
        for value in self.state[param.tensor].values():
            if isinstance(value, torch.Tensor):
                local_of(value).zero_()
        if param.master is not None:
            param.master.copy_(local_of(param.tensor).detach())

    @classmethod
    def block_of(cls, name: str, param: torch.Tensor, options: Mapping[str, Any]) -> Block | None:
        """What of a tensor must lie whole on a rank, for these constructor options; None: nothing."""
        return None

    def setup(self) -> None:
        """Make the fields that states and plans live in: before parameters are added, when built or unpickled."""

    def prepare(self) -> None:
        """Called once when the constructor has added all groups. May communicate; `update` must not rely on it."""

    def invalidate(self) -> None:
        """Drop what is derived from parameters, groups or the addresses of states, which have changed."""

    def synchronize(self) -> None:
        """Complete work that runs next to the training step; called before states are saved, loaded or copied."""

    @property
    def takes_found_inf(self) -> bool:
        """Whether `update` obeys ``active.found_inf`` on the device, so that the host need not wait for it."""
        return False

    # ---------------------------------------------------------------- block policy

    @classmethod
    def block_policy(
        cls,
        units: Iterable[torch.nn.Module] | None = None,
        world_size: int | None = None,
        *,
        max_padding: float = 0.05,
        **options: Any,
    ) -> Policy:
        """A policy ``(name, parameter) -> block or None`` for ``fully_shard(block_policy=...)``.

        Under it blocks lie whole on a rank, so that this optimizer needs no communication for them. Without ``units``
        all do. With them, blocks that the optimizer can do without are kept whole only where they pad their unit by no
        more than ``max_padding``, the largest given up first. Communicates nothing.

        Args:
            units: the modules that `fully_shard` is called on, inner ones first.
            world_size: ranks over which a unit is sharded; needed with ``units``.
            max_padding: padding that whole blocks are worth, as a share of a unit's elements.
            options: those that the optimizer is going to have.

        Raises:
            TypeError: an option that the optimizer does not have.
            ValueError: units without world_size.
        """
        chosen = cls.all_options(options)

        def wish(name: str, param: torch.Tensor) -> Wish:
            block = cls.block_of(name, param, chosen)
            return Wish(name, tuple(param.shape), block, optional=not cls.requires_blocks)

        return policy_of(wish, units, world_size, max_padding)

    @classmethod
    def all_options(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's options: those given, and the defaults of the others.

        Raises:
            TypeError: an option that the constructor does not have.
        """
        known = {
            name: parameter.default
            for name, parameter in inspect.signature(cls).parameters.items()
            if name != "params"
        }
        if unknown := sorted(set(given) - set(known)):
            raise TypeError(f"{cls.__name__} has no option {', '.join(map(repr, unknown))}")
        return {**known, **given}

    # ---------------------------------------------------------------- parameters

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, with options of their own if need be; their states exist when this returns.

        Raises:
            ValueError: an option or a parameter that does not fit, named; the optimizer is as it was.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            first = len(self._params)
            names = group.get("param_names")
            params = [
                Param(p, names[i] if names else f"parameter {first + i} of shape {tuple(p.shape)}", group)
                for i, p in enumerate(group["params"])
            ]
            check_lr(group["lr"])
            self.check_group(group, params)
            if "stochastic_rounding" in self.defaults:
                check_precision(group, params)
            if "master_weights" in self.defaults and group["master_weights"]:
                make_masters(params)
            self.init_states(group, params)
            mastered = [p for p in params if p.master is not None]
            for p in mastered:
                self.state[p.tensor][MASTER] = p.wrap(p.local)
        except BaseException:
            self.param_groups.pop()
            for p in group["params"]:
                self.state.pop(p, None)
            raise
        self._params.update((param.tensor, param) for param in params)
        self._mastered += mastered
        self._forget()

    def _forget(self) -> None:
        self._collector.forget()
        self._cut_groups = None
        self.invalidate()

    # ---------------------------------------------------------------- step

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of non-finite gradients, since construction. On CUDA: waits for the device."""
        self._report_deferred(wait=True)
        return self._skipped

    def _report_deferred(self, wait: bool = False) -> None:
        for _ in range(self._deferred.skipped(wait)):
            self._skipped += 1
            _LOG.warning("step skipped: gradients were not finite (%d skipped so far)", self._skipped)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_norm: torch.Tensor | float | None = None
    ) -> Any:
        """One update of every parameter that has a gradient; returns what the closure returned.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_norm: what `clip_grad_norm_` returned. It is the same on every rank, so that whether to skip is known
                without asking the others.

        Communicates: nothing of its own but the agreement on non-finite gradients (see the class).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._report_deferred()
        active = self._collector.collect(list(self._params.values()))
        flag = self._nonfinite(active, grad_norm)
        if isinstance(flag, torch.Tensor) and not self.takes_found_inf:
            flag = bool(flag.item())
        if flag is True:
            self._count_skip(active)
        else:
            scale = getattr(self, "grad_scale", None)
            if scale is not None and active.grads:
                foreach_div_(active.grads, float(scale) if scale.device.type == "cpu" else scale)
            active.found_inf = flag if isinstance(flag, torch.Tensor) else None
            take_over(self._mastered)
            self.update(active)
            write_back(self._mastered)
            if active.found_inf is not None:
                self._deferred.add(active.found_inf)
        if not active.keeps:
            active.grads = []
        return loss

    def _nonfinite(self, active: Active, grad_norm: torch.Tensor | float | None) -> bool | torch.Tensor:
        """Whether this step is to be skipped: the same answer on every rank. A tensor where it is on the device."""
        found: torch.Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            if not self.skip_nonfinite:
                return False
            if grad_norm is not None:
                return not norm_is_finite(grad_norm)
            if self._cut_groups is None:
                self._cut_groups = cut_groups(list(self._params.values()))
            own = self._check(active.grads, active.version, next(iter(self._params)).device)
            found = agreed(own, self._cut_groups)
        return found if found.device.type != "cpu" else bool(found.item())

    def _count_skip(self, active: Active) -> None:
        self._skipped += 1
        bad = [param.name for param, grad in active if not bool(torch.isfinite(grad).all())]
        where = f"here in {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}" if bad else "on another rank"
        _LOG.warning("step skipped: gradients are not finite, %s (%d skipped so far)", where, self._skipped)

    # ---------------------------------------------------------------- state

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's states, by name; the 4 bytes of each step counter under "step"."""
        found: dict[str, int] = defaultdict(int)
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[name] += local_of(value).nbytes
        return dict(found)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after `synchronize`."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict into the states that are there, which keep their memory, dtype and placement.

        Takes what `state_dict` gave, here or from torch's optimizer of the same rule: local tensors in the same
        placement, or full plain tensors, of which each rank takes its own elements. A parameter without saved state
        starts again. Communicates nothing.

        Raises:
            ValueError: groups, keys, shapes, placements or a format that do not fit; nothing was changed.
        """
        state_dict = state_dict.copy()
        for hook in load_pre_hooks(self):
            state_dict = hook(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        self._check_saved_groups(saved_groups)
        ids = dict(
            zip(
                chain.from_iterable(g["params"] for g in saved_groups),
                chain.from_iterable(g["params"] for g in self.param_groups),
                strict=True,
            )
        )
        self._load_states({ids[key]: entry for key, entry in state_dict["state"].items() if key in ids})
        for group, new in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: deepcopy(v) for k, v in new.items() if k != "params"})
        for hook in load_post_hooks(self):
            hook(self)

    def _load_states(self, saved: dict[torch.Tensor, dict[str, Any]]) -> None:
        self.synchronize()
        for dry_run in (True, False):
            for tensor, param in self._params.items():
                entry = saved.get(tensor)
                if entry:
                    copy_state(param.name, self.state[tensor], entry, dry_run)
                elif not dry_run:
                    self.reset_state(param)
        self._forget()

    def _check_saved_groups(self, saved_groups: list[Group]) -> None:
        sizes = [len(g["params"]) for g in self.param_groups]
        saved_sizes = [len(g["params"]) for g in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(
                f"the state dict has groups of {saved_sizes} parameters, this optimizer of {sizes}; build it with the "
                "same groups"
            )
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            for key in self._format_options_of(group):
                if key in saved and saved[key] != group[key]:
                    raise ValueError(
                        f"param_groups[{i}]: the state dict was saved with {key}={saved[key]!r}, this optimizer has "
                        f"{key}={group[key]!r}; the format of the states depends on it, so build it with the saved one"
                    )

    def _format_options_of(self, group: Group) -> tuple[str, ...]:
        return self.format_options

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        kept = {name: getattr(self, name) for name in ("skip_nonfinite", *self.shared_options)}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__` (pickle, deepcopy): states are made again and filled with the old values."""
        super().__setstate__(state)
        groups, values = self.param_groups, self.state
        self.param_groups, self.state = [], defaultdict(dict)
        self._begin()
        for group in groups:
            self.add_param_group(group)
        self._load_states(dict(values))
