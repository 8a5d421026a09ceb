"""AdamW with fp32 states over flat runs."""

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.adam.rule import AdamWRule
from block_optim.core.base import BlockOptimizer
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_betas, check_execution, check_flag, check_range, reject_unsupported
from block_optim.core.params import Group, Param


class AdamW(BlockOptimizer):
    """`torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101), one kernel over each flat run of parameters.

    Gives torch's numbers bit by bit, wherever tensors are cut: those of its for-loop and foreach implementations, or
    with ``fused=True`` those of its fused kernel. States: ``step``, ``exp_avg``, ``exp_avg_sq`` (8 bytes a parameter),
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
        fused: torch's fused kernel. On CUDA the host then waits for nothing; on CPU it is the faster kernel.
        foreach: has no effect: torch's for-loop and foreach implementations have the same numbers.
        stochastic_rounding: round bf16 parameters up or down at random, to the nearer neighbour more often; fp32 ones
            stay exact.
        seed: for stochastic_rounding; its random bits depend on seed, parameter name, step and element only.
        skip_nonfinite: see `BlockOptimizer`.

    Raises:
        ValueError: an option or parameter that does not fit, named.
    """

    shared_options = ("fused",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
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
        seed: int = 0,
        skip_nonfinite: bool = True,
    ) -> None:
        check_execution(foreach, fused)
        refused = {"amsgrad": amsgrad, "capturable": capturable, "differentiable": differentiable}
        reject_unsupported(refused, ())
        self.fused = bool(fused)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "maximize": maximize, "fused": self.fused, "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, skip_nonfinite=skip_nonfinite)

    @property
    @override
    def supports_found_inf(self) -> bool:
        """True: both kernels check `found_inf` on the device, so the step does not synchronize."""
        return True

    @override
    def setup(self) -> None:
        self._rule = AdamWRule(fused=self.fused)

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
        self._rule.init_states(params, self.state)

    @override
    def invalidate(self) -> None:
        self._rule.bind(self.trained)

    @override
    def update(self, active: StepGradients) -> None:
        self._rule.update(active)


def check_adamw_options(group: Group) -> None:
    """Raise ValueError if an AdamW option is out of range."""
    beta1, beta2 = check_betas(group["betas"])
    check_range("betas[0]", beta1, 0, 1)
    check_range("betas[1]", beta2, 0, 1)
    check_range("eps", group["eps"], 0)
    check_range("weight_decay", group["weight_decay"], 0)
    if group["maximize"] is None:  # as torch's optimizers take it
        group["maximize"] = False
    check_flag("maximize", group["maximize"])
