"""Full state dicts: full, plain tensors on rank 0 or on all ranks, out of and into modules and optimizers.

For parameters that are distributed in any way. torch's `set_model_state_dict` and `set_optimizer_state_dict` with
``full_state_dict=True`` slice whole rows and raise for other cuts; these functions load them all.

A check of all tensors comes before any of them is moved, so that all ranks raise together and none waits for another.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.utils._pytree import SequenceKey, tree_flatten_with_path, tree_map_with_path

from ragged_shard import _redistribute
from ragged_shard._distribute import scatter
from ragged_shard._ops.operands import local_from_full
from ragged_shard._sharding import Sharding, describe_mesh
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import TorchStridedShard
from ragged_shard.dist import DISTRIBUTED, movable, raise_on_all_ranks

__all__ = [
    "check_full_tensor",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
]

_Tensors = Mapping[str, torch.Tensor]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_REMEDY = (
    ". Freeze a parameter without saved states (requires_grad_(False)) while they are loaded; remove states of "
    "parameters that no optimizer has from the state dict"
)


def _sharded_state_dict(module: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> Any:
    from torch.distributed.checkpoint import state_dict  # takes as long to import as torch's DTensor

    return state_dict.get_optimizer_state_dict(module, optimizers)


def load_full_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], *, rank0_only: bool = False, strict: bool = True
) -> None:
    """Load full tensors into a module's parameters and buffers, ragged, DTensor or plain, in place.

    With ``rank0_only`` only global rank 0 needs the state dict (others pass anything, such as ``{}``): each tensor is
    scattered from there, so that no other rank ever holds a full one; rank 0 must be at the first coordinate of the
    module's meshes. Otherwise every rank has the state dict and copies its own ranges without communication. All
    names and shapes are checked first: if one is wrong nothing is written, and with ``rank0_only`` every rank raises.

    Values that are not tensors (extra state) are not supported.

    Args:
        module: its parameters must have storage: call ``to_empty`` first if they are on the meta device.
        state_dict: name -> full tensor; cast to the module's dtypes, but not between floating point and integers.
        rank0_only: only global rank 0 has the state dict.
        strict: the names must be exactly the module's; otherwise the names that both have are loaded.

    Raises:
        ValueError: a meta parameter, a mesh that does not begin at rank 0 (``rank0_only``), a wrong shape,
            missing or unexpected names (strict).
        TypeError: a value that is not a plain tensor, or floating point for integers (or the reverse).
    """
    own = module.state_dict(keep_vars=True)
    problem: Exception | None = None
    names: list[str] = []
    try:
        if not rank0_only or dist.get_rank() == 0:
            names = _common_names(own, state_dict, strict)
            for name in names:
                check_full_tensor(name, own[name], state_dict[name])
        tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
        _check_storage(tensors)
        if rank0_only:
            _check_mesh_roots(tensors, loading=True)
    except Exception as error:  # such as of a file that values are read from; the other ranks must not wait
        problem = error
    names = _agreed("load_full_state_dict", problem, names, from_rank0=rank0_only)
    with torch.no_grad():
        for name in names:
            _load_tensor(own[name], state_dict.get(name), from_rank0=rank0_only)


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers as full, plain tensors that share no storage with it.

    One tensor at a time. On all ranks, each communicates as Ragged -> Replicate does; with ``rank0_only`` each rank
    sends its own bytes to the first rank of each ragged axis (one all_to_all_single), and other ranks get ``{}``.

    Args:
        module: its parameters must have storage.
        rank0_only: gather to global rank 0 alone.
        cpu_offload: move each full tensor to the CPU as soon as it is gathered.

    Raises:
        ValueError: a parameter on the meta device; with ``rank0_only``, one on a mesh that does not begin at rank 0.
        TypeError: an entry of the module's state dict that is not a tensor.
    """
    own = module.state_dict(keep_vars=True)
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"full_state_dict: {name} is a {type(value).__name__}, not a tensor")
    return _gather("full_state_dict", own, rank0_only, cpu_offload)


