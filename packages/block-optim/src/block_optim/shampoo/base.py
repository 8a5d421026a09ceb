"""Common part of Shampoo and SOAP: planning, gradients to owners, updates back.

A subclass's `update` is written with three helpers:

    _gather     gradients -> owned runs                                    one all_reduce, one all_to_all_single
                (the rule, on owned runs and blocks)                       nothing
    _scatter    owned runs -> local updates                                one all_to_all_single
    _apply      weight decay, momentum, learning rate, on local elements   nothing

Only strips that are not on their owner are communicated. Where every rank holds the whole tensor, owners have the
gradients, and an all_gather brings updates to all.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from block_optim.core.base import BlockOptimizer, is_first_rank
from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_betas, check_count, check_range
from block_optim.core.params import Group, Param
from block_optim.core.rounding import NarrowWriter, is_narrow
from block_optim.shampoo.batches import Batch, store_square
from block_optim.shampoo.grid import block_of, grid_of
from block_optim.shampoo.plan import OwnedBlock, Plan, TensorPlan
from block_optim.shampoo.roots import RootCounts
from block_optim.shampoo.strips import StripExchange
from layout_planner import Block

_LOG = logging.getLogger("block_optim")

LARGEST = 1e15  # gradients are clamped to it: their squares, summed over a block, stay in fp32's range

Move = Callable[[Group, Sequence["TensorStep"], list[Tensor]], None]


@dataclass
class TensorStep:
    """One tensor in one step: its step number, and flat runs in the compute dtype.

    `grad` and `update` have the owned elements, `local_update` the local ones: the same memory if nothing is exchanged.
    """

    tensor: TensorPlan
    step: int
    grad: Tensor
    update: Tensor
    local_update: Tensor


class StepBlocks:
    """The blocks of some tensors' steps, with their part of the gradients and updates."""

    def __init__(self, works: Iterable[TensorStep]) -> None:
        self._works = {w.tensor.number: w for w in works if w.tensor.grid is not None}
        self.blocks = [block for w in self._works.values() for block in w.tensor.blocks]

    def grads(self, batch: Batch) -> list[Tensor]:
        """The gradient of each block of a batch."""
        return [b.of(self._works[b.tensor.number].grad) for b in batch.blocks]

    def updates(self, batch: Batch) -> list[Tensor]:
        """The memory for the update of each block of a batch."""
        return [b.of(self._works[b.tensor.number].update) for b in batch.blocks]


