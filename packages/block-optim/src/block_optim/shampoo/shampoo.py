"""Shampoo on whole blocks (arXiv 1802.09568, 2309.06497).

For each block G (m x n) of each matrix, at its step t:

    L <- b2 L + (1 - b2) G G'        R <- b2 R + (1 - b2) G'G          (b2 = 1: sums, AdaGrad)
    every few steps, from its turn:  the roots (L / (1 - b2^t))^-1/4 and (R / (1 - b2^t))^-1/4
    M <- b1 M + (1 - b1) G
    D = root_L M root_R / (1 - b1^t), scaled to the norm that the grafting method's step has on this block

and for the whole tensor:  W -= lr (D + weight_decay W).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.core import _torch_compat as compat
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_choice, check_mesh
from block_optim.core.params import Group
from block_optim.shampoo import rule
from block_optim.shampoo.base import Preconditioned, StepBlocks, TensorStep, by_step, flat_states
from block_optim.shampoo.batches import Batch, batches
from block_optim.shampoo.plan import SIDES, TensorPlan


class Shampoo(Preconditioned):
    """Shampoo, blocked.

    Args:
        params: tensors, named tensors or groups; every option may be set for each group.
        lr: a number or a tensor of one element.
        betas: of the filtered gradient, and of the factors; 1.0 for the second sums them up (AdaGrad).
        eps: added to the root of the second moment in the grafting method and in elementwise tensors.
        weight_decay: decoupled: added to the update, times the weight.
        max_preconditioner_dim: the largest block.
        diagonal_above: dimensions larger than this have diagonal factors.
        precondition_frequency: steps from one computation of a block's roots to the next; the blocks' turns are spread
            over the steps. Before the step of this number the update is the grafting method's; without one there is
            none, and statistics are gathered.
        grafting: "adam", "rmsprop" or "none"; the second moment has the decay ``betas[1]``, or 0.999 where that is 1.
        root_epsilon: the ridge, relative to a factor's norm.
        stochastic_rounding: as in `AdamW`.
        replicate_mesh: see `BlockOptimizer`.

    `step` communicates nothing (but the agreement on non-finite gradients) where blocks are local; see `block_policy`,
    `bytes_per_step`. Tensors without matrices (1-D) take the grafting method's own step, or without one the diagonal
    preconditioner's, element by element.

    Raises:
        ValueError: an option that does not fit, or a parameter that is cut other than along its rows.
    """

    format_options = (*Preconditioned.format_options, "grafting")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_preconditioner_dim: int = 1024,
        diagonal_above: int = 65536,
        precondition_frequency: int = 10,
        grafting: str = "adam",
        root_epsilon: float = 1e-5,
        stochastic_rounding: bool = False,
        replicate_mesh: DeviceMesh | None = None,
    ) -> None:
        self.replicate_mesh = check_mesh("replicate_mesh", replicate_mesh)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "max_preconditioner_dim": max_preconditioner_dim, "diagonal_above": diagonal_above,
            "precondition_frequency": precondition_frequency, "grafting": grafting, "root_epsilon": root_epsilon,
            "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults)

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_choice("grafting", group["grafting"], rule.GRAFTING)
        if not 0 < group["root_epsilon"] < 1:
            raise ValueError(
                f"root_epsilon={group['root_epsilon']!r}: expected 0 < root_epsilon < 1, relative to a factor's norm; "
                "1e-5 is right for fp32"
            )

    @override
    def format_of(self, group: Group) -> dict[str, Any]:
        """Return the base's options, and whether there are averages of gradients."""
        return {**super().format_of(group), "betas[0] > 0": group.get("betas", (0,))[0] > 0}

    def _make_state(self, tensor: TensorPlan) -> dict[str, Tensor]:
        group = tensor.group
        state = {"step": torch.zeros((), dtype=torch.float32)}
        if rule.beta1(group) > 0:
            tensor.add_owned(state, "exp_avg")
        if tensor.grid is None or group["grafting"] != "none":
            tensor.add_owned(state, "exp_avg_sq")
        if tensor.grid is not None:
            for kind in ("factor", "root"):
                tensor.add_sides(state, kind)
        return state

    @override
    def update(self, active: StepGradients) -> None:
        works = self._gather(active)
        for group, _, members in by_step(works):
            self._accumulate(group, members)
        for job in rule.root_jobs(works):  # of the whole model together
            result = job.run()
            self._count(result.counts, [job.items[i][0] for i in result.kept])
        for group, step, members in by_step(works):
            self._precondition(group, step, members)
        self._scatter(works)
        self._apply(works, _move)

    def _accumulate(self, group: Group, works: Sequence[TensorStep]) -> None:
        """Advance the averages of whole runs, and the factors of blocks."""
        if firsts := flat_states(works, "exp_avg"):
            compat.foreach_lerp_(firsts, [w.grad for w in works], 1 - rule.beta1(group))
        grafted = [w for w in works if w.tensor.grid is None or group["grafting"] != "none"]
        if moments := flat_states(grafted, "exp_avg_sq"):
            grads, beta = [w.grad for w in grafted], rule.second_beta(group)
            if beta < 1:
                compat.foreach_mul_(moments, beta)
            compat.foreach_addcmul_(moments, grads, grads, 1 - beta if beta < 1 else 1.0)
        own = StepBlocks(works)
        for batch in batches(own.blocks):
            _advance_factors(rule.beta2(group), batch, batch.matrices(own.grads(batch)))

    def _precondition(self, group: Group, step: int, works: Sequence[TensorStep]) -> None:
        """Write the updates of works with these options and this step number."""
        for work in works:
            if work.tensor.grid is None:
                first, second = work.tensor.flat("exp_avg"), work.tensor.flat("exp_avg_sq")
                assert second is not None
                filtered = work.grad if first is None else first
                work.update.copy_(rule.elementwise_direction(group, step, filtered, second))
        own = StepBlocks(works)
        for batch in batches(own.blocks):
            has_average = "exp_avg" in batch.blocks[0].views
            filtered = batch.state("exp_avg") if has_average else batch.matrices(own.grads(batch))
            targets = own.updates(batch)
            compat.foreach_copy_(targets, list(rule.direction(group, step, batch, filtered)[: len(targets)]))


def _advance_factors(beta: float, batch: Batch, grads: Tensor) -> None:
    """Advance both factors of a batch of blocks."""
    for side in SIDES:
        gained = rule.outer(grads, side, batch.blocks[0].diagonal(side))
        factor = batch.side("factor", side)
        if beta < 1:
            factor.mul_(beta).add_(gained, alpha=1 - beta)
        else:
            factor.add_(gained)
        batch.put_side("factor", side, factor)


def _move(group: Group, works: Sequence[TensorStep], weights: list[Tensor]) -> None:
    updates = [w.local_update for w in works]
    if group["weight_decay"]:
        compat.foreach_add_(updates, weights, alpha=group["weight_decay"])
    rule.take(weights, updates, group["lr"])
