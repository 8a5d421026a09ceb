"""AdamW with fp32 states: torch's functions over this rank's elements.

The functions are elementwise, so an element's numbers do not depend on where its tensor is cut. torch's fused CPU
kernel rounds the last elements of a tensor, fewer than a vector, in another way: it gets whole vectors only.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.core._torch_compat import foreach_copy_, local_of
from block_optim.core.base import BlockOptimizer
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_betas, check_execution, check_flag, check_range
from block_optim.core.params import Group, Param
from block_optim.core.rounding import NarrowWriter
from block_optim.core.scratch import chunk_on
from ragged_shard.device import CPU, is_cpu

# Elements of the widest SIMD vector, and of the cache line by which torch's fused kernel divides work.
VECTOR = 16

_ADAMW: Callable[..., None] = adamw


class AdamW(BlockOptimizer):
    """`torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101) on this rank's elements of sharded parameters.

    Gives torch's numbers bit by bit, wherever tensors are cut: of its for-loop and foreach implementations, or
    with ``fused=True`` of its fused kernel. States: ``step``, ``exp_avg``, ``exp_avg_sq`` (8 bytes a parameter),
    fp32 also for bf16 and fp16 parameters, to which torch gives bf16 and fp16 states; the arithmetic is fp32 then,
    rounded to nearest when it is written back.

    Args:
        params: tensors, named tensors or groups; plain, DTensors or RaggedDTensors.
        lr: a number or a tensor of one element.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        amsgrad, capturable, differentiable: False; not supported otherwise.
        maximize: ascend.
        fused: torch's fused kernel.
        foreach: has no effect: torch's for-loop and foreach implementations have the same numbers.
        stochastic_rounding: round bf16 parameters up or down at random, to the nearer neighbour more often; fp32 ones
            stay exact. The random bits depend on parameter name, step and element only.

    Raises:
        ValueError: an option or parameter that does not fit, named.
    """

    shared_options = ("fused",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool | None = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        check_execution(foreach, fused, amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        self.fused = bool(fused)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "maximize": maximize, "fused": self.fused, "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults)

    @override
    def setup(self) -> None:
        self._moments = Moments(self.fused)

    @override
    def check_options(self, group: Group) -> None:
        check_adamw_options(group)
        if group["fused"] is None:
            group["fused"] = self.fused
        if group["fused"] != self.fused:
            raise ValueError(
                f"fused={group['fused']!r} in one group: it is an option of the whole optimizer, which has "
                f"fused={self.fused} (and other numbers); build it with the one that you want"
            )

    @override
    def check_group(self, group: Group, params: list[Param]) -> None:
        for param in params:
            param.check_dense()

    @override
    def init_states(self, group: Group, params: list[Param]) -> None:
        self._moments.init_states(params, self.state)

    @override
    def update(self, active: StepGradients) -> None:
        self._moments.update(active, self.state)


class Moments:
    """States ``step``, ``exp_avg`` and ``exp_avg_sq`` (fp32; fp64 of fp64 parameters), and the update by them."""

    def __init__(self, fused: bool = False) -> None:
        self._fused, self._write = fused, NarrowWriter()

    def init_states(self, params: Sequence[Param], state: dict[Tensor, Any]) -> None:
        """Make the states of parameters."""
        for param in params:
            wide = torch.promote_types(param.dtype, torch.float32)
            # As torch has it: its fused kernel reads the count on the device.
            step = torch.zeros((), dtype=torch.float32, device=param.device if self._fused else CPU)
            state[param.tensor] = {
                "step": step,
                "exp_avg": param.zeros(wide),
                "exp_avg_sq": param.zeros(wide),
            }

    def update(self, active: StepGradients, state: dict[Tensor, Any]) -> None:
        """One step of the parameters that have gradients."""
        groups: dict[int, list[tuple[Param, list[Tensor], Tensor]]] = defaultdict(list)
        for param, local, grad in zip(active.params, active.locals, active.grads, strict=True):
            own = state[param.tensor]
            tensors = [local, grad, local_of(own["exp_avg"]), local_of(own["exp_avg_sq"])]
            groups[id(param.group)].append((param, tensors, own["step"]))
        for members in groups.values():
            options, wide, steps = _options_of(members[0][0].group), [], []
            for param, tensors, step in members:
                if len({t.dtype for t in tensors}) == 1:
                    wide.append(tensors)
                    steps.append(step)
                else:
                    self._update_in_chunks(param, tensors, step, options)
            if wide:
                self._call([list(same) for same in zip(*wide, strict=True)], steps, options)

    def _update_in_chunks(
        self, param: Param, tensors: list[Tensor], step: Tensor, options: dict[str, Any]
    ) -> None:
        """Update weights, or by gradients, that are narrower than the moments: in wide copies, rounded once."""
        local, grad, *moments = tensors
        grad = (
            grad if grad.stride() == local.stride() else torch.empty_like(local, dtype=grad.dtype).copy_(grad)
        )
        before, done = step.clone(), 0
        flat = [_flat(t).split(chunk_on(local.device)) for t in (local, grad, *moments)]
        for weight, gradient, first, second in zip(*flat, strict=True):
            wide = weight.to(first.dtype)
            step.copy_(before)
            self._call([[wide], [gradient.to(first.dtype)], [first], [second]], [step], options)
            if wide is not weight:
                self._write(param, wide, weight, done, int(step))
            done += weight.numel()

    def _call(self, lists: list[list[Tensor]], steps: list[Tensor], options: dict[str, Any]) -> None:
        if self._fused and is_cpu(steps[0].device):
            _fused_on_cpu(lists, steps, options)
        else:
            _ADAMW(*lists, [], steps, fused=self._fused, **options)


def _options_of(group: Group) -> dict[str, Any]:
    lr, (beta1, beta2) = group["lr"], group["betas"]
    return {
        "amsgrad": False, "beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"]),
        "lr": lr.reshape(()) if isinstance(lr, Tensor) else float(lr),
        "weight_decay": float(group["weight_decay"]), "maximize": group["maximize"],
    }  # fmt: skip


def _fused_on_cpu(lists: list[list[Tensor]], steps: list[Tensor], options: dict[str, Any]) -> None:
    """torch's fused kernel over whole vectors, and over the ends of tensors padded to vectors."""
    lists[1] = [
        g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        for p, g in zip(*lists[:2], strict=True)
    ]
    flat = [[_flat(t) for t in tensors] for tensors in lists]
    ends = [t.numel() - t.numel() % VECTOR for t in flat[0]]
    bodies = [[t[:end] for t, end in zip(tensors, ends, strict=True)] for tensors in flat]
    tails = [[t[end:] for t, end in zip(tensors, ends, strict=True)] for tensors in flat]
    padded = [[torch.zeros(VECTOR, dtype=t.dtype) for t in tensors] for tensors in tails]
    used = [[p[: t.numel()] for p, t in zip(*pair, strict=True)] for pair in zip(padded, tails, strict=True)]
    for into, tail in zip(used, tails, strict=True):
        foreach_copy_(into, tail)
    _ADAMW(*padded, [], [step.clone() for step in steps], fused=True, **options)
    _ADAMW(*bodies, [], steps, fused=True, **options)
    for i in (0, 2, 3):
        foreach_copy_(tails[i], used[i])


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def check_adamw_options(group: Group) -> None:
    """Raise ValueError if an AdamW option is out of range."""
    check_betas(group["betas"])
    check_range("eps", group["eps"], 0)
    check_range("weight_decay", group["weight_decay"], 0)
    if group["maximize"] is None:  # as torch's optimizers take it
        group["maximize"] = False
    check_flag("maximize", group["maximize"])
