"""AdamW with fp32 states over flat runs."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from block_optim.adam.rule import AdamWRule, check_dense
from block_optim.core.active import Active
from block_optim.core.base import BlockOptimizer
from block_optim.core.options import check_range
from block_optim.core.params import Group, Param


class AdamW(BlockOptimizer):
    """`torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101), one kernel over each flat run of parameters.

    Gives torch's numbers bit by bit, wherever tensors are cut: those of its for-loop and foreach implementations, or
    with ``fused=True`` those of its fused kernel. States: ``step``, ``exp_avg``, ``exp_avg_sq`` (8 bytes a parameter),
    fp32 also for bf16 and fp16 parameters, which torch gives states of their own dtype; the arithmetic is fp32 then,
    rounded to nearest when it is written back.

    Args:
        params: tensors, named tensors or groups; plain, DTensors or RaggedDTensors.
        lr: a number or a tensor of one element.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        amsgrad: must be False.
        maximize: ascend.
        fused: torch's fused kernel. On CUDA the host then waits for nothing; on CPU it is the faster one.
        stochastic_rounding: round bf16 parameters up or down at random, to the nearer neighbour more often.
        seed: for stochastic_rounding; its random bits depend on seed, parameter name, step and element only.
        master_weights: keep fp32 copies of narrower parameters (state ``master_param``), and round them to nearest.
        skip_nonfinite: see `BlockOptimizer`.

    Raises:
        ValueError: an option or parameter that does not fit, named.
    """

    shared_options = ("fused",)
    format_options = ("master_weights",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        master_weights: bool = False,
        skip_nonfinite: bool = True,
    ) -> None:
        refuse_options(foreach=foreach, capturable=capturable, differentiable=differentiable)
        self.fused = bool(fused)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "fused": self.fused, "stochastic_rounding": stochastic_rounding,
            "seed": seed, "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults, skip_nonfinite=skip_nonfinite)

    @property
    def takes_found_inf(self) -> bool:
        """Whether the host need not wait for the skip flag: torch's fused kernel reads it on the device."""
        return self.fused

    def setup(self) -> None:
        """Make the rule."""
        self._rule = AdamWRule(fused=self.fused)

    def check_group(self, group: Group, params: list[Param]) -> None:
        """Raise ValueError where an option or a parameter does not fit."""
        check_adamw_options(group)
        if bool(group["fused"]) != self.fused:
            raise ValueError(f"fused={group['fused']!r} in one group: it is an option of the whole optimizer")
        for param in params:
            check_dense(param)

    def init_states(self, group: Group, params: list[Param]) -> None:
        """Make step counts and moments."""
        self._rule.init_states(params, self.state)

    def update(self, active: Active) -> None:
        """Update the parameters that have gradients."""
        self._rule.update(active)


def check_adamw_options(group: Group) -> None:
    """Raise ValueError where an option of AdamW has a value it cannot have."""
    try:
        beta1, beta2 = group["betas"]
    except (TypeError, ValueError):
        raise ValueError(f"betas={group['betas']!r}: expected two numbers") from None
    check_range("betas[0]", beta1, 0, 1)
    check_range("betas[1]", beta2, 0, 1)
    check_range("eps", group["eps"], 0)
    check_range("weight_decay", group["weight_decay"], 0)
    if group.get("amsgrad"):
        raise ValueError(
            "amsgrad=True: not here; its third state would grow the memory by half for a maximum that has not been "
            "shown to help; use torch.optim.AdamW for it"
        )


def refuse_options(**options: Any) -> None:
    """Raise ValueError for options of torch's that have no meaning here."""
    reasons = {
        "foreach": "there is one implementation, over flat runs; leave it out",
        "capturable": "CUDA graphs of the step are not supported; leave it out",
        "differentiable": "the step writes in place and is not differentiable; leave it out",
    }
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value!r}: {reasons[name]}")
