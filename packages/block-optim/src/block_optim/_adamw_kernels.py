"""The two ways to carry out an AdamW step over items, which are stretches of memory that share their scalars.

    ListKernel     mul, lerp, mul, addcmul, sqrt, div, add, addcdiv: torch's for-loop and foreach numbers
    FusedKernel    torch's fused kernel: reads and writes once, its own numbers (its square root differs in the last
                   bit on CPU), on CUDA with the step count and the skip flag on the device

Parameters or gradients that are narrower than their moments are worked on in fp32 copies, a chunk at a time, and
rounded to nearest when they are written back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from block_optim import _torch_compat as compat
from block_optim._rounding import Rounder
from block_optim._runs import Run
from block_optim._scalars import Hyper, Rates

# Elements worked on together: what the scratch holds. Below this many, items are put into one foreach call.
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
VECTOR = (
    16  # elements of the widest SIMD vector, and of the cache line by which torch's fused kernel divides work
)

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Origin:
    """Where an item comes from, which is what its random bits depend on: a parameter and an element of it."""

    name: str
    seed: int
    element: int


class Item:
    """A run, or a part of one: 1-D views, or the tensor itself where a run is one tensor."""

    def __init__(
        self, run: Run, kind: int, parts: Tensors, firsts: Tensors, seconds: Tensors, counter: torch.Tensor
    ) -> None:
        self.kind = kind  # which of the step's rates
        self.origin: Origin | None = None  # for stochastic rounding
        self.counter = counter
        self.run = run
        self.numel = run.numel
        self.bounds: tuple[int, int] | None = None
        if len(run.members) > 1 or not parts[run.members[0]].is_contiguous():
            self.bounds = (0, run.numel)
        self.param, self.first, self.second = (self.take(x) for x in (parts, firsts, seconds))

    def take(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The item's part of one of the lists that the run was found in."""
        if self.bounds is None:
            return tensors[self.run.members[0]]
        start, stop = self.bounds
        view = self.run.view(tensors)
        return view if (start, stop) == (0, self.run.numel) else view[start:stop]

    def cut(self, start: int, stop: int) -> "Item":
        """A part of this item."""
        if (start, stop) == (0, self.numel):
            return self
        part = object.__new__(Item)
        part.kind, part.counter, part.run, part.numel = self.kind, self.counter, self.run, stop - start
        part.origin = self.origin and replace(self.origin, element=self.origin.element + start)
        base = 0 if self.bounds is None else self.bounds[0]
        part.bounds = (base + start, base + stop)
        part.param, part.first, part.second = (
            t.reshape(-1)[start:stop] if t.is_contiguous() else t.as_strided((t.numel(),), (1,))[start:stop]
            for t in (self.param, self.first, self.second)
        )
        return part


class Kernel(Protocol):
    """A prepared call, or a few, over some items of one device and dtype."""

    def __call__(
        self,
        grads: Tensors,
        rates: Sequence[tuple[Hyper, Rates]],
        keep: int,
        found_inf: torch.Tensor | None,
    ) -> None:
        """One step. `grads` are the local gradients, in the runs' numbering; views are kept
        while ``keep`` stays, unless it is 0.
        """
        ...


class _Batch:
    """Some items, their fp32 copies where they need them, and their gradients."""

    def __init__(self, items: list[Item], grad_dtype: torch.dtype, scratch: "_Scratch") -> None:
        self.items = items
        self.params = [item.param for item in items]
        self.firsts = [item.first for item in items]
        self.seconds = [item.second for item in items]
        dtype = self.firsts[0].dtype
        self.wide_params = (
            scratch.like("params", self.params, dtype) if self.params[0].dtype != dtype else None
        )
        self.wide_grads = scratch.like("grads", self.params, dtype) if grad_dtype != dtype else None
        self.scratch = scratch
        self.kept: tuple[int, Tensors] | None = None

    def load(self, grads: Tensors, keep: int, negate: Sequence[bool]) -> tuple[Tensors, Tensors]:
        """Parameters and gradients to compute with."""
        if self.kept is None or self.kept[0] != keep:
            found = [item.take(grads) for item in self.items]
            self.kept = (keep, found) if keep else None
        else:
            found = self.kept[1]
        if any(negate) or self.wide_grads is not None:
            copies = self.wide_grads or self.scratch.like("grads", self.params, self.firsts[0].dtype)
            compat.foreach_copy_(copies, found)
            minus = [t for t, negative in zip(copies, negate, strict=True) if negative]
            if minus:
                compat.foreach_mul_(minus, -1.0)
            found = copies
        if self.wide_params is None:
            return self.params, found
        compat.foreach_copy_(self.wide_params, self.params)
        return self.wide_params, found

    def store(self) -> None:
        """Write fp32 copies of parameters back, rounded to nearest or as their origins say."""
        if self.wide_params is None:
            return
        if self.items[0].origin is None:
            compat.foreach_copy_(self.params, self.wide_params)
            return
        for item, param, wide in zip(self.items, self.params, self.wide_params, strict=True):
            assert item.origin is not None
            origin, step = item.origin, round(float(item.counter))
            rounder = self.scratch.rounder()
            rounder(wide.view(-1), param.view(-1), origin.seed, origin.name, step, origin.element)


