"""Muon: momentum, orthogonalised by Newton-Schulz, for matrices that may be spread over ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.core.base import BlockOptimizer
from block_optim.core.gradients import StepGradients
from block_optim.core.options import (
    check_choice,
    check_count,
    check_flag,
    check_mesh,
    check_range,
    name_dtype,
)
from block_optim.core.params import Group, Param
from block_optim.muon.assignment import Assignment
from block_optim.muon.coefficients import Coefficients, resolve
from block_optim.muon.engine import MuonEngine
from block_optim.muon.local import muon_state
from block_optim.muon.matrices import block_of_matrices, matrices_in
from block_optim.muon.newton_schulz import METHODS, Method
from layout_planner import Block

ADJUST = (None, "original", "match_rms_adamw", "spectral_unclamped", "none")

_MOMENTUM_DTYPES = (None, "float32", "bfloat16", "float16")


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
        ns_steps: number of steps. Defaults to that of the coefficient set (5 for keller).
        adjust_lr_fn: None or "original": sqrt(max(1, rows/columns)); "match_rms_adamw": 0.2 sqrt(max(rows, columns));
            "spectral_unclamped": sqrt(rows/columns); "none": 1. Of each matrix by its own shape.
        method: "standard" (bf16, torch's bits), "gram" (fp16, where that saves FLOPs) or "auto" (gram on GPUs).
        matrices: how a tensor is seen: "auto" (2-D one, 3-D a stack, beyond flattened), "stack", "flatten", "heads:8",
            "rows:64,16,16" or "rows:64,16,16*8" (fused and interleaved).
        batched: compute matrices of one shape in one batch; None does so on GPUs. The bits then depend, within
            2e-2 of an update, on how many an owner has; False gives torch's bits and does not depend on ranks.
        normuon: divide each row by the root of its second moment, the matrix's norm kept (arXiv 2510.05491).
        normuon_beta2: decay of the second moments.
        normuon_eps: added to their roots.
        cautious_weight_decay: decay only entries that the update shrinks anyway.
        momentum_dtype: None (the parameter's), float32, bfloat16 or float16; text in the groups.
        stochastic_rounding, seed: as in `AdamW`.
        bucket_bytes: about what an owner receives at a time; three such buckets are in memory.
        replicate_mesh: see `BlockOptimizer`.
        skip_nonfinite: see `BlockOptimizer`.

    State: ``momentum_buffer``; with NorMuon ``second_moment``, with
    stochastic_rounding ``step``.

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

    format_options = ("momentum_dtype", "normuon", "matrices", "stochastic_rounding")
    shared_options = ("bucket_bytes", "replicate_mesh")
    divides_copies = True

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
        method: Method = "standard",
        matrices: str = "auto",
        batched: bool | None = None,
        normuon: bool = False,
        normuon_beta2: float = 0.95,
        normuon_eps: float = 1e-8,
        cautious_weight_decay: bool = False,
        momentum_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        bucket_bytes: int = 32 << 20,
        replicate_mesh: DeviceMesh | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        check_count("bucket_bytes", bucket_bytes)
        self.replicate_mesh = check_mesh("replicate_mesh", replicate_mesh)
        self.bucket_bytes = bucket_bytes
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "method": method, "matrices": matrices, "batched": batched, "normuon": normuon,
            "normuon_beta2": normuon_beta2, "normuon_eps": normuon_eps,
            "cautious_weight_decay": cautious_weight_decay, "momentum_dtype": momentum_dtype,
            "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, skip_nonfinite=skip_nonfinite)

    @classmethod
    @override
    def block_of(cls, name: str, param: torch.Tensor, options: Mapping[str, Any]) -> Block | None:
        return block_of_matrices(name, tuple(param.shape), options["matrices"])

    # ---------------------------------------------------------------- construction

    @override
    def setup(self) -> None:
        self._engine: MuonEngine | None = None
        self._fell_back = 0
        self._bound = False

    @override
    def prepare(self) -> None:
        """Assign matrices to owners. Communicates 16 bytes for each process group."""
        self._build()

    def _build(self) -> MuonEngine:
        engine = self._engine
        if engine is None or not engine.fits(self.trained):
            self._fell_back = self.fallbacks
            engine = self._engine = MuonEngine(self.trained, self.bucket_bytes)
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
        check_range("normuon_beta2", group["normuon_beta2"], 0, 1)
        check_range("normuon_eps", group["normuon_eps"], 0)
        resolve(group["ns_coefficients"], group["ns_steps"])
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], ADJUST)
        check_choice("method", group["method"], METHODS)
        if "dampening" in group:
            raise ValueError(
                f"dampening={group['dampening']!r}: SGD's option, and its momentum_buffer is a sum, 1 / (1 - momentum) "
                "times Muon's average; begin with new states, or load its buffers times 1 - momentum with the "
                "param_groups of this optimizer's own state_dict()"
            )
        name_dtype("momentum_dtype", group)
        check_choice("momentum_dtype", group["momentum_dtype"], _MOMENTUM_DTYPES)
        for name in ("nesterov", "normuon", "cautious_weight_decay"):
            check_flag(name, group[name])
        if group["batched"] is not None:
            check_flag("batched", group["batched"])

    @override
    def check_group(self, group: Group, params: list[Param]) -> None:
        for param in params:
            check_matrices(param)

    @override
    def init_states(self, group: Group, params: list[Param]) -> None:
        for param in params:
            self.state[param.tensor] = muon_state(param)

    # ---------------------------------------------------------------- inspection

    @property
    def assignment(self) -> Assignment:
        """The owner of each matrix; ``print`` it."""
        return self._build().assignment

    @property
    def fallbacks(self) -> int:
        """Number of matrices that this rank has orthogonalised by a safer method, since construction."""
        return self._fell_back + (0 if self._engine is None else self._engine.fell_back)

    @property
    @override
    def supports_found_inf(self) -> bool:
        return True

    @override
    def update(self, active: StepGradients) -> None:
        self._build().step(active)


def check_matrices(param: Param) -> None:
    """Raise ValueError unless a parameter is matrices, with placements and memory that Muon supports."""
    matrices_in(param)
    _ = param.holding
    param.check_row_major()
