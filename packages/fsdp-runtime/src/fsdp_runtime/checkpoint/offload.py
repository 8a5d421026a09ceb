"""`offload` and `reload`: move parameters, gradients and optimizer states to CPU memory and back.

One copy for each storage. The objects stay: parameters, views and states are the same after `reload`.

    parameters  their storages are emptied; the sharded parameters show NaN, and whatever gathers or saves them raises
    gradients   `.grad` is None meanwhile
    states      the optimizer has none meanwhile; its step and its state dict raise
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_shard import RaggedDTensor
from ragged_shard.device import CPU, device_layer, is_cpu

from .._params.unit import Unit
from .._plan.group import wrap_local
from .._torch.tree import tensors_in
from .targets import units_of

_OFFLOADED = "are offloaded; call fsdp_runtime.reload(model) before they are used"
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
Copies = list[tuple[torch.UntypedStorage, torch.Tensor]]  # emptied storages, and their bytes in CPU memory
_parameters: weakref.WeakKeyDictionary[Unit, Copies] = weakref.WeakKeyDictionary()
_gradients: weakref.WeakKeyDictionary[Unit, tuple[list[tuple[Any, Any]], Copies]] = (
    weakref.WeakKeyDictionary()
)
_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, list[Any], Copies]] = (
    weakref.WeakKeyDictionary()
)


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
    page-locked memory where there is a device. Communicates nothing; waits for the copies. Freed memory is torch's:
    call `torch.accelerator.empty_cache()` for other processes to have it. What is offloaded already stays so; so do
    shards that are kept in CPU memory anyway, parameters that no unit has, and buffers.

    Args:
        model: in which no forward or backward is under way.
        optimizer: one, several or none.
        parameters, gradients, states: what to move.

    Returns:
        the bytes freed.

    Raises:
        RuntimeError: gradients of a unit wait for their reduction, a collective of it failed, or memory of parameters
            or gradients is shared with numpy or a file.
    """
    units, freed = units_of(model), 0
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
    for unit in units:
        freed += _offload_parameters(unit) if parameters else 0
        freed += _offload_gradients(unit) if gradients else 0
    devices = {unit.data.device for unit in units}
    for each in _as_list(optimizer) if states else ():
        freed += _offload_states(each, devices)
    for device in devices:
        device_layer(device).synchronize()
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
    kept = [pair for unit in units if gradients for pair in _gradients.get(unit, ([], []))[0]]
    if any(param.grad is not None for param, _ in kept):
        raise RuntimeError(
            "reload: parameters have gradients since offload, in addition to the offloaded ones; call "
            "optimizer.zero_grad() first, or reload with gradients=False"
        )
    for unit in units:
        if gradients:
            _restore(_gradients.pop(unit, ([], []))[1])
        if parameters and unit.closed == _OFFLOADED:
            _restore_parameters(unit)
    for param, grad in kept:
        param.grad = grad
    for each in _as_list(optimizer) if states else ():
        if each in _states:
            each.state, hooks, copies = _states.pop(each)
            _restore(copies)
            for hook in hooks:
                hook.remove()


def _as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _copied(tensors: Iterable[torch.Tensor], devices: Iterable[torch.device]) -> Copies:
    """Copies of the storages that tensors have on these devices, under way on the current stream; then `_free` them."""
    storages = {
        plain.untyped_storage().data_ptr(): plain.untyped_storage()
        for tensor in tensors
        for plain in _plain_of(tensor)
        if plain.device in devices and plain.untyped_storage().nbytes()
    }
    copies = []
    for storage in storages.values():
        if not storage.resizable():
            raise RuntimeError(
                f"offload: {storage.nbytes()} bytes on {storage.device} cannot be freed, since they are shared with "
                "numpy or a file (tensor.numpy(), torch.load(mmap=True)); keep such memory out of what is offloaded"
            )
        pinned = device_layer(storage.device).asynchronous
        copies.append(
            (storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned, device=CPU))
        )
    for storage, host in copies:
        host.copy_(_bytes_of(storage), non_blocking=True)
    return copies


def _free(copies: Copies) -> int:
    """Empty the storages; returns the bytes that were freed."""
    for storage, _ in copies:
        device_layer(storage.device).resize(storage, 0)
    return sum(host.nbytes for _, host in copies)


def _restore(copies: Copies) -> None:
    for storage, host in copies:
        device_layer(storage.device).resize(storage, host.nbytes)
        _bytes_of(storage).copy_(host, non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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


def _is_in_a_file(plain: torch.Tensor) -> bool:
    return is_cpu(plain.device) and not plain.untyped_storage().resizable()


def _offload_parameters(unit: Unit) -> int:
    if unit.closed == _OFFLOADED:
        return 0
    unit.check_open()
    unit.reshard()
    unit.adopt()
    moving = [group for group in unit.groups if group.buffer is not None and group.plan.offload is None]
    shards = [shard for group in moving if group.buffer is not None for shard in group.buffer.shard]
    copies = _copied(shards, [unit.data.device])
    for group in moving:
        for param in group.params:
            sharded: Any = param.sharded.detach()
            plain: Any = param.plain(sharded)
            empty = group.without_memory(plain.local)
            param.set_sharded(sharded.with_local(param.wrapper.wrap(empty)))
    unit.closed, _parameters[unit] = _OFFLOADED, copies
    return _free(copies)


def _restore_parameters(unit: Unit) -> None:
    _restore(_parameters.pop(unit))
    unit.closed = ""
    for group in unit.groups:
        if group.buffer is not None and group.plan.offload is None:
            for param, plan in zip(group.params, group.plan.params, strict=True):
                local = group.buffer.local_views[param.name]
                param.set_sharded(wrap_local(plan, param.wrapper.wrap(local)))


def _offload_gradients(unit: Unit) -> int:
    groups = [group for group in unit.groups if group.plan.offload is None]
    params = [param.sharded for group in groups for param in group.params if param.sharded.grad is not None]
    if params and unit in _gradients:
        raise RuntimeError(
            f"offload: parameters of {unit.name} have gradients since the last offload, in addition to the offloaded "
            "ones; call optimizer.zero_grad() first, or offload with gradients=False"
        )
    moved = [(param, param.grad) for param in params]
    copies = _copied((grad for _, grad in moved if grad is not None), [unit.data.device])
    for param in params:
        param.grad = None
    if moved:
        _gradients[unit] = moved, copies
    return _free(copies)


def _offload_states(optimizer: torch.optim.Optimizer, devices: set[torch.device]) -> int:
    if optimizer in _states:
        return 0
    tensors = list(tensors_in(list(optimizer.state.values())))
    kept = {tensor.device for tensor in tensors if not is_cpu(tensor.device)} | devices
    # States that torch.load made for a CPU are in the file's memory, which only their end frees: they stay.
    copies = _copied((plain for one in tensors for plain in _plain_of(one) if not _is_in_a_file(plain)), kept)
    hooks = [
        optimizer.register_step_pre_hook(_refuse),
        optimizer.register_state_dict_pre_hook(_refuse),
        optimizer.register_load_state_dict_pre_hook(_refuse),
    ]
    _states[optimizer] = optimizer.state, hooks, copies
    optimizer.state = defaultdict(dict)
    return _free(copies)


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError(
        "the optimizer's states are offloaded; call fsdp_runtime.reload(model, optimizer) before they are used"
    )
