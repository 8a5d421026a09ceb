"""BlockOptimizer: the common part of all optimizers of this package.

A subclass makes its states (`init_states`, when parameters are added) and updates (`update`, all parameters that have
gradients at once). The base class does the rest:

    step()  closure -> collect gradients -> are they finite, on all ranks -> unscale -> update
            (a list compare)    (one pass; 4 bytes, or none)
    groups and states: see `core.stateful`
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from block_optim.core import device as devices
from block_optim.core._torch_compat import foreach_div_
from block_optim.core.finite import GradientCheck, agreed, cut_groups, norm_is_finite
from block_optim.core.gradients import Collector, StepGradients
from block_optim.core.options import check_capturable
from block_optim.core.params import Group, Param
from block_optim.core.policy import BlockRequest, Policy, make_policy
from block_optim.core.precision import refresh_masters, store_masters
from block_optim.core.skip import PendingFlags
from block_optim.core.stateful import Stateful
from layout_planner import Block
from ragged_shard import is_cpu

_LOG = logging.getLogger("block_optim")


class DeferredGroups(list[Group]):
    """The first groups of an optimizer to which `Mixed` adds others before it calls `prepare`."""


class BlockOptimizer(Stateful):
    """Base of this package's optimizers, and of your own: two methods make one.

    Args:
        params: tensors, named tensors or groups, as torch's optimizers take them; plain, DTensors or RaggedDTensors.
        defaults: the options of a group and their defaults; ``lr`` among them.
        skip_nonfinite: skip, on every rank, a step whose gradients are not finite on some rank. False: no check.

    Where ``defaults`` has ``master_weights``, a group may ask for fp32 copies of its narrow parameters: `update` then
    finds them as ``p.local``, and `step` rounds them into the parameters.

    A subclass defines `init_states` and `update`. It may override the methods up to `supports_found_inf`, those of
    `Stateful` up to `synchronize`, and the attributes below. Schedulers, closures, `GradScaler`, state dicts,
    distributed checkpoints, pickling and `Mixed` then work.

    `step` reads groups, their options, `state` and ``requires_grad``, as torch's optimizers do. Edit them equally on
    every rank: `Muon`, Shampoo and SOAP communicate by them.

    Attributes:
        format_options: options that the format of states depends on; a state dict that differs in one is refused.
        shared_options: constructor arguments of the whole optimizer, kept as attributes of the same name.
        requires_blocks: whether the constructor raises if ranks cut the blocks of `block_of`.
        capturable: whether CUDA graphs can capture `step`: step counts and the count of skipped steps are then on the
            device, and a step in which the host would have to read them or a flag raises.
        divides_copies: whether ranks that hold copies of a whole parameter divide the work on it: those of a DTensor's
            mesh if all its placements are Replicate, those of ``replicate_mesh`` for plain parameters (DDP).
        replicate_mesh: a DeviceMesh, whose ranks have equal plain parameters and gradients; None: each works alone.

    `step` communicates nothing if it is known whether gradients are finite (``found_inf``, ``grad_norm``),
    on one rank, or with ``skip_nonfinite=False``; else one all_reduce of 4 bytes per process group that cuts a
    parameter. `update` may communicate more.
    """

    requires_blocks: ClassVar[bool] = False
    capturable: bool = False
    # GradScaler then leaves found_inf and grad_scale here instead of waiting for them.
    _step_supports_amp_scaling = True

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, skip_nonfinite: bool = True) -> None:
        self.skip_nonfinite = skip_nonfinite
        self._reset()
        super().__init__(params, defaults)
        if not isinstance(params, DeferredGroups):
            self.prepare()

    def _reset(self) -> None:
        self._collector = Collector()
        self._skipped = 0
        self._skipped_on_device: torch.Tensor | None = None  # of a capturable optimizer
        self._flags = PendingFlags()
        self._cut_groups: list[dist.ProcessGroup] | None = None
        self._check = GradientCheck()
        super()._reset()

    def _bind(self) -> None:
        self._collector.forget()
        self._cut_groups = None
        if self.capturable and self._skipped_on_device is None and self._params:
            device = next(iter(self._params)).device
            self._skipped_on_device = torch.zeros((), dtype=torch.float32, device=device)
        super()._bind()

    # ---------------------------------------------------------------- what a subclass may define

    def update(self, active: StepGradients) -> None:
        """Update the parameters that have gradients; `StepGradients` iterates over (`Param`, this rank's gradient).

        A parameter's options are in ``p.group``, its memory is ``p.local``, and that of a state is
        ``local_of(self.state[p.tensor][name])``.
        """
        raise NotImplementedError

    @classmethod
    def block_of(cls, name: str, param: torch.Tensor, options: Mapping[str, Any]) -> Block | None:
        """The block of ``param`` that must not be split across ranks under these options, or None."""
        return None

    def prepare(self) -> None:
        """Called once when the constructor has added all groups. May communicate; `update` must not rely on it."""

    @property
    def supports_found_inf(self) -> bool:
        """Whether `update` obeys ``active.found_inf`` on the device, so that the host does not wait for it.

        Its writes are to be inside `core.skip.unless`; step counts on the host (states called ``step``) need not be.
        """
        return False

    def step_was_skipped(self) -> None:
        """Discard deferred work after the device reports that the step was skipped."""

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

        Under it blocks are whole on a rank, so that this optimizer needs no communication for them. Without ``units``
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

        def request(name: str, param: torch.Tensor) -> BlockRequest:
            block = cls.block_of(name, param, chosen)
            return BlockRequest(name, tuple(param.shape), block, optional=not cls.requires_blocks)

        return make_policy(request, units, world_size, max_padding)

    @classmethod
    def all_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's options: these, and the defaults of the others.

        Raises:
            TypeError: an option that the constructor does not have.
        """
        parameters = inspect.signature(cls).parameters.values()
        defaults = {
            p.name: p.default for p in parameters if p.name != "params" and p.kind is not p.VAR_KEYWORD
        }
        if unknown := sorted(options.keys() - defaults.keys()):
            raise TypeError(f"{cls.__name__} has no option {', '.join(map(repr, unknown))}")
        return {**defaults, **options}

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        check_capturable(group, self.capturable)

    def _make_states(self, params: list[Param]) -> None:
        for param in params if self.capturable else ():
            if not devices.runs_ahead(param.device):
                raise ValueError(
                    f"{param.name}: capturable=True needs parameters on an accelerator, this one is on the CPU"
                )
        if self.requires_blocks:
            self.check_blocks(params)
        super()._make_states(params)

    def check_blocks(self, params: list[Param]) -> None:
        """Raise ValueError if ranks cut a block of `block_of`; called if the optimizer `requires_blocks`."""
        for param in params:
            block = self.block_of(param.name, param.tensor, {**self.defaults, **param.group})
            if block is not None and param.numel:
                param.check_whole(block, type(self).__name__)

    # ---------------------------------------------------------------- step

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of non-finite gradients, since construction. On CUDA: waits for the device."""
        self._read_flags(wait=True)
        counted = self._skipped_on_device
        return self._skipped + (0 if counted is None else int(counted))

    def _read_flags(self, *, wait: bool = False) -> None:
        for _ in range(self._flags.skipped(wait=wait)):
            self._skipped += 1
            self.step_was_skipped()
            _LOG.warning("step skipped: gradients were not finite (%d skipped so far)", self._skipped)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_norm: torch.Tensor | float | None = None
    ) -> Any:
        """One update of every parameter that has a gradient; returns what the closure returned.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_norm: the result of `clip_grad_norm_`. It is the same on every rank, so that no communication is needed
                to decide whether to skip.

        Communicates: the agreement on non-finite gradients (see the class), and what `update` communicates.
        """
        if devices.is_capturing() and not self.capturable:
            raise RuntimeError(
                f"a CUDA graph captures a step of {type(self).__name__}: build it with capturable=True"
            )
        for group in self.param_groups if self.capturable else ():
            if isinstance(group["lr"], torch.Tensor):
                check_on_device("lr", group["lr"])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._read_flags()
        self._sync()
        active = self._collector.collect(self._trained)
        flag = self._nonfinite(active, grad_norm)
        if isinstance(flag, torch.Tensor) and not self.supports_found_inf:
            flag = bool(flag.item())
        if flag is True:
            self._count_skip(active)
        else:
            scale = getattr(self, "grad_scale", None)
            if self.capturable and scale is not None:
                check_on_device("grad_scale", scale)
            if scale is not None and active.grads:
                divisor = scale if devices.runs_ahead(scale.device) else float(scale)
                for dtype in {g.dtype for g in active.grads}:  # mixed, they are a kernel a tensor on CUDA
                    foreach_div_([g for g in active.grads if g.dtype == dtype], divisor)
            active.found_inf = flag if isinstance(flag, torch.Tensor) else None
            counts = [] if active.found_inf is None or self.capturable else self._host_counts()
            before = torch.stack(counts) if counts else None
            refresh_masters(self._mastered)
            self.update(active)
            store_masters(self._mastered)
            if self._skipped_on_device is not None and active.found_inf is not None:
                self._skipped_on_device.add_(active.found_inf != 0)
            elif active.found_inf is not None:
                self._flags.add(active.found_inf, counts, before)
        if not active.keeps:
            active.grads = []
        return loss

    def _nonfinite(
        self, active: StepGradients, grad_norm: torch.Tensor | float | None
    ) -> bool | torch.Tensor:
        """Whether to skip this step; identical on every rank. A 0-d tensor if the flag is on the device."""
        result: torch.Tensor | None = getattr(self, "found_inf", None)
        if self.capturable and result is not None:
            check_on_device("found_inf", result)
        if result is None:
            if not self.skip_nonfinite:
                return False
            if grad_norm is not None:
                if self.capturable:
                    check_on_device("grad_norm", grad_norm)
                finite = norm_is_finite(grad_norm)
                return (~finite).float() if isinstance(finite, torch.Tensor) else not finite
            if self._cut_groups is None:
                self._cut_groups = cut_groups(self._trained)
            if self.capturable and self._cut_groups:
                raise ValueError(
                    "capturable=True: ranks would agree on non-finite gradients by a collective; give "
                    "step(grad_norm=...) or build the optimizer with skip_nonfinite=False"
                )
            own = self._check(active.grads, active.version, next(iter(self._params)).device)
            result = agreed(own, self._cut_groups)
        return result if devices.runs_ahead(result.device) else bool(result.item())

    def _host_counts(self) -> list[torch.Tensor]:
        """The step counts that are on the host."""
        counts = (self.state[param.tensor].get("step") for param in self._trained)
        return [c for c in counts if isinstance(c, torch.Tensor) and is_cpu(c.device)]

    def _complete(self) -> None:
        self._read_flags(wait=True)
        super()._complete()

    def _count_skip(self, active: StepGradients) -> None:
        self._skipped += 1
        bad = [param.name for param, grad in active if not bool(torch.isfinite(grad).all())]
        where = f"here in {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}" if bad else "on another rank"
        _LOG.warning("step skipped: gradients are not finite, %s (%d skipped so far)", where, self._skipped)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "skip_nonfinite": self.skip_nonfinite}


def check_on_device(name: str, value: torch.Tensor | float) -> None:
    """Raise ValueError unless a value that a capturable step uses is on the device: a graph would keep the host's."""
    if not isinstance(value, torch.Tensor) or not devices.runs_ahead(value.device):
        raise ValueError(f"{name}: capturable=True needs a tensor on the device, got {value!r}")
