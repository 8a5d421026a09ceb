"""BlockOptimizer: what every optimizer here shares, whatever its update rule.

A subclass says what its options may be (`_check_group`), makes its states (`_init_state`, for every parameter, when the
parameter is added) and updates (`_update`, all parameters that have gradients at once). The base class does the rest:

    step()  closure -> which gradients are there -> are they finite, on all ranks -> unscale -> _update
            (a list compare)                        (one pass; 4 bytes, or none)
    state   made at construction, in the parameter's placement; loading copies into it and never replaces it
"""

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any

import torch

from block_optim._finite import Agreement, DeferredFlags, GradientCheck, cut_groups, norm_is_finite
from block_optim._load import copy_state
from block_optim._params import Param
from block_optim._torch_compat import foreach_div_, load_post_hooks, load_pre_hooks, local_of

_LOG = logging.getLogger("block_optim")


class Active:
    """The parameters that have gradients in this step, with their local gradients, in the optimizer's order.

    `version` rises when other parameters have gradients, when a parameter lies elsewhere in memory, or when gradients
    lie otherwise among themselves (which share a storage, at which offsets): what is planned from that may be kept for
    as long as it stays. Gradient tensors (and views of them) may be kept only while `keeps` is the same number and not
    0, which means that somebody else keeps them too: else `zero_grad()` would free nothing.
    """

    __slots__ = ("grads", "keeps", "locals", "params", "version")

    def __init__(
        self, params: list[Param], parts: list[torch.Tensor], grads: list[torch.Tensor], version: int
    ) -> None:
        self.params = params
        self.locals = parts
        self.grads = grads
        self.version = version
        self.keeps = 0


