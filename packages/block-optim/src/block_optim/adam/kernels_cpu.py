"""The two ways to carry out an AdamW step over slices of runs that share their scalars.

    ListKernel     mul, lerp, mul, addcmul, sqrt, div, add, addcdiv: torch's for-loop and foreach numbers
    FusedKernel    torch's fused kernel: reads and writes once, its own numbers (its square root differs in the last
                   bit on CPU), on CUDA with the step count and the skip flag on the device

Parameters or gradients that are narrower than their moments are worked on in fp32 copies, a chunk at a time, and
rounded to nearest when they are written back.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import torch

from block_optim.adam.plan import Step
from block_optim.adam.scalars import Rates
from block_optim.core import _torch_compat as compat
from block_optim.core.precision import Origin
from block_optim.core.rounding import Rounder
from block_optim.core.runs import Run
from block_optim.core.scratch import Scratch, chunk_on, packed
from block_optim.core.skip import unless
from ragged_shard import is_cpu

# Elements of the widest SIMD vector, and of the cache line by which torch's fused kernel divides work.
VECTOR = 16

Tensors = list[torch.Tensor]
Kernel = Callable[[Step], None]  # a prepared call, or a few, over some slices of one device and dtype


class RunSlice:
    """A run or a range of one: its parameters and moments as 1-D views, or the tensor itself if the run is one tensor.

    Attributes:
        kind: which of the step's rates.
        origin: for stochastic rounding; None: to nearest.
    """

    def __init__(
        self,
        run: Run,
        kind: int,
        lists: tuple[Tensors, Tensors, Tensors],
        counter: torch.Tensor,
        origin: Origin | None,
    ) -> None:
        self.run, self.kind, self.counter, self.origin = run, kind, counter, origin
        self.numel = run.numel
        self.bounds: tuple[int, int] | None = None
        if len(run.members) > 1 or not lists[0][run.members[0]].is_contiguous():
            self.bounds = (0, run.numel)
        self.param, self.first, self.second = (self.take(tensors) for tensors in lists)

    def take(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This slice of another list of tensors with the same memory layout as the run."""
        if self.bounds is None:
            return tensors[self.run.members[0]]
        start, stop = self.bounds
        view = self.run.view(tensors)
        return view if (start, stop) == (0, self.run.numel) else view[start:stop]

    def range(self, start: int, stop: int) -> "RunSlice":
        """The slice of elements [start, stop) of this one."""
        if (start, stop) == (0, self.numel):
            return self
        result = copy(self)
        result.numel = stop - start
        result.origin = self.origin and replace(self.origin, element=self.origin.element + start)
        base = 0 if self.bounds is None else self.bounds[0]
        result.bounds = (base + start, base + stop)
        result.param, result.first, result.second = (
            t.reshape(-1)[start:stop] if t.is_contiguous() else t.as_strided((t.numel(),), (1,))[start:stop]
            for t in (self.param, self.first, self.second)
        )
        return result


class _Batch:
    """Some slices, their fp32 copies where they need them, and their gradients."""

    def __init__(
        self, slices: list[RunSlice], grad_dtype: torch.dtype, scratch: Scratch, rounder: Rounder | None
    ) -> None:
        self.slices = slices
        self.params = [s.param for s in slices]
        self.firsts = [s.first for s in slices]
        self.seconds = [s.second for s in slices]
        self.dtype = self.firsts[0].dtype
        self.scratch, self.rounder = scratch, rounder
        self.wide_params = self.like("params") if self.params[0].dtype != self.dtype else None
        self.wide_grads = self.like("grads") if grad_dtype != self.dtype else None
        self.kept: tuple[int, Tensors] | None = None

    def like(self, role: str) -> Tensors:
        """Scratch of the parameters' shapes, in the moments' dtype."""
        return self.scratch.take_like(role, self.params, self.dtype)

    def load(self, step: Step, negate: Sequence[bool]) -> tuple[Tensors, Tensors]:
        """Parameters and gradients to compute with."""
        if self.kept is None or self.kept[0] != step.keep:
            result = [s.take(step.grads) for s in self.slices]
            self.kept = (step.keep, result) if step.keep else None
        else:
            result = self.kept[1]
        if any(negate) or self.wide_grads is not None:
            copies = self.wide_grads or self.like("grads")
            compat.foreach_copy_(copies, result)
            minus = [t for t, negative in zip(copies, negate, strict=True) if negative]
            if minus:
                compat.foreach_mul_(minus, -1.0)
            result = copies
        if self.wide_params is None:
            return self.params, result
        compat.foreach_copy_(self.wide_params, self.params)
        return self.wide_params, result

    def store(self) -> None:
        """Write fp32 copies of parameters back, rounded to nearest or as their origins say."""
        if self.wide_params is None:
            return
        if self.rounder is None:
            compat.foreach_copy_(self.params, self.wide_params)
            return
        for s, param, wide in zip(self.slices, self.params, self.wide_params, strict=True):
            assert s.origin is not None
            origin, step = s.origin, round(float(s.counter))
            self.rounder(wide.view(-1), param.view(-1), origin.seed, origin.name, step, origin.element)


