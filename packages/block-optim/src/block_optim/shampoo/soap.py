"""SOAP on whole blocks (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's factors.

For each block G (m x n), with bases Q_L, Q_R from the gradients before:

    G' = Q_L' G Q_R              M <- b1 M + (1 - b1) G'      V <- b2 V + (1 - b2) G'^2        kept in the basis
    D  = Q_L (M / (sqrt V + eps)) Q_R' sqrt(1 - b2^u) / (1 - b1^u)                             u: updates so far
    L <- b L + (1 - b) G G'      R <- b R + (1 - b) G'G
    every few updates, from its turn:  Q <- QR(L Q), columns by falling eigenvalue;  V reordered, M turned along

and for the whole tensor:  W -= lr D;  W -= lr weight_decay W.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.core._torch_compat import foreach_addcmul_, foreach_copy_, foreach_lerp_, foreach_mul_
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_betas, check_mesh, check_range
from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.base import Preconditioned, StepBlocks, TensorStep, by_step, flat_states
from block_optim.shampoo.batches import Batch, batches
from block_optim.shampoo.plan import ROWS, SIDES, TensorPlan
from block_optim.shampoo.roots import Roots, eigenbases, power_bases
from block_optim.shampoo.rule import apply_side, is_due, outer, take


class SOAP(Preconditioned):
    """SOAP, blocked. The first step makes the bases and moves nothing, as in the published code.

    Args:
        params: tensors, named tensors or groups; every option may be set for each group.
        lr: a number or a tensor of one element.
        betas: of Adam's moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, after the update.
        shampoo_beta: of the factors. None: ``betas[1]``.
        max_preconditioner_dim: the largest block.
        diagonal_above: dimensions larger than this are not rotated.
        precondition_frequency: updates from one refresh of a block's bases to the next; the blocks' turns are spread
            over the steps, and the first bases are made in the first one.
        stochastic_rounding: as in `AdamW`.
        replicate_mesh: see `BlockOptimizer`.

    `step` communicates nothing (but the agreement on non-finite gradients) where blocks are local; see `block_policy`,
    `bytes_per_step`. Tensors without matrices (1-D) take Adam's step.

    Raises:
        ValueError: an option that does not fit, or a parameter that is cut other than along its rows.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        shampoo_beta: float | None = None,
        max_preconditioner_dim: int = 1024,
        diagonal_above: int = 65536,
        precondition_frequency: int = 10,
        stochastic_rounding: bool = False,
        replicate_mesh: DeviceMesh | None = None,
    ) -> None:
        self.replicate_mesh = check_mesh("replicate_mesh", replicate_mesh)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "shampoo_beta": shampoo_beta,
            "max_preconditioner_dim": max_preconditioner_dim, "diagonal_above": diagonal_above,
            "precondition_frequency": precondition_frequency, "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults)

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_betas(group["betas"])
        if group["shampoo_beta"] is not None:
            check_range("shampoo_beta", group["shampoo_beta"], 0.0, 1.0)

    def _make_state(self, tensor: TensorPlan) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for name in ("exp_avg", "exp_avg_sq"):
            tensor.add_owned(state, name)
        if tensor.grid is not None:
            for kind in ("factor", "basis"):
                tensor.add_sides(state, kind, diagonal=False)
        return state

    @override
    def update(self, active: StepGradients) -> None:
        works = self._gather(active)
        due: list[Batch] = []
        for group, step, members in by_step(works):
            self._elementwise(group, step - 1, [w for w in members if w.tensor.grid is None])
            own = StepBlocks(members)
            for batch in batches(own.blocks):
                self._update_blocks(group, step, batch, own)
            if step > 1:
                due += batches(b for b in own.blocks if is_due(group, b.number, step - 1))
        for batch in due:
            self._turn(batch)
        self._scatter(works)
        self._apply([w for w in works if w.step > 1], _move)

    def _update_blocks(self, group: Group, step: int, batch: Batch, own: StepBlocks) -> None:
        grads, targets = batch.matrices(own.grads(batch)), own.updates(batch)
        if step > 1:
            foreach_copy_(targets, list(_direction(group, step - 1, batch, grads)[: len(targets)]))
            self._accumulate(group, batch, grads)
            return
        self._accumulate(group, batch, grads)
        self._first_bases(group, batch)
        for target in targets:
            target.zero_()

    def _elementwise(self, group: Group, updates: int, works: Sequence[TensorStep]) -> None:
        """Adam, where there is nothing to rotate."""
        if updates == 0:
            for work in works:
                work.update.zero_()
            return
        if not works:
            return
        firsts, seconds = (flat_states(works, name) for name in ("exp_avg", "exp_avg_sq"))
        grads = [w.grad for w in works]
        foreach_lerp_(firsts, grads, 1 - group["betas"][0])
        foreach_mul_(seconds, group["betas"][1])
        foreach_addcmul_(seconds, grads, grads, 1 - group["betas"][1])
        for work, first, second in zip(works, firsts, seconds, strict=True):
            work.update.copy_(_adam(group, updates, first, second))

    def _accumulate(self, group: Group, batch: Batch, grads: Tensor) -> None:
        beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
        for side in _turned(batch):
            factor = batch.side("factor", side)
            factor.mul_(beta).add_(outer(grads, side, False), alpha=1 - beta)
            batch.put_side("factor", side, factor)

    def _first_bases(self, group: Group, batch: Batch) -> None:
        for side in _turned(batch):
            result = eigenbases(batch.side("factor", side), batch.side("basis", side))
            batch.put_side("basis", side, result.roots)
            self._count_batch(batch, result)

    def _turn(self, batch: Batch) -> None:
        """Refresh bases: second moments take the new order, first moments are turned from the old basis."""
        first, second = batch.state("exp_avg"), batch.state("exp_avg_sq")
        for side in _turned(batch):
            old = batch.side("basis", side)
            result, order = power_bases(batch.side("factor", side), old)
            turn = linalg.matmul(result.roots.mT, old)
            first = apply_side(first, turn if side == ROWS else turn.mT, side)
            index = order[:, :, None] if side == ROWS else order[:, None, :]
            second = torch.gather(second, 1 if side == ROWS else 2, index.expand_as(second))
            batch.put_side("basis", side, result.roots)
            self._count_batch(batch, result)
        batch.put("exp_avg", first)
        batch.put("exp_avg_sq", second)

    def _count_batch(self, batch: Batch, result: Roots) -> None:
        counts = result.without(batch.capacity - len(batch.blocks)).counts
        self._count(counts, [batch.blocks[i] for i in result.kept])


