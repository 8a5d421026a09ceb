"""One parameter: the fixed pair of objects that a module holds in turn.

          registered in the module                    memory
sharded   at rest, and whenever the optimizer looks   this rank's slice, in the shard of the group's buffer
unsharded from unshard to reshard                     a view of the gathered memory
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ragged_shard import RaggedDTensor

from .. import _torch_compat as compat
from .mesh import DataMesh, OtherParallelism

G = TypeVar("G")  # the group; this file knows nothing of it
PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"  # of tensor subclasses
# Makes the hook that autograd calls with the unsharded parameter after accumulating its gradient.
MakeHook = Callable[["ManagedParam[Any]"], Callable[[torch.Tensor], None]]


@dataclass(frozen=True)
class Place:
    """A place where a parameter is registered: `module.<attribute>`. A shared one is in several places."""

    module: nn.Module
    attribute: str


class _OwnSetattr:
    """A module's parameters, which its own `__setattr__` registers: it may keep them elsewhere too, as `nn.RNNBase`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get(self, name: str) -> Any:
        """The registered parameter; None if there is none."""
        return self._module._parameters.get(name)

    def __setitem__(self, name: str, param: nn.Parameter) -> None:
        setattr(self._module, name, param)


Slots = dict[str, Any] | _OwnSetattr


def slots_of(module: nn.Module) -> Slots:
    """Where parameters of a module are registered, by name."""
    plain = type(module).__setattr__ is nn.Module.__setattr__
    return cast(Slots, module._parameters) if plain else _OwnSetattr(module)


# By id of a tensor; it may be of one that is gone, so `managed_of` compares.
_managed: "weakref.WeakValueDictionary[int, ManagedParam[Any]]" = weakref.WeakValueDictionary()


def managed_of(tensor: torch.Tensor) -> "ManagedParam[Any] | None":
    """The parameter of a unit that a tensor is: sharded, unsharded, or the original; None for any other."""
    managed = _managed.get(id(tensor))
    if managed is None or tensor is managed.sharded or tensor is managed.unsharded:
        return managed
    return managed if managed.original() is tensor else None


class Wrapper:
    """How a local tensor is made of plain values: it is the plain tensor. Subclasses wrap it in a tensor subclass."""

    attributes: frozenset[str] = frozenset()  # Python attributes that `wrap` sets, which are not the user's

    def wrap(self, plain: torch.Tensor) -> torch.Tensor:
        """The local tensor around plain values, whose memory it shares."""
        return plain

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain values inside; a plain tensor itself."""
        return tensor


PLAIN = Wrapper()


def local_of(sharded: torch.Tensor) -> torch.Tensor:
    """A sharded parameter's local tensor, the very object."""
    assert isinstance(sharded, RaggedDTensor)
    return sharded.local


@dataclass(frozen=True)
class Settings:
    """Settings of a parameter object that users may change, apart from its values."""

    requires_grad: bool
    attributes: dict[str, Any]
    num_hooks: int  # post-accumulate hooks

    @staticmethod
    def of(param: nn.Parameter) -> "Settings":
        """The current settings of a parameter."""
        hooks = compat.post_accumulate_hooks(param)
        return Settings(param.requires_grad, dict(param.__dict__), len(hooks or ()))