def load_full_optimizer_state_dict(
    module: nn.Module, optimizers: Optimizers, state_dict: Mapping[str, Any], *, rank0_only: bool = False
) -> None:
    """Load a full optimizer state dict, as of `full_optimizer_state_dict` or torch's `get_optimizer_state_dict`.

    Communicates as `load_full_state_dict` does. Tensors are loaded in place; other values and the options of parameter
    groups are replaced. If an optimizer has no state yet, torch creates it with a step in which learning rate and
    gradients are zero. Frozen parameters are loaded too (torch's `set_optimizer_state_dict` drops their states): one
    with saved states gets them, by such a step where it has none, and one without saved states has none afterwards.

    Args:
        module: the module whose parameters the optimizers update; it gives them their names.
        optimizers: one or several.
        state_dict: ``{"state": {parameter name: {key: value}}, "param_groups": [...]}`` with full, plain tensors.
        rank0_only: only global rank 0 has the state dict.

    Raises:
        ValueError: state of other parameters or with other keys than the optimizers', none for a parameter that trains,
            or a wrong shape.
        TypeError: a tensor where the optimizer has none, the reverse, or a wrong kind of number.
    """
    caller, every = "load_full_optimizer_state_dict", _listed(optimizers)
    here = not rank0_only or dist.get_rank() == 0
    sharded, params = _states_and_params(module, every)
    problem: Exception | None = None
    answer: Any = None
    try:
        if here:
            answer = [name for name, state in _entry(state_dict, "state").items() if state]
    except Exception as error:  # as above
        problem = error
    saved = _agreed(caller, problem, answer, from_rank0=rank0_only)
    fresh = [params[name] for name in saved if name in params and not sharded["state"].get(name)]
    if fresh:
        _make_states(every, fresh)
        sharded, params = _states_and_params(module, every)
    state = {n: own for n, own in sharded["state"].items() if n in saved or params[n].requires_grad}
    own = _leaves(state)
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    leaves: dict[str, Any] = {}
    try:
        if here:
            leaves = _leaves(_entry(state_dict, "state"))
            for name in _common_names(own, leaves, strict=True, remedy=_REMEDY):
                if name in tensors:
                    check_full_tensor(name, own[name], leaves[name])
                elif isinstance(leaves[name], torch.Tensor):
                    raise TypeError(f"{name}: expected a {type(own[name]).__name__}, got a tensor")
            values = {name: value for name, value in leaves.items() if name not in tensors}
            answer = (values, _entry(state_dict, "param_groups"))
        if rank0_only:
            _check_mesh_roots(tensors, loading=True)
    except Exception as error:
        problem = error
    try:
        values, groups = _agreed(caller, problem, answer, from_rank0=rank0_only)
    except Exception:
        for optimizer in every:
            for param in fresh:
                optimizer.state.pop(param, None)
        raise
    with torch.no_grad():
        for name, tensor in tensors.items():
            _load_tensor(tensor, leaves.get(name), from_rank0=rank0_only)
    state = _replaced(state, {**tensors, **values})
    own_groups = iter(sharded["param_groups"])
    for optimizer in every:
        its_groups = [_with_options(next(own_groups), groups) for _ in optimizer.param_groups]
        names = [name for group in its_groups for name in group["params"]]
        states = {name: state[name] for name in names if name in state}
        optimizer.load_state_dict({"state": states, "param_groups": its_groups})


