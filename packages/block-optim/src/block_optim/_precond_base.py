"""What Shampoo and SOAP share: planning, gradients to owners, updates back, and work beside the step.

step:   results of the last refresh in (if it ran beside)
        gradients -> owned runs       moving strips only: one all_reduce of flags, one all_to_all_single
        _directions                   the rule itself, on owned runs and blocks; no communication
        owned runs -> local updates   moving strips only: one all_to_all_single
        _apply                        weight decay, momentum, learning rate, on local parts
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from block_optim._base import Active, BlockOptimizer, check_range
from block_optim._params import Param
from block_optim._precond_plan import Block, Plan, TensorPlan
from block_optim._precond_worker import Worker
from block_optim._roots import RootCounts
from block_optim._shampoo_blocks import MATRICES, block_of
from block_optim._shampoo_exchange import StripExchange
from block_optim._torch_compat import local_of
from layout_planner import Elements, Tile

_LOG = logging.getLogger("block_optim")

LARGEST = 1e15  # gradients beyond are cut to it: their squares, summed over a block, stay in fp32
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_STATE_OPTIONS = ("max_preconditioner_dim", "diagonal_above", "matrices", "factor_dtype", "packed")


@dataclass
class Work:
    """One tensor in one step: its step number, and flat runs in the compute dtype.

    `grad` and `update` are of the owned elements, `local_update` of the local ones: one memory where nothing moves.
    """

    tensor: TensorPlan
    step: int
    grad: Tensor
    update: Tensor
    local_update: Tensor

    @property
    def group(self) -> dict[str, Any]:
        """The tensor's options."""
        return self.tensor.group


