"""BlockOptimizer: the common part of all optimizers of this package.

A subclass makes its states (`init_states`, when parameters are added) and updates (`update`, all parameters that have
gradients at once). The base class does the rest:

    step()  closure -> collect gradients -> are they finite, on all ranks -> unscale -> update
            (a list compare)    (one pass; 4 bytes, or none)
    groups and states: see `core.stateful`
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from block_optim.core import device as devices
from block_optim.core.finite import GradientCheck, agreed, cut_groups, norm_is_finite
from block_optim.core.gradients import Collector, StepGradients, unscaled
from block_optim.core.skip import PendingFlags
from block_optim.core.stateful import Stateful
from ragged_shard import is_cpu

_LOG = logging.getLogger("block_optim")


class BlockOptimizer(Stateful):
    """Base of this package's optimizers, and of your own: two methods make one.

    Args:
        params: tensors, named tensors or groups, as torch's optimizers take them; plain, DTensors or RaggedDTensors.
        defaults: the options of a group and their defaults; ``lr`` among them.
        skip_nonfinite: skip, on every rank, a step whose gradients are not finite on some rank. False: no check.

    A subclass defines `init_states` and `update`, and may override the methods up to `check_blocks` and the attributes.
    Schedulers, closures, `GradScaler`, state dicts, distributed checkpoints, pickling and `Mixed` then work. Its
    constructor passes ``params`` on as they are: `Mixed` calls it with None, to have the algorithm alone.

    `step` reads groups, their options, `state` and ``requires_grad``, as torch's optimizers do. Edit them equally on
    every rank: `Muon`, Shampoo and SOAP communicate by them.

    Attributes:
        format_options: options that the format of states depends on; a state dict that differs in one is refused.
        shared_options: constructor arguments of the whole optimizer, kept as attributes of the same name.
        requires_blocks: whether the constructor raises if ranks cut the blocks of `block_of`.
        divides_copies: whether ranks that hold copies of a whole parameter divide the work on it: those of a DTensor's
            mesh if all its placements are Replicate, those of ``replicate_mesh`` for plain parameters (DDP).
        replicate_mesh: a DeviceMesh, whose ranks have equal plain parameters and gradients; None: each works alone.

    `step` communicates nothing if ``grad_norm`` tells whether gradients are finite, on one rank, or with
    ``skip_nonfinite=False``; else (`GradScaler`'s ``found_inf`` included, which may differ by rank) one all_reduce
    of 4 bytes per process group that cuts a parameter. `update` may communicate more.
    """

    # GradScaler then leaves found_inf and grad_scale here instead of waiting for them.
    _step_supports_amp_scaling = True

    def __init__(
        self, params: ParamsT | None, defaults: dict[str, Any], *, skip_nonfinite: bool = True
    ) -> None:
        self.skip_nonfinite = skip_nonfinite
        self._reset()
        if params is None:
            self.defaults = defaults
            return
        super().__init__(params, defaults)
        self.prepare()

    def _reset(self) -> None:
        self._collector = Collector()
        self._skipped = 0
        self._flags = PendingFlags()
        self._cut_groups: list[dist.ProcessGroup] | None = None
        self._check = GradientCheck()
        super()._reset()

    def _bind(self) -> None:
        self._collector.forget()
        self._cut_groups = None
        super()._bind()

    # ---------------------------------------------------------------- step

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of non-finite gradients, since construction. On CUDA: waits for the device."""
        self._read_flags(wait=True)
        return self._skipped

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
        if devices.is_capturing():
            raise RuntimeError(
                f"a CUDA graph captures a step of {type(self).__name__}, which reads the device; step outside the graph"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._read_flags()
        self._sync()
        collected = active = self._collector.collect(self.trained)
        flag = self._nonfinite(active, grad_norm)
        if isinstance(flag, torch.Tensor) and not self.supports_found_inf:
            flag = bool(flag.item())
        if flag is True:
            self._count_skip(active)
        else:
            scale = getattr(self, "grad_scale", None)
            if scale is not None and active.grads:
                active = unscaled(active, scale if devices.runs_ahead(scale.device) else float(scale))
            active.found_inf = flag if isinstance(flag, torch.Tensor) else None
            counts = [] if active.found_inf is None else self._host_counts()
            before = torch.stack(counts) if counts else None
            self.update(active)
            if active.found_inf is not None:
                self._flags.add(active.found_inf, counts, before)
        if not collected.keeps:
            collected.grads = []
        return loss

    def _nonfinite(
        self, active: StepGradients, grad_norm: torch.Tensor | float | None
    ) -> bool | torch.Tensor:
        """Whether to skip this step; identical on every rank. A 0-d tensor if the flag is on the device."""
        own: torch.Tensor | None = getattr(self, "found_inf", None)
        if own is None and not self.skip_nonfinite:
            return False
        if own is None and grad_norm is not None:
            finite = norm_is_finite(grad_norm)
            return (~finite).float() if isinstance(finite, torch.Tensor) else not finite
        if self._cut_groups is None:
            self._cut_groups = cut_groups(self.trained)
        device = next(iter(self._params)).device
        check = self._check
        # Ranks agree on found_inf, too: torch asks the mesh of one gradient, and others may be cut over further ranks.
        own = check(active.grads, active.version, device) if own is None else own.to(device, copy=True)
        result = agreed(own, self._cut_groups)
        return result if devices.runs_ahead(result.device) else bool(result.item())

    def _host_counts(self) -> list[torch.Tensor]:
        """The step counts that are on the host."""
        counts = (self.state[param.tensor].get("step") for param in self.trained)
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
