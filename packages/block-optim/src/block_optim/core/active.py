"""The gradients of a step: which parameters have one, and whether they are where they were in the last step."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from block_optim.core._torch_compat import local_of
from block_optim.core.params import Param


@dataclass(slots=True, eq=False)
class Active:
    """The parameters that have a gradient in this step, in the optimizer's order; iterates over (param, gradient).

    Attributes:
        params: the parameters.
        locals: this rank's elements of each, as `Param.local`.
        grads: this rank's elements of each gradient: plain and detached, in any stride.
        version: rises when other parameters have gradients, when a parameter lies elsewhere in memory, or when
            gradients lie otherwise among themselves (which share a storage, at which offsets). What is derived from
            that may be kept for as long as the version stays.
        keeps: gradient tensors, and views of them, may be kept only while this is the same number and not 0, which
            means that somebody else keeps them too: else `zero_grad()` would free nothing.
        found_inf: a 0-d tensor on the parameters' device; where it is not 0 nothing may be written. None unless the
            optimizer `takes_found_inf`: then gradients are known to be finite, or are not checked.
    """

    params: list[Param]
    locals: list[torch.Tensor]
    grads: list[torch.Tensor]
    version: int
    keeps: int = 0
    found_inf: torch.Tensor | None = None

    def __iter__(self) -> Iterator[tuple[Param, torch.Tensor]]:
        return zip(self.params, self.grads, strict=True)

    def select(self, positions: list[int]) -> "Active":
        """Only some of them."""
        params, grads = [self.params[i] for i in positions], [self.grads[i] for i in positions]
        locals_ = [self.locals[i] for i in positions]
        return Active(params, locals_, grads, self.version, self.keeps, self.found_inf)


class Collector:
    """Looks at the parameters' gradients in each step. The usual answers cost one pass over the parameters' list."""

    def __init__(self) -> None:
        self._active: Active | None = None
        self._seen_grads: list[weakref.ref[torch.Tensor] | None] = []
        self._seen_addresses: list[int] = []
        self._seen_places: object = None
        self._epoch = 0
        self._version = 0

    def forget(self) -> None:
        """The next gradients count as new ones."""
        self._active = None

    def collect(self, params: list[Param]) -> Active:
        """The parameters that have gradients. The object of the last step where nothing but numbers changed."""
        tensors = [p.tensor for p in params]
        grads = [t.grad for t in tensors]
        addresses = [local_of(t).data_ptr() for t in tensors]
        # The address of an empty tensor is 0: a gradient that is not there needs another number.
        addresses += [-1 if g is None else _address(local_of(g)) for g in grads]
        active = self._active
        if active is not None and addresses == self._seen_addresses and self._same_objects(grads):
            if not active.keeps:  # the same objects again: somebody keeps them, so may we
                active.keeps = self._epoch
                active.grads = _local_grads(params, grads)
            return active
        present = [p for p, g in zip(params, grads, strict=True) if g is not None]
        local_tensors, local_grads = [p.local for p in present], _local_grads(params, grads)
        self._seen_grads = [None if g is None else weakref.ref(g) for g in grads]
        self._seen_addresses = addresses
        self._epoch += 1
        places = (_places(local_tensors, absolute=True), _places(local_grads, absolute=False))
        if active is not None and present == active.params and places == self._seen_places:
            active.grads, active.keeps = local_grads, 0
            return active
        self._version += 1
        self._seen_places = places
        self._active = Active(present, local_tensors, local_grads, self._version)
        return self._active

    def _same_objects(self, grads: list[torch.Tensor | None]) -> bool:
        return all(g is (r and r()) for g, r in zip(grads, self._seen_grads, strict=True))


def _address(grad: torch.Tensor) -> int:
    """Where a gradient lies; a sparse one, which `Param.local_grad` refuses by name, lies nowhere."""
    return grad.data_ptr() if grad.layout is torch.strided else -1


def _local_grads(params: list[Param], grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
    pairs = zip(params, grads, strict=True)
    return [param.local_grad(grad).detach() for param, grad in pairs if grad is not None]


def _places(tensors: list[torch.Tensor], *, absolute: bool) -> list[object]:
    """Where and how tensors lie: in which storage (or, not absolute, which of them share one), and how in it."""
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    if not absolute:
        order = {pointer: i for i, pointer in reversed(list(enumerate(storages)))}
        storages = [order[pointer] for pointer in storages]
    return [(s, t.storage_offset(), t.dtype, t.stride()) for s, t in zip(storages, tensors, strict=True)]
