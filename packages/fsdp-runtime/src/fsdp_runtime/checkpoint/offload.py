"""`offload` and `reload`: move parameters, gradients and optimizer states to CPU memory and back.

One copy for each storage. The objects stay: parameters, views and states are the same after `reload`.

    parameters  their storages are emptied; the sharded parameters show NaN, and whatever gathers or saves them raises
    gradients   `.grad` is None meanwhile
    states      the optimizer has none meanwhile, and raises where it is asked for them
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DeviceLayer, device_layer
from ragged_shard import CPU, RaggedDTensor, is_cpu

from .._params.unit import Unit
from .._plan.group import wrap_local
from .._torch.tree import tensors_in
from .targets import units_of

_OFFLOADED = "are offloaded; call fsdp_runtime.reload(model) before they are used"


class HostCopy:
    """The bytes of one storage in CPU memory, page-locked if there is a device, while the storage is empty.

        send, free       after which the storage holds nothing
        allocate, fetch  after which it has its bytes again

    `send` and `fetch` copy on the current stream; `free` and `allocate` go to the memory pool of the current stream.
    Streams are ordered by the caller.
    """

    def __init__(self, storage: torch.UntypedStorage, layer: DeviceLayer) -> None:
        if not storage.resizable():
            raise RuntimeError(
                f"offload: {storage.nbytes()} bytes on {storage.device} cannot be freed, since they are shared with "
                "numpy or a file (tensor.numpy(), torch.load(mmap=True)); keep such memory out of what is offloaded"
            )
        self.storage, self._layer, self.nbytes = storage, layer, storage.nbytes()
        self._host: torch.Tensor | None = None

    def send(self) -> None:
        """Copy the bytes to the CPU."""
        if self._host is None:
            pinned = self._layer.asynchronous
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, device=CPU, pin_memory=pinned)
        self._host.copy_(self._bytes(), non_blocking=True)

    def free(self) -> None:
        """Empty the storage."""
        self._layer.resize(self.storage, 0)

    def allocate(self) -> None:
        """Give the storage memory, uninitialised."""
        self._layer.resize(self.storage, self.nbytes)

    def fetch(self) -> None:
        """Copy the bytes back."""
        assert self._host is not None
        self._bytes().copy_(self._host, non_blocking=True)

    def forget(self) -> None:
        """Drop the copy."""
        self._host = None

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that is a view of the storage."""
        assert self._host is not None
        flat = torch.empty(0, dtype=local.dtype)
        return flat.set_(self._host.untyped_storage(), local.storage_offset(), local.shape, local.stride())

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


def _copies_of(
    storages: Iterable[torch.UntypedStorage], layer: DeviceLayer, known: list[HostCopy]
) -> list[HostCopy]:
    """A host copy for each storage: of those that are known, or new."""
    by_storage = {copy.storage._cdata: copy for copy in known}
    return [by_storage.get(storage._cdata) or HostCopy(storage, layer) for storage in storages]


def _offload_all(copies: Iterable[HostCopy]) -> int:
    """Returns the bytes that were freed."""
    nbytes = 0
    for copy in copies:
        copy.send()
        copy.free()
        nbytes += copy.nbytes
    return nbytes


def _restore_all(copies: Iterable[HostCopy]) -> None:
    for copy in copies:
        copy.allocate()
        copy.fetch()
        copy.forget()


