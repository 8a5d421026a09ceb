"""BlockOptimizer: the common part of all optimizers of this package.

A subclass makes its states (`init_states`, when parameters are added) and updates (`update`, all parameters that have
gradients at once). The base class does the rest:

    step()  closure -> collect gradients -> are they finite, on all ranks -> unscale -> update
                       (compare lists)    (one pass; at most one all_reduce of 4 bytes)
    groups and states: see `core.stateful`
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from block_optim.core.finite import agreed, cut_groups, non_finite, norm_is_finite
from block_optim.core.gradients import Collector, StepGradients, unscaled
from block_optim.core.stateful import Stateful

_LOG = logging.getLogger("block_optim")


def is_first_rank() -> bool:
    """Whether this process is the one that reports for all: rank 0, or the only one."""
    return not (dist.is_initialized() and dist.get_rank())


class BlockOptimizer(Stateful):
    """Base of this package's optimizers, and of your own: two methods make one.

    Args:
        params: tensors, named tensors or groups, as torch's optimizers take them; plain, DTensors or RaggedDTensors.
        defaults: the options of a group and their defaults; ``lr`` among them.

    A subclass defines `init_states` and `update`, and may override the methods up to `check_blocks` and the attributes.
    Schedulers, closures, `GradScaler`, state dicts, distributed checkpoints, pickling and `Mixed` then work. Its
    constructor passes ``params`` on as they are: `Mixed` calls it with None, to have the algorithm alone.

    `step` reads groups, their options, `state` and ``requires_grad``, as torch's optimizers do. Edit them equally on
    every rank: `Muon`, Shampoo and SOAP communicate by them.

    Attributes:
        skip_nonfinite: skip, on every rank, a step whose gradients are not finite on some rank. False: no check.
        format_options: options that the format of states depends on; a state dict that differs in one is refused.
        recorded_options: those of them that each state records, which `read_saved` compares instead; not loaded.
        shared_options: constructor arguments of the whole optimizer, kept as attributes of the same name.
        requires_blocks: whether the constructor raises if ranks cut the blocks of `block_of`.
        divides_copies: whether ranks that hold copies of a whole parameter divide the work on it: ranks of a DTensor's
            mesh if all its placements are Replicate, ranks of ``replicate_mesh`` for plain parameters (DDP).
        replicate_mesh: a DeviceMesh, whose ranks have equal plain parameters and gradients; None: each works alone.

    `step` communicates nothing if ``grad_norm`` shows whether gradients are finite, on one rank, or with
    ``skip_nonfinite=False``; else (`GradScaler`'s ``found_inf`` included, which may differ by rank) one all_reduce
    of 4 bytes per process group that cuts a parameter. `update` may communicate more.
    """

    # GradScaler then leaves found_inf and grad_scale here, so that gradients are divided in fp32.
    _step_supports_amp_scaling = True

    skip_nonfinite = True

    def __init__(self, params: ParamsT | None, defaults: dict[str, Any]) -> None:
        self._reset()
        if params is None:
            self.defaults = defaults
            return
        super().__init__(params, defaults)
        self.prepare()

    def _reset(self) -> None:
        self._collector = Collector()
        self._skipped = 0
        self._cut_groups: list[dist.ProcessGroup] | None = None
        super()._reset()

    def _bind(self) -> None:
        self._collector.forget()
        self._cut_groups = None
        super()._bind()

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of non-finite gradients, since construction."""
        return self._skipped

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_norm: torch.Tensor | float | None = None
    ) -> Any:
        """One update of every parameter that has a gradient; returns the closure's result.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_norm: the result of `clip_grad_norm_`. It is the same on every rank, so that no communication is needed
                to decide whether to skip.

        Communicates: the agreement on non-finite gradients (see the class), and the communication of `update`.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph captures a step of {type(self).__name__}, which reads the device; step outside the graph"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._sync()
        active = self._collector.collect(self.trained)
        if self._nonfinite(active, grad_norm):
            self._count_skip(active)
            return loss
        scale = getattr(self, "grad_scale", None)
        if scale is not None and active.grads:
            active = unscaled(active, float(scale))
        self.update(active)
        return loss

    def _nonfinite(self, active: StepGradients, grad_norm: torch.Tensor | float | None) -> bool:
        """Whether to skip this step; identical on every rank. Waits for the device."""
        own: torch.Tensor | None = getattr(self, "found_inf", None)
        if own is None and not self.skip_nonfinite:
            return False
        if own is None and grad_norm is not None:
            return not norm_is_finite(grad_norm)
        if self._cut_groups is None:
            self._cut_groups = cut_groups(self.trained)
        device = next(iter(self._params)).device
        # Ranks agree on found_inf, too: torch asks the mesh of one gradient, and others may be cut over further ranks.
        own = non_finite(active.grads, device) if own is None else own.to(device, copy=True)
        return bool(agreed(own, self._cut_groups).item())

    def _count_skip(self, active: StepGradients) -> None:
        self._skipped += 1
        bad = [param.name for param, grad in active if not bool(torch.isfinite(grad).all())]
        where = f"here in {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}" if bad else "on another rank"
        _LOG.warning("step skipped: gradients are not finite, %s (%d skipped so far)", where, self._skipped)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "skip_nonfinite": self.skip_nonfinite}