class Preconditioned(BlockOptimizer):
    """Base of Shampoo and SOAP; not for direct use. A subclass defines `_make_state`, `_directions` and `_apply`."""

    _fixed: tuple[str, ...] = _STATE_OPTIONS

    def _begin(self) -> None:
        super()._begin()
        self._plan = Plan()
        self._exchanges: list[StripExchange] | None = None
        self._worker: Worker | None = None
        self._commit: Callable[[Any], None] | None = None
        self._told = 0
        self.root_counts = RootCounts()
        self.clamped_gradients = 0

    # ---------------------------------------------------------------- options and states

    def _check_group(self, group: dict[str, Any], params: list[Param]) -> None:
        if isinstance(group["factor_dtype"], torch.dtype):
            group["factor_dtype"] = str(group["factor_dtype"]).removeprefix("torch.")
        if group["factor_dtype"] not in _DTYPES:
            raise ValueError(f"factor_dtype={group['factor_dtype']!r}: expected one of {', '.join(_DTYPES)}")
        if group["matrices"] not in MATRICES:
            raise ValueError(f"matrices={group['matrices']!r}: expected one of {', '.join(MATRICES)}")
        for name in ("max_preconditioner_dim", "diagonal_above", "precondition_frequency"):
            check_count(name, group[name])
        if group["max_preconditioner_dim"] < 2:
            raise ValueError("max_preconditioner_dim=1 leaves nothing to precondition: use AdamW")
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            check_range(name, beta, 0.0, 1.0 + 1e-12 if name == "betas[1]" else 1.0)
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)
        for param in params:
            if not param.local.is_contiguous():
                raise ValueError(
                    f"{param.name}: its memory is not row-major (strides {param.local.stride()}, shape "
                    f"{tuple(param.local.shape)}); blocks are runs of memory, so make it contiguous()"
                )

    def _init_state(self, group: dict[str, Any], params: list[Param]) -> None:
        for tensor in self._plan.add(group, params):
            self.state[tensor.param.param] = self._make_state(tensor)
        self._exchanges = None
        self._tell_cost()

    def _make_state(self, tensor: TensorPlan) -> dict[str, Any]:
        """States of one tensor as at construction, with the blocks' views of them."""
        raise NotImplementedError

    def _fresh(self, tensor: TensorPlan) -> None:
        """What of the states does not begin as zeros."""

    def _reset_state(self, param: Param) -> None:
        super()._reset_state(param)
        self._fresh(self._plan.tensors[param.param])

    def _load_states(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        if self._worker is not None and self._worker.busy:
            self._worker.result()  # of states that are about to go
        super()._load_states(saved)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; waits for a refresh that runs beside the step, so that its results are in."""
        self._finish()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._finish()
        return super().__getstate__()

    # ---------------------------------------------------------------- what the user is told

    @staticmethod
    def block_policy(
        *, max_preconditioner_dim: int = 1024, diagonal_above: int = 65536, matrices: str = "auto"
    ) -> Callable[[str, Tensor], Tile | Elements | None]:
        """A `block_policy` for `fully_shard` under which every block lies whole on a rank: `step()` then sends nothing.

        Give it the options that the optimizer gets.
        """

        def policy(name: str, param: Tensor) -> Tile | Elements | None:
            return block_of(
                tuple(param.shape), max_preconditioner_dim, diagonal_above=diagonal_above, how=matrices
            )

        return policy

    @property
    def bytes_per_step(self) -> int:
        """Bytes that all ranks together send in one step for blocks that are not local; 0 with the block policy."""
        return sum(exchange.bytes_per_step for exchange in self._links())

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's states, by name; the 4 bytes of each step counter under "step"."""
        found: dict[str, int] = defaultdict(int)
        for state in self.state.values():
            for name, value in state.items():
                local = local_of(value)
                found[name] += local.numel() * local.element_size()
        return dict(found)

    def _tell_cost(self) -> None:
        cost = self.bytes_per_step
        if cost <= self._told:
            return
        self._told = cost
        moving = [t for t in self._plan.tensors.values() if t.moves]
        names = ", ".join(t.param.name for t in moving[:3]) + (", ..." if len(moving) > 3 else "")
        group = moving[0].group
        options = f"max_preconditioner_dim={group['max_preconditioner_dim']}"
        _LOG.warning(
            "%s: %d of %d parameters (%s) have blocks that no rank holds whole: each step sends %.3g MB over all "
            "ranks, gradients to the blocks' owners and updates back. fully_shard(..., block_policy="
            "%s.block_policy(%s)) lays them out so that nothing is sent.",
            type(self).__name__,
            len(moving),
            len(self._plan.tensors),
            names,
            cost / 1e6,
            type(self).__name__,
            options,
        )

    # ---------------------------------------------------------------- the step

    def _update(self, active: Active, found_inf: Tensor | None) -> None:
        self._finish()
        works = self._gather(active)
        self._directions(works)
        by_number = {w.tensor.number: w for w in works}
        for exchange in self._links():
            taking = [by_number[n] for n in exchange.numbers if n in by_number]
            exchange.scatter(
                {w.tensor.number: w.update for w in taking},
                {w.tensor.number: w.local_update for w in taking},
            )
        self._apply(works)

    def _directions(self, works: Sequence[Work]) -> None:
        """Write `work.update`; advance the states."""
        raise NotImplementedError

    def _apply(self, works: Sequence[Work]) -> None:
        """Move the parameters by `work.local_update`."""
        raise NotImplementedError

    def _links(self) -> list[StripExchange]:
        if self._exchanges is None:
            by_link: dict[Any, list[TensorPlan]] = defaultdict(list)
            for tensor in self._plan.tensors.values():
                if tensor.moves:
                    group = tensor.cut.group
                    assert group is not None
                    by_link[group.group_name, tensor.compute].append(tensor)
            self._exchanges = [
                StripExchange(
                    tensors[0].cut.group,  # type: ignore[arg-type]
                    {t.number: t.ownership for t in tensors if t.ownership is not None},
                    dtype,
                    tensors[0].param.device,
                    f"{name} {dtype}",
                )
                for (name, dtype), tensors in by_link.items()
            ]
        return self._exchanges

    def _gather(self, active: Active) -> list[Work]:
        """The owned runs of all gradients that are there; on every rank where a moving one is there on some."""
        tensors = list(self._plan.tensors.values())
        parts: dict[int, Tensor] = {}
        for param, grad in zip(active.params, active.grads, strict=True):
            tensor = self._plan.tensors[param.param]
            parts[tensor.number] = grad.reshape(-1).to(tensor.compute)
        present = set(parts)
        rooms: dict[int, Tensor] = {}
        for exchange in self._links():
            agreed = exchange.agree([n in parts for n in exchange.numbers])
            taking = [n for n, there in zip(exchange.numbers, agreed, strict=True) if there]
            owned = {n: _room(tensors[n], tensors[n].owned_numel) for n in taking}
            exchange.gather({n: parts[n] for n in taking if n in parts}, owned)
            rooms |= owned
            present |= set(taking)
        works = []
        for number in sorted(present):
            tensor = tensors[number]
            grad = rooms[number] if tensor.moves else parts[number]
            counter = self.state[tensor.param.param]["step"]
            counter += 1
            update = torch.empty_like(grad)
            local = _room(tensor, tensor.param.local.numel()) if tensor.moves else update
            works.append(Work(tensor, int(counter), grad, update, local))
        self._limit(works)
        return works

    def _limit(self, works: Sequence[Work]) -> None:
        """Cut gradients whose squares would overflow; counted, and said."""
        some = [w for w in works if w.grad.numel() and w.grad.dtype == torch.float32]
        if not some:
            return
        peaks = torch.stack([torch.linalg.vector_norm(w.grad, torch.inf) for w in some]).tolist()
        for work, peak in zip(some, peaks, strict=True):
            if peak > LARGEST:
                work.grad = work.grad.clamp(-LARGEST, LARGEST)
                self.clamped_gradients += 1
                _LOG.warning("%s: a gradient of %.1e was cut to %.0e", work.tensor.param.name, peak, LARGEST)

    # ---------------------------------------------------------------- work beside the step

    def _beside(self, device: torch.device, job: Callable[[], Any], commit: Callable[[Any], None]) -> None:
        """Run `job` beside what comes next; `commit` its result when the next step begins."""
        if self._worker is None:
            self._worker = Worker(device)
        self._commit = commit
        self._worker.submit(job)

    def _finish(self) -> None:
        if self._worker is not None and self._worker.busy:
            result = self._worker.result()
            assert self._commit is not None
            self._commit(result)

    def _count(self, counts: RootCounts, kept: Iterable[Block]) -> None:
        """Add up what became of roots, and say what went wrong."""
        self.root_counts += counts
        if counts.fell_back:
            _LOG.info("%d of %d roots fell back to fp64 eigh", counts.fell_back, counts.computed)
        names = sorted({block.tensor.param.name for block in kept})
        if names:
            _LOG.warning(
                "%d of %d roots failed, also in fp64: the last good ones stay in use (%s)",
                counts.kept,
                counts.computed,
                ", ".join(names[:5]),
            )


def _room(tensor: TensorPlan, numel: int) -> Tensor:
    return torch.zeros(numel, dtype=tensor.compute, device=tensor.param.device)


def by_step(works: Iterable[Work]) -> list[tuple[dict[str, Any], int, list[Work]]]:
    """Works of one group and one step number together, for foreach ops with common scalars."""
    found: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for work in works:
        found[id(work.group), work.step].append(work)
    return [(members[0].group, step, members) for (_, step), members in found.items()]


def state_dtype(tensor: TensorPlan) -> torch.dtype:
    """What factors and roots are stored in: the option, but fp64 for fp64 parameters."""
    return torch.float64 if tensor.compute == torch.float64 else _DTYPES[tensor.group["factor_dtype"]]


def check_count(name: str, value: Any) -> None:
    """Raise unless a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected an integer from 1 up")