def _batches(slices: list[RunSlice], limit: int, grad_dtype: torch.dtype) -> list[_Batch]:
    """Batches of at most ``limit`` elements, long slices cut; all share one scratch and are rounded in the same way."""
    if not slices:
        return []
    parts = (s.range(i, min(i + limit, s.numel)) for s in slices for i in range(0, s.numel, limit))
    chunks = packed(parts, lambda part: part.numel, limit)
    device, size = slices[0].param.device, max(sum(s.numel for s in chunk) for chunk in chunks)
    scratch = Scratch(device, size)
    rounder = None if slices[0].origin is None else Rounder(size, device)
    return [_Batch(chunk, grad_dtype, scratch, rounder) for chunk in chunks]


class ListKernel:
    """torch's list of ops, in its order."""

    def __init__(self, batch: _Batch) -> None:
        self.batch = batch
        self.kinds = [s.kind for s in batch.slices]
        self.roots = batch.like("roots")
        self.single = len(batch.slices) == 1 and is_cpu(batch.params[0].device)

    @staticmethod
    def over(slices: list[RunSlice], grad_dtype: torch.dtype) -> "list[ListKernel]":
        """Kernels that together do all slices."""
        limit = chunk_on(slices[0].param.device)
        return [ListKernel(batch) for batch in _batches(slices, limit, grad_dtype)]

    def __call__(self, step: Step) -> None:
        """Carry out one step."""
        batch = self.batch
        with unless(step.found_inf, [*batch.params, *batch.firsts, *batch.seconds]):
            self._step(step)

    def _step(self, step: Step) -> None:
        batch = self.batch
        chosen = [step.rates[kind] for kind in self.kinds]
        params, grads = batch.load(step, [hyper.maximize for hyper, _ in chosen])
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
    """The ops for one slice."""
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
    """torch's fused kernel, for slices of the same options, and of the same count unless it is on the device."""

    def __init__(self, batch: _Batch, tails: "_Tails | None" = None) -> None:
        self.batch = batch
        self.kind = batch.slices[0].kind
        self.counters = [s.counter for s in batch.slices]
        self.tails = tails

    @staticmethod
    def over(slices: list[RunSlice], grad_dtype: torch.dtype) -> "list[FusedKernel]":
        """Kernels that together do all slices: one for each set of options, more where copies are needed."""
        device, dtype = slices[0].param.device, slices[0].first.dtype
        narrow = slices[0].param.dtype != dtype or grad_dtype != dtype
        kernels = []
        for kind in dict.fromkeys(s.kind for s in slices):
            same = [s for s in slices if s.kind == kind]
            tails = [s.range(s.numel - s.numel % VECTOR, s.numel) for s in same if s.numel % VECTOR]
            bodies = [s.range(0, s.numel - s.numel % VECTOR) for s in same if s.numel >= VECTOR]
            if not is_cpu(device):
                bodies, tails = same, []
            limit = chunk_on(device) if narrow else sum(s.numel for s in bodies)
            kernels += [FusedKernel(batch) for batch in _batches(bodies, limit, grad_dtype)]
            if tails:
                (batch,) = _batches(tails, len(tails) * VECTOR, grad_dtype)
                kernels.append(FusedKernel(batch, _Tails(tails)))
        return kernels

    def __call__(self, step: Step) -> None:
        """Carry out one step."""
        hyper = step.rates[self.kind][0]
        batch = self.batch
        params, grads = batch.load(step, [False] * len(batch.slices))
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
            found_inf=step.found_inf,
        )
        if self.tails is not None:
            self.tails.store([params, grads, batch.firsts, batch.seconds])
        batch.store()


class _Tails:
    """Ends of runs, shorter than a vector, each padded to a whole vector."""

    def __init__(self, slices: list[RunSlice]) -> None:
        dtype, device = slices[0].first.dtype, slices[0].first.device
        self.vectors = [
            list(torch.zeros(len(slices), VECTOR, dtype=dtype, device=device).unbind()) for _ in range(4)
        ]
        self.used = [
            [v[: s.numel].view(s.param.shape) for v, s in zip(vectors, slices, strict=True)]
            for vectors in self.vectors
        ]

    def load(self, lists: list[Tensors]) -> list[Tensors]:
        """The vectors, filled."""
        for used, tensors in zip(self.used, lists, strict=True):
            compat.foreach_copy_(used, tensors)
        return self.vectors

    def store(self, lists: list[Tensors]) -> None:
        """Copy the results back: all but the gradients."""
        for i in (0, 2, 3):
            compat.foreach_copy_(lists[i], self.used[i])