class Preconditioned(BlockOptimizer):
    """Base of Shampoo and SOAP; not for direct use. A subclass defines `_make_state` and `update`."""

    format_options: ClassVar[tuple[str, ...]] = ("max_preconditioner_dim", "diagonal_above")
    shared_options: ClassVar[tuple[str, ...]] = ("replicate_mesh",)
    divides_copies = True

    @override
    def setup(self) -> None:
        self._plan = Plan()
        self._links: list[StripExchange] | None = None
        self._write = NarrowWriter()
        self._bound = False  # whether blocks have views of the states' memory
        self._logged = 0
        self.root_counts = RootCounts()

    # ---------------------------------------------------------------- options and states

    @override
    def check_options(self, group: Group) -> None:
        for name in ("max_preconditioner_dim", "diagonal_above", "precondition_frequency"):
            check_count(name, group[name])
        if group["max_preconditioner_dim"] < 2:
            raise ValueError("max_preconditioner_dim=1 leaves nothing to precondition: use AdamW")
        check_betas(group["betas"], 1.0 + 1e-12)
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    @override
    def check_group(self, group: Group, params: list[Param]) -> None:
        for param in params:
            param.check_row_major()

    @override
    def init_states(self, group: Group, params: list[Param]) -> None:
        for tensor in self._plan.add(params, self.members):
            state = self.state[tensor.param.tensor] = self._make_state(tensor)
            tensor.bind(state)
            for block in tensor.blocks:
                _set_identities(block)
        self._links = None
        self._log_cost()

    @override
    def invalidate(self) -> None:
        """Drop the plans of parameters that are not trained; look for the states' memory again in the next step."""
        for parameter in self._plan.tensors.keys() - {param.tensor for param in self.trained}:
            del self._plan.tensors[parameter]
            self._links = None
        self._bound = False

    def _make_state(self, tensor: TensorPlan) -> dict[str, Tensor]:
        """States of one tensor, zero."""
        raise NotImplementedError

    # ---------------------------------------------------------------- cost

    @classmethod
    @override
    def block_of(cls, name: str, param: Tensor, options: Mapping[str, Any]) -> Block | None:
        return block_of(grid_of(tuple(param.shape), options))

    @property
    def bytes_per_step(self) -> int:
        """Bytes that all ranks together send in one step: for blocks that are not local (0 with the block policy), and
        updates between ranks that divide the work on their copies."""
        return sum(exchange.bytes_per_step for exchange in self._exchanges())

    def _log_cost(self) -> None:
        cost = sum(exchange.bytes_per_step for exchange in self._exchanges() if not exchange.copies)
        if cost <= self._logged:
            return
        self._logged = cost
        if not is_first_rank():
            return
        moving = [t for t in self._plan.tensors.values() if t.moves and not t.holding.copies]
        names = ", ".join(t.param.name for t in moving[:3]) + (", ..." if len(moving) > 3 else "")
        kind, dim = type(self).__name__, moving[0].group["max_preconditioner_dim"]
        _LOG.warning(
            f"{kind}: {len(moving)} of {len(self._plan.tensors)} parameters ({names}) have blocks that no rank holds "
            f"whole: each step sends {cost / 1e6:.3g} MB over all ranks, gradients to the blocks' owners and updates "
            f"back. fully_shard(..., block_policy={kind}.block_policy(max_preconditioner_dim={dim})) of fsdp_runtime "
            "lays them out so that nothing is sent, except for blocks that tensor parallelism cuts."
        )

    # ---------------------------------------------------------------- the step

    def _scatter(self, works: Sequence[TensorStep]) -> None:
        """Bring `work.update` from the owners to `work.local_update`."""
        by_number = {w.tensor.number: w for w in works}
        for exchange in self._exchanges():
            members = [by_number[n] for n in exchange.numbers if n in by_number]
            updates = {w.tensor.number: w.update for w in members}
            exchange.scatter(updates, {w.tensor.number: w.local_update for w in members})

    def _apply(self, works: Iterable[TensorStep], move: Move) -> None:
        """Move the parameters by `work.local_update`; narrow ones in fp32 copies, rounded once.

        `move` updates the local weights, flat and in the compute dtype, of works of one group.
        """
        for group, step, members in by_step(works):
            weights = [w.tensor.param.local.view(-1) for w in members]
            wide = [weight.to(w.tensor.compute) for weight, w in zip(weights, members, strict=True)]
            move(group, members, wide)
            for work, weight, moved in zip(members, weights, wide, strict=True):
                if is_narrow(weight.dtype):
                    self._write(work.tensor.param, moved, weight, 0, step)

    def _exchanges(self) -> list[StripExchange]:
        if self._links is None:
            by_link: dict[tuple[str, bool, torch.dtype], list[TensorPlan]] = defaultdict(list)
            for tensor in self._plan.tensors.values():
                group = tensor.holding.group
                if tensor.moves and group is not None:
                    by_link[group.group_name, tensor.holding.copies, tensor.compute].append(tensor)
            self._links = [
                StripExchange(
                    {t.number: t.assignment for t in tensors if t.assignment is not None},
                    [t.param.name for t in tensors],
                    dtype,
                    tensors[0].param.device,
                )
                for (*_, dtype), tensors in by_link.items()
            ]
        return self._links

    def _gather(self, active: StepGradients) -> list[TensorStep]:
        """The owned runs of all gradients; of a parameter that is exchanged, if any rank has a gradient."""
        if not self._bound:  # point the blocks' views to the memory of the states
            for param in self.trained:
                self._plan.tensors[param.tensor].bind(param.states)
            self._bound = True
        tensors = {t.number: t for t in self._plan.tensors.values()}
        result: dict[int, Tensor] = {}
        for param, grad in active:
            tensor = self._plan.tensors[param.tensor]
            result[tensor.number] = grad.reshape(-1).to(tensor.compute)
        for exchange in self._exchanges():
            agreed = exchange.agree([n in result for n in exchange.numbers])
            taking = [n for n, there in zip(exchange.numbers, agreed, strict=True) if there]
            local = {n: result[n] if n in result else tensors[n].zeros() for n in taking}
            owned = {n: tensors[n].zeros(tensors[n].owned_numel) for n in taking}
            exchange.gather(local, owned)
            result |= owned
        works = []
        for number in sorted(result):
            tensor, grad = tensors[number], result[number]
            counter = self.state[tensor.param.tensor]["step"]
            counter += 1
            update = torch.empty_like(grad)
            local_update = tensor.zeros() if tensor.moves else update
            works.append(TensorStep(tensor, int(counter), grad, update, local_update))
        for work in works:  # into the memory of the update, which is written later, block by block
            if work.grad.dtype == torch.float32:
                work.grad = torch.clamp(work.grad, -LARGEST, LARGEST, out=work.update)
        return works

    def _count(self, counts: RootCounts, kept: Iterable[OwnedBlock]) -> None:
        """Add to the counts of roots, and log failures."""
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


def _set_identities(block: OwnedBlock) -> None:
    """Begin roots and bases with the identity, which is used until there is one, and kept if the first one fails."""
    for name, view in block.views.items():
        kind, _, side = name.partition("_")
        if kind in ("root", "basis") and block.diagonal(side):
            view.fill_(1)
        elif kind in ("root", "basis"):
            store_square([view], torch.eye(block.dim(side), dtype=view.dtype, device=view.device)[None])


def flat_states(works: Iterable[TensorStep], name: str) -> list[Tensor]:
    """This rank's elements of a state, 1-D, of the tensors that have it."""
    return [state for w in works if (state := w.tensor.flat(name)) is not None]


def by_step(works: Iterable[TensorStep]) -> list[tuple[Group, int, list[TensorStep]]]:
    """Works of one group and one step number together, for foreach ops with common scalars."""
    result: dict[tuple[int, int], list[TensorStep]] = defaultdict(list)
    for work in works:
        result[id(work.tensor.group), work.step].append(work)
    return [(members[0].tensor.group, step, members) for (_, step), members in result.items()]