def _move(group: Group, works: Sequence[TensorStep], weights: list[Tensor]) -> None:
    take(weights, [w.local_update for w in works], group["lr"])
    if group["weight_decay"]:
        keep = 1 - group["lr"] * group["weight_decay"]
        foreach_mul_(weights, keep.to(weights[0].device).reshape(()) if isinstance(keep, Tensor) else keep)


def _turned(batch: Batch) -> list[str]:
    """The sides that have a basis."""
    return [side for side in SIDES if not batch.blocks[0].diagonal(side)]


def _adam(group: Group, updates: int, first: Tensor, second: Tensor) -> Tensor:
    beta1, beta2 = group["betas"]
    scale = (1 - beta2**updates) ** 0.5 / (1 - beta1**updates)
    return (first / second.sqrt().add_(group["eps"])).mul_(scale)


def _direction(group: Group, updates: int, batch: Batch, grads: Tensor) -> Tensor:
    """Adam's step in the basis, turned back; advances the moments."""
    bases = {side: batch.side("basis", side) for side in _turned(batch)}
    turned = grads
    for side, basis in bases.items():
        turned = apply_side(turned, basis.mT if side == ROWS else basis, side)
    first, second = batch.state("exp_avg"), batch.state("exp_avg_sq")
    beta1, beta2 = group["betas"]
    first.lerp_(turned, 1 - beta1)
    second.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
    batch.put("exp_avg", first)
    batch.put("exp_avg_sq", second)
    result = _adam(group, updates, first, second)
    for side, basis in bases.items():
        result = apply_side(result, basis if side == ROWS else basis.mT, side)
    return result