class _Scratch:
    """Buffers that batches take turns with, each made when it is first needed."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self.device = numel, device
        self.buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.views: dict[tuple[Any, ...], Tensors] = {}
        self._rounder: Rounder | None = None

    def rounder(self) -> Rounder:
        """For stretches of up to as many elements."""
        if self._rounder is None:
            self._rounder = Rounder(self.numel, self.device)
        return self._rounder

    def like(self, role: str, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """Tensors of these shapes, one after another in the buffer of a role."""
        shapes = tuple(t.shape for t in tensors)
        found = self.views.get((role, dtype, shapes))
        if found is None:
            buffer = self.buffers.get((role, dtype))
            if buffer is None:
                buffer = torch.empty(self.numel, dtype=dtype, device=self.device)
                self.buffers[role, dtype] = buffer
            parts = buffer[: sum(t.numel() for t in tensors)].split([t.numel() for t in tensors])
            found = self.views[role, dtype, shapes] = [
                part.view(shape) for part, shape in zip(parts, shapes, strict=True)
            ]
        return found


def _chunks(items: list[Item], limit: int) -> list[list[Item]]:
    """Items in batches of at most ``limit`` elements, long ones cut."""
    batches: list[list[Item]] = []
    room = 0
    for item in items:
        for start in range(0, item.numel, limit):
            part = item.cut(start, min(start + limit, item.numel))
            if part.numel > room or not batches:
                batches.append([])
                room = limit
            batches[-1].append(part)
            room -= part.numel
    return batches


class ListKernel:
    """torch's list of ops, in its order."""

    def __init__(self, batch: _Batch) -> None:
        self.batch = batch
        self.kinds = [item.kind for item in batch.items]
        self.roots = batch.scratch.like("roots", batch.params, batch.firsts[0].dtype)
        self.single = len(batch.items) == 1 and batch.params[0].device.type == "cpu"

    @staticmethod
    def over(items: list[Item], grad_dtype: torch.dtype) -> "list[ListKernel]":
        """Kernels that together do all items."""
        device = items[0].param.device
        limit = CHUNK.get(device.type, CHUNK["cuda"])
        batches = _chunks(items, limit)
        scratch = _Scratch(max(sum(i.numel for i in b) for b in batches), device)
        return [ListKernel(_Batch(batch, grad_dtype, scratch)) for batch in batches]

    def __call__(
        self,
        grads: Tensors,
        rates: Sequence[tuple[Hyper, Rates]],
        keep: int,
        found_inf: torch.Tensor | None,
    ) -> None:
        """One step over the batch."""
        assert found_inf is None
        batch = self.batch
        chosen = [rates[kind] for kind in self.kinds]
        params, grads = batch.load(grads, keep, [hyper.maximize for hyper, _ in chosen])
        if self.single:
            _step_one(params[0], grads[0], batch.firsts[0], batch.seconds[0], self.roots[0], chosen[0][1])
        else:
            _step_list(params, grads, batch.firsts, batch.seconds, self.roots, [r for _, r in chosen])
        batch.store()


def _step_one(
    param: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    root: torch.Tensor,
    rates: Rates,
) -> None:
    if rates.decay is not None:
        param.mul_(rates.decay)
    first.lerp_(grad, rates.first)
    second.mul_(rates.beta2).addcmul_(grad, grad, value=rates.second)
    torch.sqrt(second, out=root).div_(rates.root).add_(rates.eps)
    param.addcdiv_(first, root, value=-rates.step_size)


