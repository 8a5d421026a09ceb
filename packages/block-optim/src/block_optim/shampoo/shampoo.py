"""Shampoo and KL-Shampoo on whole blocks (arXiv 1802.09568, 2309.06497, 2509.03378).

For each block G (m x n) of each matrix, at its step t:

    L <- b2 L + (1 - b2) G G'        R <- b2 R + (1 - b2) G'G          (b2 = 1: sums, AdaGrad)
    KL:  G S_R^-1 G' / n             G' S_L^-1 G / m                    whitened by the other's inverse
    every few steps, from its turn:  the roots (L / (1 - b2^t))^-e and (R / (1 - b2^t))^-e
    M <- b1 M + (1 - b1) G
    D = root_L M root_R / (1 - b1^t), scaled to the norm that the grafting method's step has on this block

and for the whole tensor:  D += weight_decay W;  momentum;  W -= lr D.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.core._torch_compat import (
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_lerp_,
    foreach_mul_,
)
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_choice, check_count, check_flag, check_mesh, check_range
from block_optim.core.params import Group
from block_optim.core.skip import portions, unless
from block_optim.shampoo.base import Preconditioned, StepBlocks, TensorStep, by_step, state_dtype
from block_optim.shampoo.batches import Batch, batches, store_square
from block_optim.shampoo.plan import COLS, ROWS, SIDES, TensorPlan
from block_optim.shampoo.root_jobs import RootJob, root_jobs
from block_optim.shampoo.roots import Roots
from block_optim.shampoo.rule import (
    GRAFTING,
    beta1,
    beta2,
    direction,
    elementwise_direction,
    outer,
    root_options,
    second_beta,
    side_states,
    take,
    whitened,
)


class Shampoo(Preconditioned):
    """Shampoo, blocked; with ``kl=True`` KL-Shampoo.

    Args:
        params: tensors, named tensors or groups; every option may be set for each group.
        lr: a number or a tensor of one element.
        betas: of the filtered gradient, and of the factors; 1.0 for the second sums them up (AdaGrad).
        eps: added to the root of the second moment in the grafting method and in elementwise tensors.
        weight_decay: decoupled: added to the update, times the weight, before momentum.
        momentum, dampening, nesterov: of the update, as in torch's SGD.
        max_preconditioner_dim: the largest block.
        diagonal_above: dimensions larger than this have diagonal factors.
        matrices: "auto", "stack" or "flatten": how tensors of three dimensions and more are seen (docs/shampoo.md).
        precondition_frequency: steps from one computation of a block's roots to the next.
        start_preconditioning_step: until then the update is the grafting method's; without one there is none, and
            statistics are gathered. None: `precondition_frequency`.
        stagger: spread the blocks' turns over the steps.
        grafting: "none", "rmsprop" or "adam". None: "adam", and "none" with ``kl``.
        grafting_beta2: of the grafting method's second moment. None: ``betas[1]``, or 0.999 where that is 1.
        exponent: of both roots. None: 1/4, with ``kl`` 1/2 (which cannot be changed).
        kl: let each factor accumulate the gradient whitened by the other's inverse.
        root_method: "eigh" or "newton" (products only; the exponent must be one over an integer).
        root_epsilon: the ridge, relative to a factor's norm. None: 1e-5; 1e-3 with ``kl``, whose roots are square.
        factor_dtype: "float32", "bfloat16" or "float64", of factors and roots as they are kept.
        packed: keep the lower triangles of factors and roots only.
        stochastic_rounding, seed: as in `AdamW`.
        replicate_mesh, skip_nonfinite: see `BlockOptimizer`.

    `step` communicates nothing (but the agreement on non-finite gradients) where blocks are local; see `block_policy`,
    `bytes_per_step`. Tensors without matrices (1-D) take the grafting method's own step, or without one the diagonal
    preconditioner's, element by element.

    Raises:
        ValueError: an option that does not fit, or a parameter that is cut other than along its rows.
    """

    format_options = (*Preconditioned.format_options, "grafting", "kl")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        max_preconditioner_dim: int = 1024,
        diagonal_above: int = 65536,
        matrices: str = "auto",
        precondition_frequency: int = 10,
        start_preconditioning_step: int | None = None,
        stagger: bool = True,
        grafting: str | None = None,
        grafting_beta2: float | None = None,
        exponent: float | None = None,
        kl: bool = False,
        root_method: str = "eigh",
        root_epsilon: float | None = None,
        factor_dtype: torch.dtype | str = "float32",
        packed: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        replicate_mesh: DeviceMesh | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        self.replicate_mesh = check_mesh("replicate_mesh", replicate_mesh)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "dampening": dampening, "nesterov": nesterov, "max_preconditioner_dim": max_preconditioner_dim,
            "diagonal_above": diagonal_above, "matrices": matrices,
            "precondition_frequency": precondition_frequency,
            "start_preconditioning_step": start_preconditioning_step, "stagger": stagger,
            "grafting": grafting, "grafting_beta2": grafting_beta2, "exponent": exponent, "kl": kl,
            "root_method": root_method, "root_epsilon": root_epsilon, "factor_dtype": factor_dtype, "packed": packed,
            "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, skip_nonfinite=skip_nonfinite)

    # ---------------------------------------------------------------- options and states

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        if group["grafting"] is None:
            group["grafting"] = "none" if group["kl"] else "adam"
        check_choice("grafting", group["grafting"], GRAFTING)
        if group["grafting_beta2"] is not None:
            check_range("grafting_beta2", group["grafting_beta2"], 0.0, 1.0)
            if group["grafting"] == "none":
                raise ValueError("grafting_beta2 has no meaning for grafting='none'; leave it None")
        check_flag("kl", group["kl"])
        check_flag("nesterov", group["nesterov"])
        check_range("momentum", group["momentum"], 0.0, 1.0)
        check_range("dampening", group["dampening"], 0.0, 1.0)
        if (group["nesterov"] or group["dampening"]) and not group["momentum"]:
            raise ValueError(
                "nesterov and dampening change momentum, which is 0: set momentum, or leave them out"
            )
        start = group["start_preconditioning_step"]
        if start is not None:
            check_count("start_preconditioning_step", start)
        if group["exponent"] is not None:
            check_range("exponent", group["exponent"], 1e-3)
            if group["kl"]:
                raise ValueError("exponent: KL-Shampoo whitens by inverse square roots; leave it None")
        root_options(group)

    @override
    def format_of(self, group: Group) -> dict[str, Any]:
        """Return the base's options, and whether there are averages at all."""
        beta1, momentum = group.get("betas", (0,))[0], group.get("momentum", 0)
        averages = {"betas[0] > 0": beta1 > 0, "momentum > 0": momentum > 0}
        return {**super().format_of(group), **averages}

    def _make_state(self, tensor: TensorPlan) -> dict[str, Tensor]:
        group, compute = tensor.group, tensor.compute
        state = {"step": torch.zeros((), dtype=torch.float32)}
        if group["betas"][0] > 0:
            tensor.add_owned(state, "exp_avg", compute)
        if tensor.grid is None or group["grafting"] != "none":
            tensor.add_owned(state, "exp_avg_sq", compute)
        if group["momentum"] > 0:
            state["momentum_buffer"] = tensor.param.zeros(compute)
        if tensor.grid is not None:
            packed = group["packed"]
            sizes = side_states(tensor, "factor", packed) | side_states(tensor, "root", packed)
            tensor.add_blocks(state, sizes, state_dtype(tensor))
        return state

    def _fresh(self, tensor: TensorPlan) -> None:
        for block in tensor.blocks:
            for side in SIDES:  # the root that is used until there is one, and kept if the first one fails
                dim, view = block.dim(side), block.views[f"root_{side}"]
                if block.diagonal(side):
                    view.fill_(1)
                else:
                    eye = torch.eye(dim, dtype=view.dtype, device=view.device)[None]
                    store_square([view], eye, tensor.group["packed"])

    # ---------------------------------------------------------------- the step

    @override
    def update(self, active: StepGradients) -> None:
        skip = active.found_inf
        works = self._gather(active)
        for group, step, members in by_step(works):
            self._accumulate(group, step, members, skip)
        for job in root_jobs(works):  # of the whole model together
            with unless(skip, job.views("root")):
                self._put_roots(job, job.run(job.load()))
        for group, step, members in by_step(works):
            self._precondition(group, step, members)
        self._scatter(works)
        self._apply(works, skip, _move, lambda works: _flat(works, "momentum_buffer"))

    def _accumulate(self, group: Group, step: int, works: Sequence[TensorStep], skip: Tensor | None) -> None:
        """Advance the averages of whole runs, and the factors of blocks."""
        for portion in portions(skip, works, lambda w: 2 * w.grad.nbytes):
            with unless(skip, _flat(portion, "exp_avg", "exp_avg_sq")):
                self._moments(group, portion)
        own = StepBlocks(works)
        for batch in batches(own.blocks):
            with unless(skip, batch.views("factor_rows", "factor_cols")):
                self._factors(group, step, batch, batch.matrices(own.grads(batch)))

    def _precondition(self, group: Group, step: int, works: Sequence[TensorStep]) -> None:
        """Write the updates of works with these options and this step number."""
        for work in works:
            if work.tensor.grid is None:
                first, second = work.tensor.flat("exp_avg"), work.tensor.flat("exp_avg_sq")
                assert second is not None
                filtered = work.grad if first is None else first
                work.update.copy_(elementwise_direction(group, step, filtered, second))
        own = StepBlocks(works)
        for batch in batches(own.blocks):
            has_average = "exp_avg" in batch.blocks[0].views
            filtered = batch.state("exp_avg") if has_average else batch.matrices(own.grads(batch))
            targets = own.updates(batch)
            foreach_copy_(targets, list(direction(group, step, batch, filtered)[: len(targets)]))

    def _moments(self, group: Group, works: Sequence[TensorStep]) -> None:
        """Filtered gradients and the second moments of the grafting method, on whole runs."""
        if firsts := _flat(works, "exp_avg"):
            foreach_lerp_(firsts, [w.grad for w in works], 1 - beta1(group))
        some = [w for w in works if w.tensor.grid is None or group["grafting"] != "none"]
        if moments := _flat(some, "exp_avg_sq"):
            grads, beta = [w.grad for w in some], second_beta(group)
            if beta < 1:
                foreach_mul_(moments, beta)
            foreach_addcmul_(moments, grads, grads, 1 - beta if beta < 1 else 1.0)

    def _factors(self, group: Group, step: int, batch: Batch, grads: Tensor) -> None:
        """Advance both factors of a batch of blocks."""
        sources = whitened(group, step, batch, grads) if group["kl"] else {ROWS: grads, COLS: grads}
        for side in SIDES:
            gained = outer(sources[side], side, batch.diagonal(side))
            if group["kl"]:
                gained = gained / batch.dim(COLS if side == ROWS else ROWS)
                gained = torch.where(
                    gained.isfinite().flatten(1).all(1).view(-1, *[1] * (gained.dim() - 1)), gained, 0.0
                )
            factor = batch.side("factor", side, group["packed"])
            if (beta := beta2(group)) < 1:
                factor.mul_(beta).add_(gained, alpha=1 - beta)
            else:
                factor.add_(gained)
            batch.put_side("factor", side, factor, group["packed"])

    def _put_roots(self, job: RootJob, result: Roots) -> None:
        store_square(job.views("root"), result.roots, job.group["packed"])
        self._count(result.counts, [job.items[i][0] for i in result.kept])


def _flat(works: Sequence[TensorStep], *names: str) -> list[Tensor]:
    """This rank's elements of states, for the tensors that have them."""
    return [state for w in works for name in names if (state := w.tensor.flat(name)) is not None]


def _move(group: Group, works: Sequence[TensorStep], weights: list[Tensor]) -> None:
    updates = [w.local_update for w in works]
    if group["weight_decay"]:
        foreach_add_(updates, weights, alpha=group["weight_decay"])
    if buffers := _flat(works, "momentum_buffer"):
        keep, mu = 1 - group["dampening"], group["momentum"]
        foreach_mul_(buffers, mu)
        foreach_add_(buffers, updates, alpha=keep)
        if group["nesterov"]:
            if keep != 1:
                foreach_mul_(updates, keep)
            foreach_add_(updates, buffers, alpha=mu)
        else:
            updates = buffers
    take(weights, updates, group["lr"])