def _states_and_params(
    module: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimizers' own state dict by parameter name, and their parameters by these names."""
    sharded = _sharded_state_dict(module, optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    pairs = zip(sharded["param_groups"], groups, strict=True)
    return sharded, {
        name: param
        for named, group in pairs
        for name, param in zip(named["params"], group["params"], strict=True)
    }


def _make_states(optimizers: tuple[torch.optim.Optimizer, ...], params: list[torch.Tensor]) -> None:
    """Make the states of some parameters as torch does it: a step with learning rates and gradients of zero."""
    for optimizer in optimizers:
        groups = [group for group in optimizer.param_groups if "lr" in group]
        rates = [group["lr"] for group in groups]
        grads = {param: param.grad for group in optimizer.param_groups for param in group["params"]}
        if grads.keys().isdisjoint(params):
            continue
        try:
            for param in grads:
                param.grad = None
            for param in params:
                if param in grads:
                    param.grad = torch.zeros_like(param)
            for group in groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            optimizer.step()
        finally:
            for param, grad in grads.items():
                param.grad = grad
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _with_options(own: dict[str, Any], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A parameter group with the options of those saved groups that have parameters of it."""
    options: dict[str, Any] = {}
    for group in groups:
        if not {*own["params"]}.isdisjoint(group["params"]) or not (own["params"] or group["params"]):
            options.update(group)
    return {**own, **options, "params": own["params"]}


def full_optimizer_state_dict(
    module: nn.Module, optimizers: Optimizers, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """The state of optimizers by parameter name, with full, plain tensors that share no storage with it.

    Communicates as `full_state_dict` does; with ``rank0_only`` other ranks get ``{}``. The format is torch's
    `get_optimizer_state_dict`, so any optimizer of the same kind loads it, distributed or not.

    Args:
        module: the module whose parameters the optimizers update; it gives them their names.
        optimizers: one or several.
        rank0_only: gather to global rank 0 alone.
        cpu_offload: move each full tensor to the CPU as soon as it is gathered.

    Raises:
        ValueError: state on the meta device; with ``rank0_only``, a mesh that does not begin at rank 0.
    """
    sharded = _sharded_state_dict(module, _listed(optimizers))
    own = _leaves(sharded["state"])
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    gathered = _gather("full_optimizer_state_dict", tensors, rank0_only, cpu_offload)
    if rank0_only and dist.get_rank() != 0:
        return {}
    return {
        "state": _replaced(sharded["state"], {**own, **gathered}),
        "param_groups": sharded["param_groups"],
    }


def _gather(caller: str, tensors: _Tensors, rank0_only: bool, cpu_offload: bool) -> dict[str, torch.Tensor]:
    try:
        _check_storage(tensors)
        if rank0_only:
            _check_mesh_roots(tensors, loading=False)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None
    gathered = {}
    keep = not rank0_only or dist.get_rank() == 0
    for name, tensor in tensors.items():
        with torch.no_grad():
            full = _gather_tensor(tensor, rank0_only=rank0_only)
        if keep:
            gathered[name] = full.cpu() if cpu_offload else full
    return gathered


def _entry(state_dict: Mapping[str, Any], key: str) -> Any:
    try:
        return state_dict[key]
    except KeyError:
        raise ValueError(f"the state dict has no '{key}'; expected 'state' and 'param_groups'") from None


def _common_names(
    own: Mapping[str, Any], saved: Mapping[str, Any], strict: bool, remedy: str = ""
) -> list[str]:
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if strict and (missing or unexpected):
        raise ValueError(f"missing names {missing}, unexpected names {unexpected}{remedy}")
    return sorted(own.keys() & saved.keys())


def _listed(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def _leaves(tree: Any) -> dict[str, Any]:
    """Values of nested dicts, lists and tuples, by their keys and indices joined with dots."""
    return {_joined(path): value for path, value in tree_flatten_with_path(tree)[0]}


def _replaced(tree: Any, values: Mapping[str, Any]) -> Any:
    """A tree with other values, by the names that `_leaves` gives them."""
    return tree_map_with_path(lambda path, _: values[_joined(path)], tree)


def _joined(path: Iterable[Any]) -> str:
    return ".".join(str(key.idx if isinstance(key, SequenceKey) else key.key) for key in path)


# -- one tensor, distributed in any way -----------------------------------------------------------------------------


def _check_mesh_roots(tensors: _Tensors, *, loading: bool) -> None:
    """Raise ValueError unless rank 0 is at the first coordinate of every tensor's mesh, as moving to or from it needs.

    Gathering skips meshes that rank 0 is not in; loading needs it in all of them.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DISTRIBUTED):
            ranks = tensor.device_mesh.mesh.reshape(-1).tolist()
            if ranks[0] != 0 and (loading or 0 in ranks):
                mesh = describe_mesh(tensor.device_mesh)
                raise ValueError(f"{name} is on a {mesh} that does not begin at rank 0; use rank0_only=False")


def _check_storage(tensors: _Tensors) -> None:
    """Raise ValueError if a tensor is on the meta device."""
    names = [name for name, tensor in tensors.items() if tensor.is_meta]
    if names:
        raise ValueError(f"{names} are on the meta device; allocate them by module.to_empty(device='cpu')")


def check_full_tensor(name: str, target: torch.Tensor, value: Any) -> None:
    """Raise unless ``value`` is a plain full tensor for ``target``: of its shape, floating point where that is.

    Raises:
        TypeError: not a plain tensor, or floating point for integers (or the reverse).
        ValueError: another shape.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DISTRIBUTED):
        raise TypeError(f"{name}: expected a full plain tensor, got {type(value).__name__}")
    if value.shape != target.shape:
        raise ValueError(f"{name}: expected shape {tuple(target.shape)}, got {tuple(value.shape)}")
    if value.is_floating_point() != target.is_floating_point():
        raise TypeError(f"{name}: a tensor of {value.dtype} for one of {target.dtype}; cast it first")


def _agreed(caller: str, problem: Exception | None, answer: Any, *, from_rank0: bool) -> Any:
    """Returns rank 0's ``answer``; raises on every rank if any rank passes a ``problem``.

    Communicates only if ``from_rank0``: an all-gather and a broadcast of pickled objects over all ranks.
    """
    if from_rank0:
        raise_on_all_ranks(problem, caller)
        shared: list[Any] = [answer]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]
    if problem is not None:
        raise_on_all_ranks(problem, caller, groups=())
    return answer


def _load_tensor(target: torch.Tensor, full: torch.Tensor | None, *, from_rank0: bool) -> None:
    """Copy a full tensor into ``target`` in place, cast to its dtype; on other ranks than 0 ``full`` may be None.

    With ``from_rank0`` it is scattered from rank 0, and broadcast along axes of replicas and for a plain target; else
    every rank copies its own range, and nothing is communicated.
    """
    device, dtype = target.device, target.dtype
    if full is not None:
        full = full.detach().to(device=device, dtype=dtype)
    elif isinstance(target, DISTRIBUTED):
        # Receiving ranks are asked for shape and dtype only: one element, expanded, takes no memory.
        full = torch.empty((), device=device, dtype=dtype).expand(target.shape)
    if isinstance(target, RaggedDTensor) and target._sharding.axis is not None:
        assert full is not None
        sharding = target._sharding
        local = scatter(full, sharding, 0) if from_rank0 else local_from_full(full, sharding)
        target._local_tensor.copy_(local)
    elif isinstance(target, DISTRIBUTED):
        assert full is not None
        # torch scatters equal shares only.
        if from_rank0 and TorchStridedShard in map(type, target.placements):
            full, from_rank0 = _broadcast(full.contiguous()), False
        placed = torch_distribute_tensor(
            full.contiguous(), target.device_mesh, target.placements, src_data_rank=0 if from_rank0 else None
        )
        target.to_local().copy_(placed.to_local())
    else:
        if from_rank0:
            full = _broadcast((target.detach().clone() if full is None else full).contiguous())
        assert full is not None
        target.detach().copy_(full)


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank; through the accelerator if the process group does not move CPU tensors."""
    world = dist.group.WORLD
    assert world is not None
    moved = movable(tensor, world)
    dist.broadcast(moved.view(-1).view(torch.uint8), src=0)  # backends move few dtypes
    return moved.to(tensor.device)


def _gather_tensor(value: torch.Tensor, *, rank0_only: bool) -> torch.Tensor:
    """The full tensor as a plain one with its own storage; with ``rank0_only`` its values count on rank 0 alone."""
    if isinstance(value, RaggedDTensor):
        sharding = value._sharding
        if rank0_only and sharding.axis is not None and not sharding.partial:
            first = _to_first(value._local_tensor, sharding)
            if sharding.cut_axes == (sharding.axis,):
                return first
            rest = sharding.replace(sharding.axis, Replicate())
            return RaggedDTensor._wrap(first, rest).full_tensor()
        return value.full_tensor()
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.detach().clone()


def _to_first(local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Gather to the first rank of the ragged axis; other ranks get a tensor of that shape without its values."""
    axis = sharding.axis
    assert axis is not None
    dims, _, *factor = sharding.ragged._key()
    one_hot = [int(rank == 0) for rank in range(sharding.axis_size(axis))]
    target = sharding.replace(axis, type(sharding.ragged)(dims, one_hot, *factor))
    base = sharding.replace(axis, Replicate()).local_shape
    assert base is not None
    moved = _redistribute.start(local, sharding, target).wait()
    if sharding.coordinate[axis] > 0:
        return moved.new_zeros(()).expand(base).contiguous()
    if moved is local:  # a copy, which is plain where local tensors are codes
        return local.new_empty(base).copy_(local.view(base))
    return moved.view(base)