class _OffloadedDict(dict[Any, Any]):
    """Stands for an optimizer's state while that is offloaded."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "the optimizer's states are offloaded; call fsdp_runtime.reload(model, optimizer) before they are used"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = items = keys = values = pop = setdefault = update = copy = _refuse  # type: ignore[assignment]

    def __bool__(self) -> bool:
        self._refuse()


_gradients: "weakref.WeakKeyDictionary[Unit, list[_OffloadedGrad]]" = weakref.WeakKeyDictionary()
_parameters: "weakref.WeakKeyDictionary[Unit, list[HostCopy]]" = weakref.WeakKeyDictionary()
_states: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _OffloadedStates]" = weakref.WeakKeyDictionary()
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def offload(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    parameters: bool = True,
    gradients: bool = True,
    states: bool = True,
) -> int:
    """Move a sharded model's shards, gradients and optimizer states to CPU memory, and free them on the device.

    One copy for each storage (a group's shard, its gradients; an optimizer's states as it allocates them), to
    page-locked memory where there is a device, which parameters and states keep for the next time. Communicates
    nothing; waits for the copies. Freed memory is torch's: call `torch.accelerator.empty_cache()` for other processes
    to have it. What is offloaded already stays so; so do shards that are kept in CPU memory anyway, parameters that no
    unit has, and buffers.

    Args:
        model: in which no forward or backward is under way.
        optimizer: one, several or none.
        parameters, gradients, states: what to move.

    Returns:
        the bytes freed.

    Raises:
        RuntimeError: gradients of a unit wait for their reduction, or a collective of it failed; by the unit's name.
    """
    units, optimizers = units_of(model), _as_list(optimizer)
    waiting = [unit.name for unit in units if any(group.gradients.written for group in unit.groups)]
    for unit in units:
        for group in unit.groups:
            if group.buffer is not None and group.buffer.retired:
                raise RuntimeError(
                    f"offload: a collective of {group.name} failed, and other ranks may still use its shard's memory, "
                    "which therefore cannot be freed"
                )
    if gradients and waiting:
        raise RuntimeError(
            f"offload: gradients of {waiting} wait for their reduction; finish the accumulation, or call with "
            "gradients=False"
        )
    freed, layers = 0, {unit.data.device: device_layer(unit.data.device) for unit in units}
    if parameters:
        freed += sum(_offload_parameters(unit) for unit in units)
    if gradients:
        freed += sum(_offload_gradients(unit) for unit in units)
    for each in optimizers if states else ():
        freed += _states.setdefault(each, _OffloadedStates(each)).offload(
            [unit.data.device for unit in units]
        )
    for layer in layers.values():
        layer.synchronize()
    return freed


def reload(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    parameters: bool = True,
    gradients: bool = True,
    states: bool = True,
) -> None:
    """Bring back what `offload` moved, bit for bit, into the same objects; what was not moved is left alone.

    One copy for each storage, on the current stream; communicates nothing and does not wait.

    Raises:
        RuntimeError: a parameter has a gradient since, in addition to the offloaded one.
    """
    units = units_of(model)
    if gradients:
        _restore_gradients(units)
    if parameters:
        for unit in units:
            _restore_parameters(unit)
    for each in _as_list(optimizer) if states else ():
        if each in _states:
            _states[each].restore()


def _as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


# -- parameters --------------------------------------------------------------------------------------------------------


def _offload_parameters(unit: Unit) -> int:
    if unit.closed == _OFFLOADED:
        return 0
    unit.check_open()
    unit.reshard()
    unit.adopt()
    copies: list[HostCopy] = []
    moving = [group for group in unit.groups if group.buffer is not None and group.plan.offload is None]
    for group in moving:
        assert group.buffer is not None
        shard = group.buffer.shard
        storages = _storages(shard, group.buffer.device)
        copies += _copies_of(storages, group.buffer.layer, _parameters.get(unit, []))
    for group in moving:
        for param in group.params:
            sharded: Any = param.sharded.detach()
            plain: Any = param.plain(sharded)
            empty = group.without_memory(plain.local)
            param.set_sharded(sharded.with_local(param.wrapper.wrap(empty)))
    unit.closed = _OFFLOADED
    _parameters[unit] = copies
    return _offload_all(copies)


def _restore_parameters(unit: Unit) -> None:
    if unit.closed != _OFFLOADED:
        return
    _restore_all(_parameters[unit])
    unit.closed = ""
    for group in unit.groups:
        if group.buffer is not None and group.plan.offload is None:
            for param, plan in zip(group.params, group.plan.params, strict=True):
                local = group.buffer.local_views[param.name]
                param.set_sharded(wrap_local(plan, param.wrapper.wrap(local)))


# -- gradients ---------------------------------------------------------------------------------------------------------


class _OffloadedGrad(NamedTuple):
    """A gradient while it is offloaded."""

    param: Any
    grad: torch.Tensor
    copies: list[HostCopy]


def _offload_gradients(unit: Unit) -> int:
    copies: dict[int, HostCopy] = {}  # gradients of a group share a storage
    device = unit.data.device
    for group in unit.groups:
        for param in group.params:
            sharded: Any = param.sharded
            if sharded.grad is None or group.plan.offload is not None:
                continue
            used = []
            for storage in _storages(_plain_of(sharded.grad), device):
                if storage._cdata not in copies:
                    copies[storage._cdata] = HostCopy(storage, device_layer(device))
                used.append(copies[storage._cdata])
            _gradients.setdefault(unit, []).append(_OffloadedGrad(sharded, sharded.grad, used))
            sharded.grad = None
    return _offload_all(copies.values())


def _restore_gradients(units: list[Unit]) -> None:
    offloaded = [gradient for unit in units for gradient in _gradients.get(unit, [])]
    if any(gradient.param.grad is not None for gradient in offloaded):
        raise RuntimeError(
            "reload: parameters have gradients since offload, in addition to the offloaded ones; call "
            "optimizer.zero_grad() first, or reload with gradients=False"
        )
    for unit in units:
        _gradients.pop(unit, None)
    for gradient in offloaded:
        gradient.param.grad = gradient.grad
    _restore_all({id(copy): copy for gradient in offloaded for copy in gradient.copies}.values())


# -- optimizer states --------------------------------------------------------------------------------------------------


class _OffloadedStates:
    """The states of an optimizer while they are offloaded, and their page-locked memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._state: Any = None
        self._copies: list[HostCopy] = []
        self._hooks: list[Any] = []

    def offload(self, devices: list[torch.device]) -> int:
        """Move them; returns how many bytes, 0 if they are offloaded already."""
        optimizer = self._optimizer()
        if optimizer is None or self._hooks:
            return 0
        if hasattr(optimizer, "synchronize"):  # block_optim's may work on states next to the step
            optimizer.synchronize()
        copies: dict[int, HostCopy] = {}
        for tensor in tensors_in(list(optimizer.state.values())):
            if is_cpu(tensor.device) and tensor.device not in devices:
                continue
            layer = device_layer(tensor.device)
            for copy in _copies_of(_storages(_plain_of(tensor), tensor.device), layer, self._copies):
                copies.setdefault(copy.storage._cdata, copy)
        self._copies = list(copies.values())
        refuse: Callable[..., None] = _OffloadedDict()._refuse
        self._hooks = [
            optimizer.register_step_pre_hook(refuse),
            optimizer.register_state_dict_pre_hook(refuse),
            optimizer.register_load_state_dict_pre_hook(refuse),
        ]
        self._state, optimizer.state = optimizer.state, _OffloadedDict()  # type: ignore[assignment]
        return _offload_all(self._copies)

    def restore(self) -> None:
        """Move them back."""
        optimizer = self._optimizer()
        if optimizer is None or not self._hooks:
            return
        _restore_all(self._copies)
        optimizer.state, self._state = self._state, None
        while self._hooks:
            self._hooks.pop().remove()


def _plain_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's values on this rank."""
    if isinstance(tensor, RaggedDTensor):
        return _plain_of(tensor.local)
    if isinstance(tensor, DTensor):
        return _plain_of(tensor.to_local())
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [plain for name in names for plain in _plain_of(getattr(tensor, name))]
    return [tensor]


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages of tensors that have memory on a device, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == device}
    return [storage for storage in storages.values() if storage.nbytes()]