class ManagedParam(Generic[G]):
    """One parameter of a unit, however many modules share it."""

    precision: MixedPrecisionPolicy  # its mixed precision; set by `find_kinds`, as the next two
    # kind, selected: the class of its group, and whether a quantization policy selects it
    kind: type[G]
    selected: bool
    # group, index: the group that it belongs to, and its number there; set by the group
    group: G
    index: int
    # sharded, unsharded: the pair; `unsharded` is None until the parameter has memory
    sharded: nn.Parameter
    local: torch.Tensor  # the sharded parameter's local tensor, as it was made

    def __init__(
        self,
        name: str,
        places: list[Place],
        original: torch.Tensor,
        shape: tuple[int, ...],
        data: DataMesh,
        other: OtherParallelism | None,
        example: torch.Tensor,
        wrapper: Wrapper = PLAIN,
    ) -> None:
        # its name in the group's layout: the one in the unit that was made with the group
        self.name = self.key = name  # in the unit that has its group; unique there
        self.places: list[Place] = []  # where it is registered
        self.slots: list[tuple[Slots, str]] = []  # what holds it, with its key in each
        self.add_places(places)
        self.shape = shape  # of the plain tensor that this rank computes with
        self.data = data  # the mesh that cuts it
        self.dtype = original.dtype  # of the sharded parameter
        self.digest: int | None = None  # of the values that this rank gave `fully_shard`; None: not known
        # of its gradient, where the user has set one; None: the parameter's
        self.grad_dtype: torch.dtype | None = None
        if (
            getattr(original, "grad_dtype", original.dtype) is not original.dtype
        ):  # torch 2.11 may not have it
            self.grad_dtype = checked_grad_dtype(name, original)
        self.other = other  # how another parallelism had cut it, or None
        self.wrapper = wrapper  # how its local tensor is made of plain values
        self.requires_grad = original.requires_grad
        self.unsharded: nn.Parameter | None = None
        self._view: torch.Tensor | None = None
        self._user_attributes = dict(original.__dict__)
        for key in wrapper.attributes:
            self._user_attributes.pop(key, None)
        self._make_hook: MakeHook | None = None
        # hooks that users have registered before `fully_shard`, as they are in the dictionaries of the original
        self._gradient_hooks = compat.gradient_hooks(original)
        self._post_accumulate_hooks = compat.post_accumulate_hooks(original)
        # the original parameter, which policies get; None as soon as there is a sharded one
        self.example: Any = example
        self.original = weakref.ref(original)

    def add_places(self, places: Iterable[Place]) -> None:
        """Note places where it is registered too."""
        for place in places:
            self.places.append(place)
            self.slots.append((slots_of(place.module), place.attribute))

    def plain(self, value: torch.Tensor) -> torch.Tensor:
        """A value of this parameter, or of its local tensor, without the tensor subclass around it."""
        if isinstance(value, RaggedDTensor):
            inner = self.wrapper.unwrap(value.local)
            return value if inner is value.local else value.with_local(inner)
        return self.wrapper.unwrap(value)

    def plain_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's plain tensor of a gradient as autograd made it. May communicate, see `local_of_dtensor_grad`."""
        if self.other is not None:
            grad = compat.local_of_dtensor_grad(grad, self.other.placements)
        return self.plain(grad)

    # -- the pair ---------------------------------------------------------------------------------------------------

    def set_sharded(self, tensor: RaggedDTensor) -> None:
        """Make the sharded parameter, once; later calls give the same object other memory."""
        self.example = None  # its memory can go
        if hasattr(self, "sharded"):
            self.sharded.data = tensor
        else:
            self.sharded = nn.Parameter(tensor, requires_grad=self.requires_grad)
            self.sharded.__dict__.update(self._user_attributes)
            if self.grad_dtype is not None:
                self.sharded.grad_dtype = self.grad_dtype
            _managed[id(self.sharded)] = self
            if (original := self.original()) is not None:
                _managed[id(original)] = self
        self.dtype = tensor.dtype
        self.local = self.sharded.local  # type: ignore[attr-defined]

    def adopt_sharded(self, param: nn.Parameter) -> None:
        """Use another object, which a user has registered, as the sharded parameter."""
        if self.grad_dtype is not None:
            param.grad_dtype = self.grad_dtype
        # The original's hooks went with it, as in one process.
        self._gradient_hooks = self._post_accumulate_hooks = None
        self.sharded = param
        _managed[id(param)] = self
        for slots, attribute in self.slots:
            if slots.get(attribute) is not self.unsharded:
                slots[attribute] = param

    def renew_sharded(self, tensor: RaggedDTensor) -> None:
        """Make another object the sharded parameter, with the same attributes."""
        param = nn.Parameter(tensor, requires_grad=self.sharded.requires_grad)
        param.__dict__.update(self._user_attributes)
        self.adopt_sharded(param)

    @property
    def has_hooks(self) -> bool:
        """Whether users have hooks on its gradient."""
        sharded = self.sharded
        before = self._gradient_hooks or self._post_accumulate_hooks
        return bool(before or compat.gradient_hooks(sharded) or compat.post_accumulate_hooks(sharded))

    @property
    def gradient_hooks(self) -> list[Callable[[torch.Tensor], Any]]:
        """The users' hooks that may change the reduced gradient, in the order of their registration."""
        own = compat.gradient_hooks(self.sharded)
        return [*(self._gradient_hooks or {}).values(), *(own or {}).values()]

    @property
    def post_accumulate_hooks(self) -> list[Callable[[torch.Tensor], Any]]:
        """The users' hooks that are called when `.grad` of the sharded parameter is set."""
        own = compat.post_accumulate_hooks(self.sharded)
        return [*(self._post_accumulate_hooks or {}).values(), *(own or {}).values()]

    def set_unsharded(
        self, view: torch.Tensor, make_hook: MakeHook, reduce_dtype: torch.dtype | None = None
    ) -> None:
        """Make the unsharded parameter on a view of the gathered memory, with a hook for its gradient.

        Does nothing if it is on this view already. Where the user has set a `grad_dtype`, autograd adds up in the dtype
        of the reduction.
        """
        if self._view is view:
            return
        self._view = data = view
        if self.other is not None:
            other = self.other
            data = DTensor.from_local(
                view, other.mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride
            )
        self.unsharded = nn.Parameter(data, requires_grad=False)
        self.unsharded.__dict__.update(self._user_attributes)
        if self.grad_dtype is not None:
            self.unsharded.grad_dtype = reduce_dtype
        _managed[id(self.unsharded)] = self
        self._make_hook = make_hook
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameter."""
        unsharded = self.unsharded
        assert unsharded is not None
        self._trained = self.sharded.requires_grad
        unsharded.requires_grad_(self._trained)
        if self._make_hook is not None and unsharded.requires_grad:
            unsharded.register_post_accumulate_grad_hook(self._make_hook(self))
            self._make_hook = None

    def follow_attributes(self, before: Settings) -> None:
        """Copy attributes that were set on the unsharded parameter, or removed, since `before` to the sharded one."""
        assert self.unsharded is not None
        after = self.unsharded.__dict__
        for key in before.attributes.keys() - after.keys():
            self.sharded.__dict__.pop(key, None)
        for key, value in after.items():
            if key not in before.attributes or before.attributes[key] is not value:
                self.sharded.__dict__[key] = value

    def lost_changes(self, before: Settings) -> str:
        """Changes of the unsharded parameter since `before` that the sharded one cannot follow; empty: none."""
        unsharded = self.unsharded
        assert unsharded is not None
        changes = []
        if self.has_other_data:
            changes.append("its data was replaced")
        if unsharded.grad is not None:
            changes.append("its grad was set")
        if Settings.of(unsharded).num_hooks > before.num_hooks:
            changes.append("a post-accumulate hook was registered on it")
        return " and ".join(changes)

    def undo_changes(self) -> None:
        """Undo changes of the unsharded `data`, `grad` and `requires_grad` that the sharded one does not follow."""
        assert self.unsharded is not None
        self.unsharded.grad = None
        if self.unsharded.requires_grad is not self._trained:
            self.unsharded.requires_grad_(self._trained)
        if self.has_other_data:
            self.unsharded.data = cast(torch.Tensor, self._view)

    def restore(self) -> None:
        """Undo changes after a failure, except of `requires_grad`, which the next gather takes from the sharded one."""
        if self.unsharded is not None:
            if self.unsharded.requires_grad is not self._trained:
                self.sharded.requires_grad_(self.unsharded.requires_grad)
            self.undo_changes()

    @property
    def has_other_data(self) -> bool:
        """Whether the data of the unsharded parameter was replaced."""
        if self._view is None or type(self.unsharded) is not nn.Parameter:
            return False
        return bool(self.unsharded.untyped_storage()._cdata != self._view.untyped_storage()._cdata)

    @property
    def registered_dtype(self) -> torch.dtype:
        """The dtype of the module's current parameter."""
        registered = self.registered()
        return self.dtype if registered is None or registered is self.unsharded else registered.dtype

    def registered(self) -> torch.Tensor | None:
        """The module's current parameter, or None if it was removed."""
        slots, attribute = self.slots[0]
        return slots.get(attribute)


def checked_grad_dtype(name: str, param: torch.Tensor) -> torch.dtype:
    """The `grad_dtype` that was set on a parameter; ValueError if it is None, which lets gradients have any dtype."""
    if param.grad_dtype is None:
        raise ValueError(
            f"parameter {name} has grad_dtype None, any dtype; fully_shard allocates gradients of one: set it"
        )
    return param.grad_dtype


def refuse_patched(name: str, local: torch.Tensor) -> None:
    """Raise NotImplementedError if all-gather methods were set on a local tensor, which would not be called."""
    if PRE in local.__dict__ or POST in local.__dict__:
        raise NotImplementedError(
            f"parameter {name}: its local tensor was given {PRE} or {POST} after fully_shard, which would not be "
            "called; give fully_shard a tensor subclass that has both"
        )