class BlockOptimizer(torch.optim.Optimizer):
    """Base of the optimizers of this package; not for direct use.

    Args:
        params: tensors, named tensors or groups, as torch's optimizers take them; plain, DTensors or RaggedDTensors.
        defaults: the options and their defaults.
        skip_nonfinite: leave out, on every rank, a step whose gradients are not finite on some rank; False: no check.

    `step` communicates nothing where the answer is known (GradScaler's `found_inf`, `grad_norm`), on one rank, or with
    ``skip_nonfinite=False``; else one all_reduce of 4 bytes per process group that cuts a parameter.

    A subclass defines

    * ``_check_group(group, params)``: raise ValueError naming the option (or parameter) that does not fit, before
      anything is made; may put options into their final form in ``group``.
    * ``_init_state(group, params)``: fill ``self.state[p.param]`` for every `Param`; param-shaped tensors through
      ``p.wrap``.
    * ``_update(active, found_inf)``: update; ``found_inf`` is None unless ``_takes_flag``.
    * ``_fixed``: names of the options that a state's format depends on; a state dict in which they differ is refused.
    * ``_reset_state(param)``: states as at construction (default: zeros).
    """

    _step_supports_amp_scaling = (
        True  # GradScaler then leaves found_inf and grad_scale here instead of waiting for them
    )
    _takes_flag = (
        False  # whether _update takes found_inf as a tensor on the device, so that the host need not wait
    )
    _fixed: tuple[str, ...] = ()

    def __init__(self, params: Any, defaults: dict[str, Any], *, skip_nonfinite: bool = True) -> None:
        self._skip_nonfinite = skip_nonfinite
        self._begin()
        super().__init__(params, defaults)

    def _begin(self) -> None:
        self._params: dict[torch.Tensor, Param] = {}
        self._active: Active | None = None
        self._seen_grads: list[Any] = []
        self._seen_addresses: list[int] = []
        self._seen_places: Any = None
        self._epoch = 0
        self._version = 0
        self._skipped = 0
        self._deferred = DeferredFlags()
        self._cut_groups: list[Any] | None = None
        self._check = GradientCheck()

    # ---------------------------------------------------------------- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
                Param(p, names[i] if names else f"parameter {first + i} of shape {tuple(p.shape)}")
                for i, p in enumerate(group["params"])
            ]
            check_lr(group["lr"])
            self._check_group(group, params)
            self._init_state(group, params)
        except BaseException:
            self.param_groups.pop()
            for p in group["params"]:
                self.state.pop(p, None)
            raise
        self._params.update((param.param, param) for param in params)
        self._forget()

    def _check_group(self, group: dict[str, Any], params: list[Param]) -> None:
        raise NotImplementedError

    def _init_state(self, group: dict[str, Any], params: list[Param]) -> None:
        raise NotImplementedError

    def _update(self, active: Active, found_inf: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _reset_state(self, param: Param) -> None:
        for value in self.state[param.param].values():
            if isinstance(value, torch.Tensor):
                local_of(value).zero_()

    def _forget(self) -> None:
        """Drop everything that was derived from the parameters' and gradients' addresses."""
        self._active = None
        self._cut_groups = None

    # ---------------------------------------------------------------- step

    @property
    def skipped_steps(self) -> int:
        """Steps left out because of non-finite gradients, since construction. On CUDA: waits for the device."""
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
            closure: evaluates the model anew and returns the loss.
            grad_norm: what `clip_grad_norm_` returned. It is the same on every rank, so that whether to skip is known
                without asking the others.

        Communicates: nothing of its own but the agreement on non-finite gradients (see the class).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._report_deferred()
        active = self._collect()
        flag = self._nonfinite(active, grad_norm)
        if isinstance(flag, torch.Tensor) and not self._takes_flag:
            flag = bool(flag.item())
        if flag is True:
            self._count_skip(active)
            if not active.keeps:
                active.grads = []
            return loss
        scale = getattr(self, "grad_scale", None)
        if scale is not None and active.grads:
            foreach_div_(active.grads, float(scale) if scale.device.type == "cpu" else scale)
        found_inf = flag if isinstance(flag, torch.Tensor) else None
        self._update(active, found_inf)
        if found_inf is not None:
            self._deferred.add(found_inf)
        if not active.keeps:
            active.grads = []
        return loss

    def _collect(self) -> Active:
        """The gradients that are there. The usual answers cost one pass over the parameters' list."""
        grads = [p.grad for p in self._params]
        addresses = [local_of(p).data_ptr() for p in self._params]
        addresses += [0 if g is None else local_of(g).data_ptr() for g in grads]
        active = self._active
        seen = zip(grads, self._seen_grads, strict=True) if active is not None else ()
        if (
            active is not None
            and addresses == self._seen_addresses
            and all(g is (r and r()) for g, r in seen)
        ):
            if not active.keeps:  # the same objects again: somebody keeps them, so may we
                active.keeps = self._epoch
                active.grads = self._local_grads(grads)
            return active
        params = [p for p, g in zip(self._params.values(), grads, strict=True) if g is not None]
        parts = [p.local for p in params]
        local_grads = self._local_grads(grads)
        self._seen_grads = [None if g is None else weakref.ref(g) for g in grads]
        self._seen_addresses = addresses
        self._epoch += 1
        places = (_places(parts, absolute=True), _places(local_grads, absolute=False))
        if active is not None and params == active.params and places == self._seen_places:
            active.grads, active.keeps = local_grads, 0
            return active
        self._version += 1
        self._seen_places = places
        self._active = Active(params, parts, local_grads, self._version)
        return self._active

    def _local_grads(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
        pairs = zip(self._params.values(), grads, strict=True)
        return [param.local_grad(grad).detach() for param, grad in pairs if grad is not None]

    def _nonfinite(self, active: Active, grad_norm: Any) -> bool | torch.Tensor:
        """Whether this step is to be skipped: the same answer on every rank. A tensor where it is on the device."""
        found = getattr(self, "found_inf", None)
        if found is not None:
            return found if found.device.type != "cpu" else bool(found.item())
        if not self._skip_nonfinite:
            return False
        if grad_norm is not None:
            return not norm_is_finite(grad_norm)
        if self._cut_groups is None:
            self._cut_groups = cut_groups(list(self._params.values()))
        flag = self._check(active.grads, active.version, next(iter(self._params)).device)
        flag = Agreement(flag, self._cut_groups).wait()
        return flag if flag.device.type != "cpu" else bool(flag.item())

    def _count_skip(self, active: Active) -> None:
        self._skipped += 1
        bad = [
            p.name
            for p, g in zip(active.params, active.grads, strict=True)
            if not bool(torch.isfinite(g).all())
        ]
        where = f"here in {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}" if bad else "on another rank"
        _LOG.warning("step skipped: gradients are not finite, %s (%d skipped so far)", where, self._skipped)

    # ---------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict into the states that are there, which keep their memory, dtype and placement.

        Takes what `state_dict` gave, here or from torch's optimizer of the same rule: local parts in the same
        placement, or full plain tensors, of which each rank takes its own part. A parameter without saved state
        starts afresh. Communicates nothing.

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
        saved = {ids[key]: entry for key, entry in state_dict["state"].items() if key in ids}
        self._load_states(saved)
        for group, new in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: deepcopy(v) for k, v in new.items() if k != "params"})
        for hook in load_post_hooks(self):
            hook(self)

    def _load_states(self, saved: dict[torch.Tensor, dict[str, Any]]) -> None:
        for dry_run in (True, False):
            for tensor, param in self._params.items():
                entry = saved.get(tensor)
                if entry:
                    copy_state(param.name, self.state[tensor], entry, dry_run)
                elif not dry_run:
                    self._reset_state(param)
        self._forget()

    def _check_saved_groups(self, saved_groups: list[dict[str, Any]]) -> None:
        sizes = [len(g["params"]) for g in self.param_groups]
        saved_sizes = [len(g["params"]) for g in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(
                f"the state dict has groups of {saved_sizes} parameters, this optimizer of {sizes}; build it with the "
                "same groups"
            )
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            for key in self._fixed:
                if key in saved and saved[key] != group[key]:
                    raise ValueError(
                        f"param_groups[{i}]: the state dict was saved with {key}={saved[key]!r}, this optimizer has "
                        f"{key}={group[key]!r}; the format of the states depends on it, so build it with the saved one"
                    )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_skip_nonfinite": self._skip_nonfinite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__` (pickle, deepcopy): states are made anew and filled with the old values."""
        super().__setstate__(state)
        groups, values = self.param_groups, self.state
        self.param_groups, self.state = [], defaultdict(dict)
        self._begin()
        for group in groups:
            self.add_param_group(group)
        self._load_states(dict(values))


def _places(tensors: list[torch.Tensor], *, absolute: bool) -> list[Any]:
    """Where and how tensors lie: in which storage (or, not absolute, which of them share one), and how in it."""
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    if not absolute:
        order = {pointer: i for i, pointer in reversed(list(enumerate(storages)))}
        storages = [order[pointer] for pointer in storages]
    return [(s, t.storage_offset(), t.dtype, t.stride()) for s, t in zip(storages, tensors, strict=True)]


def check_lr(lr: Any) -> None:
    """Raise unless ``lr`` is a number >= 0 or a tensor of one element."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr: expected one number, got a tensor of shape {tuple(lr.shape)}")
    elif not (isinstance(lr, (int, float)) and lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr!r}: expected a number >= 0 or a tensor of one element")


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise unless ``low <= value < high``."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value < high:
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high})"
        raise ValueError(f"{name}={value!r}: expected a number {wanted}")
