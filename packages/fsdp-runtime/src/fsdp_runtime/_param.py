"""One parameter: the fixed pair of objects that a module holds in turn.

          registered in the module                    memory
sharded   at rest, and whenever the optimizer looks   this rank's part, in the shard of the group's buffer
unsharded from unshard to reshard                     a view of the gathered buffer
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_shard import RaggedDTensor

from . import _torch_compat as compat
from ._mesh import OtherParallelism

GradHook = Callable[["ManagedParam", torch.Tensor], None]


@dataclass(frozen=True)
class Place:
    """Where a parameter is registered: `module.<attribute>`. A shared one is in several places."""

    module: nn.Module
    attribute: str


def _call_weakly(managed: "ManagedParam", hook: GradHook) -> Callable[[torch.Tensor], None]:
    """The hook without references: autograd holds it where the garbage collector does not see a cycle."""
    param, method = weakref.ref(managed), weakref.WeakMethod(hook)

    def call(tensor: torch.Tensor) -> None:
        alive, act = param(), method()
        if alive is not None and act is not None:
            act(alive, tensor)

    return call


class ManagedParam:
    """One parameter of a unit, however many modules share it.

    Attributes:
        name: in the unit; unique there.
        places: where it is registered.
        shape: of the plain tensor that this rank computes with.
        dtype: of the sharded parameter.
        other: how another parallelism had cut it, or None.
        sharded, unsharded: the pair; `unsharded` is None until the parameter has memory.
    """

    def __init__(
        self, name: str, places: list[Place], original: torch.Tensor, plain: torch.Tensor, other: Any
    ) -> None:
        self.name = name
        self.places = places
        self.shape = tuple(plain.shape)
        self.dtype = original.dtype
        self.other: OtherParallelism | None = other
        self.requires_grad = original.requires_grad
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter | None = None
        self._user_attributes = dict(original.__dict__)
        self.unsharded_view: torch.Tensor | None = None
        self._hook: GradHook | None = None
        self._example: torch.Tensor | None = plain

    def example(self) -> torch.Tensor:
        """What a block policy is shown: the parameter as it was given, later the sharded one."""
        if self._example is not None:
            return self._example
        if self.other is None:
            return self.sharded
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    # -- the pair ---------------------------------------------------------------------------------------------------

    def set_sharded(self, tensor: RaggedDTensor) -> None:
        """Make the sharded parameter, once; later calls give the same object other memory."""
        self._example = None  # its memory can go
        if not hasattr(self, "sharded"):
            self.sharded = nn.Parameter(tensor, requires_grad=self.requires_grad)
            self.sharded.__dict__.update(self._user_attributes)
        else:
            self.sharded.data = tensor
        self.dtype = tensor.dtype

    def set_unsharded(self, view: torch.Tensor, hook: GradHook) -> None:
        """Make the unsharded parameter on a view of the gathered buffer; `hook` gets it when its gradient is there."""
        self.unsharded_view = data = view
        if self.other is not None:
            other = self.other
            data = DTensor.from_local(
                view, other.mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride
            )
        self.unsharded = nn.Parameter(data, requires_grad=False)
        self.unsharded.__dict__.update(self._user_attributes)
        self._hook = hook
        self._follow_requires_grad(self.unsharded)

    def _follow_requires_grad(self, unsharded: nn.Parameter) -> None:
        unsharded.requires_grad_(self.sharded.requires_grad)
        if self._hook is not None and unsharded.requires_grad:
            unsharded.register_post_accumulate_grad_hook(_call_weakly(self, self._hook))
            self._hook = None

    def register_sharded(self) -> None:
        """Put the sharded parameter into the module."""
        for place in self.places:
            place.module._parameters[place.attribute] = self.sharded

    def register_unsharded(self) -> None:
        """Put the unsharded parameter into the module."""
        unsharded = self.unsharded
        assert unsharded is not None
        if unsharded.requires_grad is not self.sharded.requires_grad:
            self._follow_requires_grad(unsharded)
        for place in self.places:
            place.module._parameters[place.attribute] = unsharded

    def registered(self) -> torch.Tensor | None:
        """What the module holds now; None where it was taken out."""
        place = self.places[0]
        return place.module._parameters.get(place.attribute)

    # -- gradients --------------------------------------------------------------------------------------------------

    def take_grad(self) -> torch.Tensor | None:
        """The gradient that autograd left on the unsharded parameter, plain and dense; it is gone from there."""
        assert self.unsharded is not None
        grad, self.unsharded.grad = self.unsharded.grad, None
        if grad is None:
            return None
        if self.other is not None:
            grad = compat.local_of_dtensor_grad(grad, self.other.placements)
        return grad.to_dense() if grad.is_sparse else grad
