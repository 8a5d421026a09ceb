"""`offload` and `reload`: move parameters, gradients and optimizer states to CPU memory and back.

One copy for each storage. The objects stay: parameters, views and states are the same after `reload`.

    parameters  their storages are emptied; the sharded parameters show NaN, and gathering or saving them raises
    gradients   `.grad` is None meanwhile
    states      the optimizer has none meanwhile; its step and its state dict raise
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ragged_shard.device import CPU, device_layer

from .._params.unit import Param, Unit
from .._schedule.model import member_of
from .._torch.tree import local_tensor, tensors_in
from .targets import units_of

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
Copies = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]  # emptied storages, each with its copy
# By owner, a unit or an optimizer: the copies, and a function that shows its tensors again, and must not refer to it.
Moved = WeakKeyDictionary[Any, tuple[Copies, Callable[[Any], None]]]
_parameters, _gradients, _states = Moved(), Moved(), Moved()


def offload(
    model: nn.Module, optimizer: Optimizers = None, *, parameters: bool = True, gradients: bool = True
) -> int:
    """Move a sharded model's shards, gradients and optimizer states to CPU memory, and free them on the device.

    One copy for each storage (a group's shard, its gradients; an optimizer's states as it allocates them), to
    page-locked memory where there is a device. Communicates nothing; waits for the copies. Freed memory is torch's:
    call `torch.accelerator.empty_cache()` for other processes to have it. Not moved: offloaded tensors, shards that are
    kept in CPU memory anyway, parameters that no unit has, buffers, and memory that numpy or a mapped file has.

    Args:
        model: in which no forward or backward is under way; a backward that raised is cleared as by `reset_iter_state`.
        optimizer: whose states are moved: one, several or none.
        parameters, gradients: whether to move them.

    Returns the bytes freed. Raises RuntimeError if gradients of a unit wait for their reduction, or were made since the
    last `offload`, or a collective of a unit failed.
    """
    for passes in {member.passes for module in model.modules() if (member := member_of(module))}:
        passes.forget_failed_backward()
    units = units_of(model)
    for group in (group for unit in units for group in unit.groups):
        if group.buffer is not None and group.buffer.retired:
            raise RuntimeError(
                f"offload: a collective of {group.name} failed, and other ranks may still use its shard's memory, "
                "which therefore cannot be freed"
            )
    if gradients:
        waiting = [unit.name for unit in units if any(group.gradients.waiting for group in unit.groups)]
        if waiting:
            raise RuntimeError(
                f"offload: gradients of {waiting} wait for their reduction; finish the accumulation (a backward after "
                "set_is_last_backward(True)), or call with gradients=False"
            )
        _check_gradients(units, "offload")
    devices, freed = {unit.data.device for unit in units}, 0
    for unit in units:
        freed += _offload_parameters(unit) if parameters and unit not in _parameters else 0
        freed += _offload_gradients(unit) if gradients and unit not in _gradients else 0
    for each in _as_list(optimizer):
        freed += _offload_states(each, devices) if each not in _states else 0
    for device in devices:
        device_layer(device).synchronize()
    return freed


def reload(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Bring back tensors that `offload` moved, bit for bit, into the same objects; states if the optimizer is given.

    One copy for each storage, on the current stream; communicates nothing and does not wait.

    Raises:
        RuntimeError: gradients of a unit were made since, in addition to the offloaded ones.
    """
    units = units_of(model)
    _check_gradients(units, "reload")
    for owner in (*units, *_as_list(optimizer)):
        for moved in (_parameters, _gradients, _states):
            if owner in moved:
                copies, show = moved.pop(owner)
                for storage, host in copies:
                    device_layer(storage.device).resize(storage, host.nbytes())
                    storage.copy_(host, non_blocking=True)
                show(owner)


def _check_gradients(units: list[Unit], caller: str) -> None:
    for unit in units:
        if unit in _gradients and any(param.sharded.grad is not None for param in unit.params):
            raise RuntimeError(
                f"{caller}: parameters of {unit.name} have gradients since the last offload, in addition to the "
                "offloaded ones; call optimizer.zero_grad() first"
            )


def _as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())


def _move(moved: Moved, owner: Any, tensors: Iterable[torch.Tensor], show: Callable[[Any], None]) -> int:
    """Copy the storages of an owner's tensors on the current stream, and empty them; returns the bytes."""
    plain = [each.untyped_storage() for tensor in tensors for each in _plain_of(tensor)]
    storages, copies = {storage.data_ptr(): storage for storage in plain}, []
    for storage in storages.values():
        if storage.nbytes() and storage.resizable():
            pinned = device_layer(storage.device).asynchronous
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned, device=CPU)
            copies.append((storage, host.untyped_storage().copy_(storage, non_blocking=True)))
    for storage, _ in copies:  # once all are copied: an allocation may fail
        device_layer(storage.device).resize(storage, 0)
    moved[owner] = copies, show
    return sum(host.nbytes() for _, host in copies)


def _plain_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's values on this rank."""
    local: Any = local_tensor(tensor)
    names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
    return [plain for name in names for plain in _plain_of(getattr(local, name))] or [local]


def _params_on_device(unit: Unit) -> list[Param]:
    """Parameters with memory that is not kept on the CPU anyway."""
    groups = [group for group in unit.groups if group.buffer is not None and group.plan.offload is None]
    return [param for group in groups for param in group.params]


def _offload_parameters(unit: Unit) -> int:
    unit.check_open()
    unit.reshard()
    unit.adopt()
    params = _params_on_device(unit)
    buffers = {param.group.buffer for param in params}
    shards = [flat for buffer in buffers if buffer is not None for flat in buffer.shard]
    freed = _move(_parameters, unit, shards, _show_parameters)
    unit.closed = "are offloaded; call fsdp_runtime.reload(model) before they are used"
    for param in params:
        _set_local(param, param.group.without_memory(local_tensor(param.plain(param.sharded.detach()))))
    return freed


def _show_parameters(unit: Unit) -> None:
    unit.closed = ""
    for param in _params_on_device(unit):
        assert param.group.buffer is not None
        _set_local(param, param.group.buffer.local_views[param.key])


def _set_local(param: Param, local: torch.Tensor) -> None:
    sharded: Any = param.sharded.detach()
    param.set_sharded(sharded.with_local(param.wrapper.wrap(local)))


def _offload_gradients(unit: Unit) -> int:
    pairs = [(param.sharded, param.sharded.grad) for param in _params_on_device(unit)]
    grads = [grad for _, grad in pairs if grad is not None]
    if not grads:
        return 0

    def show(_: Unit) -> None:
        for param, grad in pairs:
            param.grad = grad

    freed = _move(_gradients, unit, grads, show)
    for param, _ in pairs:
        param.grad = None
    return freed


def _offload_states(optimizer: torch.optim.Optimizer, devices: set[torch.device]) -> int:
    state = optimizer.state
    tensors = [tensor for tensor in tensors_in(list(state.values())) if tensor.device in devices]

    def show(owner: torch.optim.Optimizer) -> None:
        owner.state = state
        for hook in hooks:
            hook.remove()

    freed = _move(_states, optimizer, tensors, show)
    hooks = [
        optimizer.register_step_pre_hook(_refuse),
        optimizer.register_state_dict_pre_hook(_refuse),
        optimizer.register_load_state_dict_pre_hook(_refuse),
    ]
    optimizer.state = defaultdict(dict)
    return freed


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError(
        "the optimizer's states are offloaded; call fsdp_runtime.reload(model, optimizer) before they are used"
    )
