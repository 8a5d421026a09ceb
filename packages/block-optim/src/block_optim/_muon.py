"""Muon: momentum, orthogonalised by Newton-Schulz, for matrices that may be spread over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from block_optim._base import Active, BlockOptimizer, check_range
from block_optim._coefficients import resolve
from block_optim._exchange import buffer_sizes, lane_for
from block_optim._muon_bucket import (
    EXCHANGE_SLOTS,
    STACK_SLOTS,
    WIRE,
    Bucket,
    run_pipeline,
    side_lengths,
)
from block_optim._muon_layout import Held, held_by
from block_optim._muon_matrices import matrices_of
from block_optim._muon_momentum import DTYPES, scale_columns
from block_optim._muon_plan import DomainPlan, MuonPlan, PlannedMatrix, holders, plan_domain
from block_optim._muon_policy import muon_block_policy
from block_optim._muon_tensors import LocalParam, row_state, update_momenta
from block_optim._newton_schulz import METHODS, Method, Recipe, Scratch
from block_optim._owners import digest
from block_optim._params import Param

ADJUST = (None, "original", "match_rms_adamw", "spectral", "none")


class Muon(BlockOptimizer):
    """Muon (Jordan et al.), with the numbers of `torch.optim.Muon`, on plain, DTensor and ragged parameters.

    Momentum is the same everywhere: ``m <- mu m + (1 - mu) g``, on each rank for what it holds. A matrix is
    orthogonalised by one rank, its owner; `plan` says which. A matrix that lies whole on one rank moves nothing.

    Args:
        params: matrices (tensors, named tensors, or groups): 2-D, stacks, convolutions; see ``matrices``.
        lr: a number or a tensor of one element.
        weight_decay: decoupled, by the learning rate before ``adjust_lr_fn``.
        momentum: mu.
        nesterov: orthogonalise ``g + mu (m - g)`` instead of m.
        coefficients: keller, quintic, polar_express, cans, aol, deepseek_v4, cubic, or a list of triples.
        ns_steps: how many; None takes what the set says (5 for keller).
        eps: least Frobenius norm to divide by.
        adjust_lr_fn: None or "original": sqrt(max(1, rows/columns)); "match_rms_adamw": 0.2 sqrt(max(rows, columns));
            "spectral": sqrt(rows/columns); "none": 1. Of each matrix by its own shape.
        method: "standard" (bf16, torch's bits), "gram" (fp16, where that saves FLOPs) or "auto" (gram on GPUs).
        matrices: how a tensor is seen: "auto" (2-D one, 3-D a stack, beyond flattened), "stack", "flatten", "heads:8",
            "rows:64,16,16" or "rows:64,16,16*8" (fused and interleaved).
        batched: compute matrices of one shape in one batch; None does so on GPUs. The bits then depend, within
            2e-2 of an update, on how many an owner has; False gives torch's bits and does not depend on ranks.
        normuon: divide each row by the root of its second moment, the matrix's norm kept (arXiv 2510.05491).
        normuon_beta2: decay of the second moments.
        normuon_eps: added to their roots.
        cautious_weight_decay: decay only entries that the update shrinks anyway.
        momentum_dtype: None (the parameter's), float32, bfloat16, float16, or int8 (blocks of 256 columns).
        bucket_bytes: about what an owner receives at a time; three such buckets are in memory.
        skip_nonfinite: see `BlockOptimizer`.

    State: ``momentum_buffer``; with int8 also ``momentum_scale``, with NorMuon ``second_moment``.

    `step` communicates, for each process group over which matrices are cut: an all_reduce of one byte a parameter
    that is exchanged (does any rank have a gradient for it), and for each bucket an ``all_to_all_single`` there
    and one back, together ``2 x 2 bytes x (elements not at their owners)``; NorMuon adds 8 bytes a row in
    a second pair. Nothing where no matrix is cut. What travels is bf16, in which Newton-Schulz reads and
    writes, so it loses nothing.
    A rank without gradient for a parameter that others have one for counts as zeros.

    Raises:
        ValueError: an option or a parameter that does not fit; ranks whose plans differ.
        NotImplementedError: placements on which Muon cannot work.
    """

    _fixed = ("momentum_dtype", "normuon", "matrices")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        coefficients: str | Sequence[Sequence[float]] = "keller",
        ns_steps: int | None = None,
        eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        *,
        method: Method = "standard",
        matrices: str = "auto",
        batched: bool | None = None,
        normuon: bool = False,
        normuon_beta2: float = 0.95,
        normuon_eps: float = 1e-8,
        cautious_weight_decay: bool = False,
        momentum_dtype: torch.dtype | None = None,
        bucket_bytes: int = 32 << 20,
        skip_nonfinite: bool = True,
    ) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes!r}: expected a positive number of bytes")
        self._bucket_bytes = bucket_bytes
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "coefficients": coefficients,
            "ns_steps": ns_steps,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "method": method,
            "matrices": matrices,
            "batched": batched,
            "normuon": normuon,
            "normuon_beta2": normuon_beta2,
            "normuon_eps": normuon_eps,
            "cautious_weight_decay": cautious_weight_decay,
            "momentum_dtype": momentum_dtype,
        }
        super().__init__(params, defaults, skip_nonfinite=skip_nonfinite)
        if not self._hosted:
            self._build()

    _hosted = False  # a part of a mixed optimizer gets all of its groups before it plans
    block_policy = staticmethod(muon_block_policy)

    # ---------------------------------------------------------------- construction

    def _begin(self) -> None:
        self._engine: MuonEngine | None = None
        self._fell_back = 0
        super()._begin()

    def _forget(self) -> None:
        if self._engine is not None:
            self._fell_back += self._engine.fell_back
        self._engine = None
        super()._forget()

    def _check_group(self, group: dict[str, Any], params: list[Param]) -> None:
        check_muon_group(group, params)

    def _init_state(self, group: dict[str, Any], params: list[Param]) -> None:
        for param in params:
            self.state[param.param] = muon_state(group, param)

    def _build(self) -> "MuonEngine":
        if self._engine is None:
            params = list(self._params.values())
            self._engine = MuonEngine(params, self.param_groups, self.state, self._bucket_bytes)
        return self._engine

    # ---------------------------------------------------------------- what there is to see

    @property
    def plan(self) -> MuonPlan:
        """Who computes which matrix; `print` it."""
        return self._build().plan

    @property
    def fallbacks(self) -> int:
        """Matrices that this rank has orthogonalised by a safer method, since construction."""
        return self._fell_back + (0 if self._engine is None else self._engine.fell_back)

    def _update(self, active: Active, found_inf: torch.Tensor | None) -> None:
        self._build().step(active.params, active.grads)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bucket_bytes": self._bucket_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._bucket_bytes = state["_bucket_bytes"]
        super().__setstate__(state)


def check_muon_group(group: dict[str, Any], params: list[Param]) -> None:
    """Raise ValueError, naming it, unless each option of a group means something for its parameters."""
    check_range("weight_decay", group["weight_decay"], 0)
    check_range("momentum", group["momentum"], 0, 1)
    check_range("eps", group["eps"], 0)
    check_range("normuon_beta2", group["normuon_beta2"], 0, 1)
    check_range("normuon_eps", group["normuon_eps"], 0)
    resolve(group["coefficients"], group["ns_steps"])
    for option, allowed in (("adjust_lr_fn", ADJUST), ("method", METHODS), ("momentum_dtype", DTYPES)):
        if group[option] not in allowed:
            raise ValueError(f"{option}={group[option]!r}: expected one of {', '.join(map(repr, allowed))}")
    for param in params:
        held, matrices = held_by(param), matrices_of(param.name, tuple(param.shape), group["matrices"])
        if not param.local.is_contiguous():
            raise ValueError(
                f"{param.name}: its memory (stride {param.local.stride()}) is not row-major; make it "
                "contiguous before the optimizer is built"
            )
        low, high = held.cuts[0], held.cuts[-1]
        if any(
            not (m.span[1] <= low or m.span[0] >= high or (low <= m.span[0] and m.span[1] <= high))
            for m in matrices
        ):
            raise NotImplementedError(
                f"{param.name}: placements {param.placements} of shape {tuple(param.shape)} cut through a matrix "
                "along an axis that is not exchanged along; only whole stacked matrices can lie apart on it"
            )


def muon_state(group: dict[str, Any], param: Param) -> dict[str, torch.Tensor]:
    """A parameter's states, zero."""
    matrices, held = matrices_of(param.name, tuple(param.shape), group["matrices"]), held_by(param)
    dtype = group["momentum_dtype"] or param.dtype
    state = {"momentum_buffer": param.wrap(torch.zeros_like(param.local, dtype=dtype))}
    if dtype == torch.int8:
        columns = matrices[0].columns if matrices else 1
        state["momentum_scale"] = row_state(param, matrices, scale_columns(columns), held)
    if group["normuon"]:
        state["second_moment"] = row_state(param, matrices, 1, held)
    return state


class MuonEngine:
    """Plan, memory and step for a list of parameters: what `Muon` runs, and a mixed optimizer for its part.

    Building it communicates: one all_reduce of 16 bytes for each process group, by which ranks see that they
    plan alike.
    """

    def __init__(
        self, params: list[Param], groups: list[dict[str, Any]], states: Any, bucket_bytes: int
    ) -> None:
        of_group = {id(p): (i, group) for i, group in enumerate(groups) for p in group["params"]}
        self._scratch: dict[torch.device, Scratch] = {}
        self._local: dict[int, LocalParam] = {}
        self._index = {id(param.param): i for i, param in enumerate(params)}
        self._groups = groups
        self._group_of: list[dict[str, Any]] = [of_group[id(param.param)][1] for param in params]
        domains: dict[Any, list[PlannedMatrix]] = {}
        helds: dict[Any, Held] = {}
        for i, param in enumerate(params):
            g, group = of_group[id(param.param)]
            matrices, held = matrices_of(param.name, tuple(param.shape), group["matrices"]), held_by(param)
            self._local[i] = LocalParam(i, param, matrices, held, states[param.param])
            device = param.device
            key = (device, None if held.group is None else held.group.group_name)
            helds.setdefault(key, held)
            recipe = recipe_of(group)
            planned = domains.setdefault(key, [])
            for k, m in enumerate(matrices):
                if held.cuts[0] <= m.span[0] and m.span[1] <= held.cuts[-1]:
                    name = param.name if len(matrices) == 1 else f"{param.name}[{k}]"
                    flops = recipe.flops(m.rows, m.columns, device)
                    planned.append(PlannedMatrix(name, i, g, m, holders(m, held), flops))
        self._buckets: list[Bucket] = []
        self._exchanged: list[tuple[dist.ProcessGroup, torch.Tensor, list[int]]] = []
        plans = []
        for key, planned in domains.items():
            plans.append(self._add_domain(key[0], helds[key], planned, bucket_bytes))
        self.plan = MuonPlan(tuple(plans))

    def _add_domain(
        self, device: torch.device, held: Held, planned: list[PlannedMatrix], bucket_bytes: int
    ) -> DomainPlan:
        plan = plan_domain(planned, held.num_ranks, bucket_bytes)
        if held.group is not None:
            _check_alike(digest(plan.fingerprint, _options(self._groups)), held.group, device)
        scratch = self._scratch.setdefault(device, Scratch(device))
        by_bucket: list[list[PlannedMatrix]] = [[] for _ in range(plan.num_buckets)]
        for m in plan.matrices:
            by_bucket[m.bucket].append(m)
        first = len(self._buckets)
        _reserve(scratch, held.rank, by_bucket, first, self._groups)
        lane = lane_for(device)
        for number, matrices in enumerate(by_bucket, first):
            group = self._groups[matrices[0].group]
            place = (held.group, held.rank, number)
            self._buckets.append(Bucket(matrices, self._local, group, recipe_of(group), place, scratch, lane))
        exchanged = sorted({m.param for m in plan.matrices if m.moved})
        if held.group is not None and exchanged:
            seen = torch.zeros(len(exchanged), dtype=torch.uint8, device=device)
            self._exchanged.append((held.group, seen, exchanged))
        return plan

    @property
    def fell_back(self) -> int:
        """Matrices orthogonalised by a safer method."""
        return sum(bucket.fell_back for bucket in self._buckets)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of buffers and scratch held on this rank."""
        return sum(scratch.nbytes for scratch in self._scratch.values())

    def step(self, params: list[Param], grads: list[torch.Tensor]) -> None:
        """One update of the parameters that have gradients on some rank."""
        here = {self._index[id(p.param)]: grad for p, grad in zip(params, grads, strict=True)}
        active = self._agree(here)
        by_group: dict[int, list[LocalParam]] = {}
        for i in sorted(active):
            local = self._local[i]
            local.refresh()
            grad = here.get(i)
            if grad is None:  # another rank has one; this rank's part of it is zero
                grad = torch.zeros_like(local.local)
            local.grad = grad.reshape(-1)
            by_group.setdefault(id(self._group_of[i]), []).append(local)
        for some in by_group.values():
            group = self._group_of[some[0].index]
            update_momenta(some, group["momentum"], self._scratch[some[0].local.device])
        rates = {id(group): _on_host(group["lr"]) for group in self._groups}
        for bucket in self._buckets:
            bucket.lr = rates[id(bucket.group)]
        run_pipeline(self._buckets, active)
        for i in active:  # gradients are not ours to keep
            self._local[i].grad = self._local[i].local

    def _agree(self, here: dict[int, torch.Tensor]) -> frozenset[int]:
        """The parameters to update: those with a gradient here, and of those exchanged the ones with any anywhere."""
        works = []
        for group, seen, exchanged in self._exchanged:
            if len(here) == len(self._local):
                seen.fill_(1)
            else:
                seen.copy_(torch.tensor([i in here for i in exchanged], dtype=torch.uint8))
            works.append(dist.all_reduce(seen, dist.ReduceOp.MAX, group=group, async_op=True))
        active = set(here)
        for work, (_, seen, exchanged) in zip(works, self._exchanged, strict=True):
            work.wait()
            active.update(i for i, some in zip(exchanged, seen.tolist(), strict=True) if some)
        return frozenset(active)


def recipe_of(group: dict[str, Any]) -> Recipe:
    """What a param group wants done to its matrices."""
    return Recipe(
        resolve(group["coefficients"], group["ns_steps"]), group["eps"], group["method"], group["batched"]
    )


def _reserve(
    scratch: Scratch, rank: int, buckets: list[list[PlannedMatrix]], first: int, groups: list[dict[str, Any]]
) -> None:
    """Take each buffer at its largest, so that later buckets do not make it anew."""
    largest: dict[tuple[str, torch.dtype], int] = {}

    def want(name: str, dtype: torch.dtype, numel: int) -> None:
        largest[name, dtype] = max(largest.get((name, dtype), 0), numel)

    for number, matrices in enumerate(buckets, first):
        owners, slot = [m.owner for m in matrices], number % EXCHANGE_SLOTS
        own = sum(m.matrix.numel for m in matrices if m.owner == rank)
        want(f"stacks {number % STACK_SLOTS}", WIRE, own)
        want(f"row scale {number % STACK_SLOTS}", torch.float32, len(matrices))
        kinds: list[tuple[str, torch.dtype, Any]] = [("", WIRE, [m.held for m in matrices])]
        if groups[matrices[0].group]["normuon"]:
            kinds.append(("side ", torch.float32, side_lengths(matrices)))
        for kind, dtype, lengths in kinds:
            held, owned = buffer_sizes(rank, owners, lengths)
            want(f"held {kind}{slot}", dtype, held)
            want(f"owned {kind}{slot}", dtype, owned)
    for (name, dtype), numel in largest.items():
        scratch.take(name, (numel,), dtype)


def _on_host(lr: float | torch.Tensor) -> float | torch.Tensor:
    """A tensor on the CPU, so that it is waited for once; arithmetic stays in its dtype, as torch's does."""
    return lr.detach().cpu() if isinstance(lr, torch.Tensor) else lr


def _options(groups: list[dict[str, Any]]) -> list[str]:
    """What groups say, but for what may be a tensor or is the parameters themselves."""
    left_out = ("params", "param_names", "lr", "initial_lr")
    return [repr(sorted((k, str(v)) for k, v in group.items() if k not in left_out)) for group in groups]


def _check_alike(mark: int, group: dist.ProcessGroup, device: torch.device) -> None:
    both = torch.tensor([mark, -mark], dtype=torch.int64, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    highest, lowest = both.tolist()
    if highest != -lowest:
        raise ValueError(
            "the ranks of a process group plan Muon differently: their parameters, groups or options differ; build the "
            "optimizer from the same parameters in the same order with the same options on every rank"
        )
