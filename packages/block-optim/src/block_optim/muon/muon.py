"""Muon: momentum, orthogonalised by Newton-Schulz, for matrices that may be spread over ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.core.base import BlockOptimizer
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_choice, check_flag, check_mesh, check_range
from block_optim.core.params import Group, Param
from block_optim.core.scratch import Scratch
from block_optim.muon.assignment import Assignment
from block_optim.muon.engine import MuonEngine
from block_optim.muon.local import muon_state
from block_optim.muon.matrices import How, block_of_matrices, check_how, matrices_in
from block_optim.muon.newton_schulz import Coefficients, orthogonalize_, steps_of
from layout_planner import Block

ADJUST = (None, "original", "match_rms_adamw", "spectral_unclamped", "none")


class Muon(BlockOptimizer):
    """Muon (Jordan et al.), with the numbers of `torch.optim.Muon`, on plain, DTensor and ragged parameters.

    Momentum is ``m <- mu m + (1 - mu) g``, on each rank for its elements. A matrix is orthogonalised by one rank, its
    owner (see `assignment`). A matrix that is whole on one rank is not exchanged.

    Args:
        params: matrices (tensors, named tensors, or groups): 2-D, stacks, convolutions; see ``matrices``.
        lr: a number or a tensor of one element.
        weight_decay: decoupled, by the learning rate before ``adjust_lr_fn``.
        momentum: mu.
        nesterov: orthogonalise ``g + mu (m - g)`` instead of m.
        ns_coefficients: keller (torch's), quintic, polar_express, deepseek_v4, one triple for
            every step, or a list of triples.
        eps: lower bound of the Frobenius norm to divide by.
        ns_steps: number of steps, of keller or one triple (5).
        adjust_lr_fn: None or "original": sqrt(max(1, rows/columns)); "match_rms_adamw": 0.2 sqrt(max(rows, columns));
            "spectral_unclamped": sqrt(rows/columns); "none": 1. Of each matrix by its own shape.
        matrices: how a tensor is seen: "auto" (2-D one, 3-D a stack, beyond flattened), "flatten", or the rows of each
            matrix, such as (64, 16, 16) of a fused projection.
        normuon: divide each row by the root of its second moment, the matrix's norm kept (arXiv 2510.05491).
        cautious_weight_decay: decay only entries that the update shrinks anyway.
        stochastic_rounding: as in `AdamW`; momentum is at least fp32 then, else in the parameter's dtype.
        replicate_mesh: see `BlockOptimizer`.

    Attributes:
        bucket_bytes: size of the buckets that an owner receives; three are in memory. Set it in a subclass.

    To orthogonalise in another way, override `orthogonalize_` in a subclass.

    State: ``momentum_buffer``; with NorMuon ``second_moment``, with stochastic_rounding ``step``.

    `step` communicates, for each process group over which matrices are cut: an all_reduce of one byte a parameter
    that is exchanged (does any rank have a gradient for it), and for each bucket an ``all_to_all_single`` there
    and one back, together ``2 x 2 bytes x (elements not at their owners)``; NorMuon adds 8 bytes a row in
    a second pair. Where every rank holds all (replicate_mesh, Replicate placements), one all_gather a bucket instead,
    of ``2 bytes x elements`` to each rank. Nothing if no matrix is cut or divided. Elements are exchanged as bf16,
    the dtype of Newton-Schulz's input and output, so nothing is lost.
    A rank without gradient for a parameter that others have one for counts as zeros.

    Raises:
        ValueError: an option, a parameter or placements that do not fit; ranks whose assignments differ.
    """

    format_options = ("normuon", "matrices", "stochastic_rounding")
    shared_options = ("replicate_mesh",)
    divides_copies = True
    bucket_bytes = 32 << 20

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = "keller",
        eps: float = 1e-7,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = None,
        *,
        matrices: How = "auto",
        normuon: bool = False,
        cautious_weight_decay: bool = False,
        stochastic_rounding: bool = False,
        replicate_mesh: DeviceMesh | None = None,
    ) -> None:
        self.replicate_mesh = check_mesh("replicate_mesh", replicate_mesh)
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "matrices": matrices, "normuon": normuon, "cautious_weight_decay": cautious_weight_decay,
            "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults)

    @classmethod
    @override
    def block_of(cls, name: str, param: torch.Tensor, options: Mapping[str, Any]) -> Block | None:
        return block_of_matrices(name, tuple(param.shape), options["matrices"])

    @override
    def setup(self) -> None:
        self._engine: MuonEngine | None = None
        self._bound = False

    @override
    def prepare(self) -> None:
        """Assign matrices to owners. Communicates 16 bytes for each process group."""
        self._build()

    def _build(self) -> MuonEngine:
        engine = self._engine
        if engine is None or not engine.fits(self.trained):
            engine = self._engine = MuonEngine(self.trained, self.bucket_bytes, self.orthogonalize_)
        elif not self._bound:
            engine.bind()
        self._bound = True
        return engine

    @override
    def invalidate(self) -> None:
        self._bound = False

    @override
    def check_options(self, group: Group) -> None:
        check_range("weight_decay", group["weight_decay"], 0)
        check_range("momentum", group["momentum"], 0, 1)
        check_range("eps", group["eps"], 0)
        steps_of(group["ns_coefficients"], group["ns_steps"])
        group["matrices"] = check_how(group["matrices"])
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], ADJUST)
        if "dampening" in group:
            raise ValueError(
                f"dampening={group['dampening']!r}: SGD's option, and its momentum_buffer is a sum, 1 / (1 - momentum) "
                "times Muon's average; begin with new states, or load its buffers times 1 - momentum with the "
                "param_groups of this optimizer's own state_dict()"
            )
        for name in ("nesterov", "normuon", "cautious_weight_decay"):
            check_flag(name, group[name])

    @override
    def check_group(self, group: Group, params: list[Param]) -> None:
        for param in params:
            matrices_in(param)
            _ = param.holding
            param.check_row_major()

    @override
    def init_states(self, group: Group, params: list[Param]) -> None:
        for param in params:
            self.state[param.tensor] = muon_state(param)

    @property
    def assignment(self) -> Assignment:
        """The owner and bucket of each matrix."""
        return self._build().assignment

    @override
    def update(self, active: StepGradients) -> None:
        self._build().step(active)

    def orthogonalize_(self, matrix: torch.Tensor, group: Group, scratch: Scratch) -> None:
        """Replace a bf16 matrix (rows, columns) by its polar factor, by the options of its group."""
        orthogonalize_(matrix, steps_of(group["ns_coefficients"], group["ns_steps"]), group["eps"], scratch)
