"""Collects the gradients of a step, and detects whether their memory has moved since the last one; divides them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from block_optim.core._torch_compat import foreach_copy_, foreach_div_, local_of
from block_optim.core.params import Param, same_objects


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
            from these may be kept while the version stays, gradients and views of them excepted.
    """

    params: list[Param]
    locals: list[torch.Tensor]
    grads: list[torch.Tensor]
    version: int

    def __iter__(self) -> Iterator[tuple[Param, torch.Tensor]]:
        return zip(self.params, self.grads, strict=True)

    def select(self, positions: list[int]) -> "StepGradients":
        """The parameters at these positions, with their gradients."""
        params, grads = [self.params[i] for i in positions], [self.grads[i] for i in positions]
        locals_ = [self.locals[i] for i in positions]
        return StepGradients(params, locals_, grads, self.version)


class Collector:
    """Collects the parameters' gradients in each step, and numbers their layouts in memory."""

    def __init__(self) -> None:
        self._addresses: list[int] | None = None  # of the parameters
        self._empty: list[torch.Tensor] = []  # locals without elements, and so without an address
        self._layout: object = None
        self._version = 0

    def forget(self) -> None:
        """Treat the next gradients as new ones."""
        self._addresses = None

    def collect(self, params: list[Param]) -> StepGradients:
        """The parameters that have gradients."""
        tensors = [p.tensor for p in params]
        grads = [t.grad for t in tensors]
        own = list(map(local_of, tensors))
        addresses = list(map(torch.Tensor.data_ptr, own))
        empty = [t for t, address in zip(own, addresses, strict=True) if not address]
        if addresses != self._addresses or not same_objects(empty, self._empty):
            # None until all fit: on every rank of a parameter, with or without elements of it.
            self._addresses = None
            for param in params:
                param.check_layout()
            self._addresses, self._empty, self._layout = addresses, empty, None
        present = [i for i, g in enumerate(grads) if g is not None]
        active = [params[i] for i in present]
        local_grads = [p.local_grad(g) for p, g in zip(params, grads, strict=True) if g is not None]
        local_grads = [g.detach() if g.requires_grad else g for g in local_grads]
        layout = (present, _places(local_grads))
        if layout != self._layout:
            self._layout = layout
            self._version += 2  # odd ones are for `unscaled`
        return StepGradients(active, [own[i].detach() for i in present], local_grads, self._version)


def unscaled(active: StepGradients, divisor: float) -> StepGradients:
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


def _places(grads: list[torch.Tensor]) -> list[object]:
    """Layout of gradients: which of them share a storage, at which offsets, in which strides."""
    offsets = [g.storage_offset() for g in grads]
    storages = [g.data_ptr() - o * g.itemsize for g, o in zip(grads, offsets, strict=True)]
    first = {storage: i for i, storage in reversed(list(enumerate(storages)))}
    return [(first[s], o, g.dtype, g.stride()) for s, o, g in zip(storages, offsets, grads, strict=True)]
