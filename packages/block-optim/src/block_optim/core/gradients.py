"""Collects the gradients of a step, and detects whether their memory has moved since the last one; divides them."""

import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from block_optim.core._torch_compat import foreach_copy_, foreach_div_, locals_of
from block_optim.core.params import Param
from block_optim.core.snapshot import same_objects


@dataclass(slots=True, eq=False)
class StepGradients:
    """The parameters that have a gradient in this step, in the optimizer's order; iterates over (param, gradient).

    Attributes:
        params: the parameters.
        locals: this rank's elements of each, as `Param.local`.
        grads: this rank's elements of each gradient: plain and detached, in any stride; fp32 where a narrower one was
            divided by `GradScaler`'s scale.
        version: rises when other parameters have gradients, when a parameter has another address, or when gradients
            are laid out differently among themselves (which share a storage, at which offsets). Anything derived
            from these may be kept while the version stays.
        keeps: gradient tensors, and views of them, may be kept only while this is the same number and not 0, which
            means that the caller keeps them, too: else `zero_grad()` would free nothing.
        found_inf: a 0-d tensor on the parameters' device; where it is not 0 nothing may be written. None unless the
            optimizer `supports_found_inf`: then gradients are known to be finite, or are not checked.
    """

    params: list[Param]
    locals: list[torch.Tensor]
    grads: list[torch.Tensor]
    version: int
    keeps: int = 0
    found_inf: torch.Tensor | None = None

    def __iter__(self) -> Iterator[tuple[Param, torch.Tensor]]:
        return zip(self.params, self.grads, strict=True)

    def select(self, positions: list[int]) -> "StepGradients":
        """The parameters at these positions, with their gradients."""
        params, grads = [self.params[i] for i in positions], [self.grads[i] for i in positions]
        locals_ = [self.locals[i] for i in positions]
        return StepGradients(params, locals_, grads, self.version, self.keeps, self.found_inf)


class Collector:
    """Collects the parameters' gradients in each step.

    If all parameters and gradients are the same objects at the same addresses, that is a few passes over lists. New
    gradients, as each backward pass makes them, are checked one by one; parameters that stayed are not.
    """

    def __init__(self) -> None:
        self._active: StepGradients | None = None
        self._seen_grads: list[Callable[[], torch.Tensor | None]] = []
        self._addresses: tuple[list[int], list[int]] = ([], [])  # of parameters, of gradients
        self._empty: list[torch.Tensor] = []  # locals without elements, and so without an address
        self._places: list[object] = []
        self._epoch = 0
        self._version = 0

    def forget(self) -> None:
        """Treat the next gradients as new ones."""
        self._active = None

    def collect(self, params: list[Param]) -> StepGradients:
        """The parameters that have gradients; the object of the last step if nothing but numbers changed."""
        tensors = [p.tensor for p in params]
        grads = [t.grad for t in tensors]
        present_grads = [g for g in grads if g is not None]
        own = locals_of(tensors)
        addresses = _addresses(own), _addresses(locals_of(present_grads))
        active, before = self._active, self._addresses
        empty = [t for t, address in zip(own, addresses[0], strict=True) if not address]
        resting = active is not None and addresses[0] == before[0] and same_objects(empty, self._empty)
        if active is not None and resting and addresses[1] == before[1] and self._same_objects(grads):
            if not active.keeps:  # the caller reuses these tensors, so references to them may be kept
                active.keeps = self._epoch
                active.grads = _local_grads(active.params, present_grads)
            return active
        present = [p for p, g in zip(params, grads, strict=True) if g is not None]
        local_grads = _local_grads(present, present_grads)
        self._seen_grads = [_nothing if g is None else weakref.ref(g) for g in grads]
        self._addresses, self._empty = addresses, empty
        self._epoch += 1
        places, places_before = _places(local_grads, addresses[1]), self._places
        self._places = places
        if active is not None and resting and present == active.params and places == places_before:
            active.grads, active.keeps = local_grads, 0
            return active
        self._version += 2  # odd ones are for `unscaled`
        if not resting:  # on every rank of a parameter, whatever it holds of it
            self._active = None  # until all fit
            for param in params:
                param.check_layout()
        self._active = StepGradients(present, [p.local for p in present], local_grads, self._version)
        return self._active

    def _same_objects(self, grads: list[torch.Tensor | None]) -> bool:
        return all(map(operator.is_, grads, map(operator.call, self._seen_grads)))


def unscaled(active: StepGradients, divisor: torch.Tensor | float) -> StepGradients:
    """The gradients over a scale: divided in place, narrow ones in fp32 copies, from which they are then rounded.

    In fp16 small ones would be zero, and large ones would lose bits, before any moment sees them.
    """
    grads = [g.float() if g.dtype.itemsize < 4 else g for g in active.grads]
    for dtype in {g.dtype for g in grads}:  # mixed, they are a kernel a tensor on CUDA
        foreach_div_([g for g in grads if g.dtype == dtype], divisor)
    pairs = [(g, wide) for g, wide in zip(active.grads, grads, strict=True) if wide is not g]
    if not pairs:
        return active
    for dtype in {g.dtype for g, _ in pairs}:
        same = [pair for pair in pairs if pair[0].dtype == dtype]
        foreach_copy_([g for g, _ in same], [wide for _, wide in same])
    return StepGradients(active.params, active.locals, grads, active.version + 1)


def _nothing() -> None:
    """Placeholder weak reference for a missing gradient."""


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse gradient, which `Param.local_grad` refuses by name, has no address
        return [-1] * len(tensors)


def _local_grads(params: list[Param], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    result = [param.local_grad(grad) for param, grad in zip(params, grads, strict=True)]
    return [g.detach() if g.requires_grad else g for g in result]


def _places(grads: list[torch.Tensor], addresses: list[int]) -> list[object]:
    """Layout of gradients: which of them share a storage, at which offsets, in which strides."""
    offsets = [g.storage_offset() for g in grads]
    storages = [a - o * g.itemsize for a, o, g in zip(addresses, offsets, grads, strict=True)]
    first = {storage: i for i, storage in reversed(list(enumerate(storages)))}
    return [(first[s], o, g.dtype, g.stride()) for s, o, g in zip(storages, offsets, grads, strict=True)]