def _step_list(
    params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, roots: Tensors, rates: list[Rates]
) -> None:
    if any(r.decay is not None for r in rates):
        compat.foreach_mul_(params, [1.0 if r.decay is None else r.decay for r in rates])
    compat.foreach_lerp_(firsts, grads, [r.first for r in rates])
    compat.foreach_mul_(seconds, [r.beta2 for r in rates])
    compat.foreach_addcmul_(seconds, grads, grads, [r.second for r in rates])
    compat.foreach_copy_(roots, seconds)
    compat.foreach_sqrt_(roots)
    compat.foreach_div_(roots, [r.root for r in rates])
    compat.foreach_add_(roots, [r.eps for r in rates])
    compat.foreach_addcdiv_(params, firsts, roots, [-r.step_size for r in rates])


class FusedKernel:
    """torch's fused kernel, for items of the same options and count."""

    def __init__(self, batch: _Batch, tails: "_Tails | None") -> None:
        self.batch = batch
        self.kind = batch.items[0].kind
        self.counters = [item.counter for item in batch.items]
        self.tails = tails

    @staticmethod
    def over(items: list[Item], grad_dtype: torch.dtype) -> "list[FusedKernel]":
        """Kernels that together do all items: one for each set of options, more where copies are needed."""
        device = items[0].param.device
        narrow = items[0].param.dtype != items[0].first.dtype or grad_dtype != items[0].first.dtype
        limit = CHUNK.get(device.type, CHUNK["cuda"]) if narrow else max(item.numel for item in items)
        kernels = []
        for kind in dict.fromkeys(item.kind for item in items):
            same = [item for item in items if item.kind == kind]
            tails = [i.cut(i.numel - i.numel % VECTOR, i.numel) for i in same if i.numel % VECTOR]
            bodies = [i.cut(0, i.numel - i.numel % VECTOR) for i in same if i.numel >= VECTOR]
            if device.type != "cpu":
                bodies, tails = same, []
            batches = _chunks(bodies, limit) if narrow else [bodies] if bodies else []
            scratch = _Scratch(max((sum(i.numel for i in b) for b in batches), default=0), device)
            kernels += [FusedKernel(_Batch(batch, grad_dtype, scratch), None) for batch in batches]
            if tails:
                scratch = _Scratch(len(tails) * VECTOR, device)
                kernels.append(FusedKernel(_Batch(tails, grad_dtype, scratch), _Tails(tails)))
        return kernels

    def __call__(
        self,
        grads: Tensors,
        rates: Sequence[tuple[Hyper, Rates]],
        keep: int,
        found_inf: torch.Tensor | None,
    ) -> None:
        """One step over the batch."""
        hyper = rates[self.kind][0]
        batch = self.batch
        params, grads = batch.load(grads, keep, [False] * len(batch.items))
        lists = [params, grads, batch.firsts, batch.seconds]
        if self.tails is not None:
            lists = self.tails.load(lists)
        compat.fused_adamw_(
            *lists,
            [],
            self.counters,
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=hyper.maximize,
            found_inf=found_inf,
        )
        if self.tails is not None:
            self.tails.store([params, grads, batch.firsts, batch.seconds])
        batch.store()


class _Tails:
    """Ends of runs, shorter than a vector, each worked on as a whole vector of its own."""

    def __init__(self, items: list[Item]) -> None:
        dtype, device = items[0].first.dtype, items[0].first.device
        self.vectors = [
            list(torch.zeros(len(items), VECTOR, dtype=dtype, device=device).unbind()) for _ in range(4)
        ]
        self.parts = [
            [v[: item.numel].view(item.param.shape) for v, item in zip(vectors, items, strict=True)]
            for vectors in self.vectors
        ]

    def load(self, lists: list[Tensors]) -> list[Tensors]:
        """The vectors, filled."""
        for parts, tensors in zip(self.parts, lists, strict=True):
            compat.foreach_copy_(parts, tensors)
        return self.vectors

    def store(self, lists: list[Tensors]) -> None:
        """Copy the results back: all but the gradients."""
        for i in (0, 2, 3):
            compat.foreach_copy_(lists[i], self.parts[i])
