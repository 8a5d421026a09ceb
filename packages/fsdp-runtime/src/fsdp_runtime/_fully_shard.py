"""`fully_shard`: from a module to a unit. Nothing is changed when it raises.

check     types and values of the arguments
plan      which parameters, on which mesh
allocate  plans and memory of all groups, compared with other ranks; values are copied there
commit    modules get the sharded parameters, hooks and their new class

Inner modules come first, and the first forward ends it. A parameter that modules outside of its unit use too does not
move: its group is gathered by the smallest unit around all of them from the call on that makes this unit.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from dbuffer import TransportChoice
from layout_planner import plan
from ragged_shard import RaggedDTensor

from . import _torch_compat as compat
from ._module import FSDPModule, mixed_class
from ._params.digest import digest_of
from ._params.group import Group
from ._params.kinds import find_kinds
from ._params.subclass import Extension, unwrapped
from ._params.unit import Param, Unit, UnitOptions
from ._plan.group import Planner, Quantization, Request
from ._plan.mesh import DataMesh, WrongCallError, data_mesh, take_apart
from ._plan.mesh_choice import PlacementFn, choose_meshes
from ._plan.param import ManagedParam, Place, managed_of, slots_of
from ._schedule import hooks, state_dict, torch_state
from ._schedule.model import Member, member_of, owner_of, register, uses_in
from ._schedule.passes import Pass
from ._torch.streams import streams_of
from .block_policies import BlockPolicy
from .optim import stale

_log = logging.getLogger(__name__)
_DEFAULT_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
Moved = list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]  # where to put it, a copy of a buffer


class _Options(TypedDict, total=False):
    """The keyword arguments of `fully_shard`."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: Iterable[nn.Parameter] | None
    dp_mesh_dims: Any  # torch's DataParallelMeshDims, from 2.12 on
    block_policy: BlockPolicy | None
    transport: TransportChoice | None
    planner: Planner
    quantization_policy: Quantization | None
    skippable: bool


@overload
def fully_shard(module: nn.Module, **options: Unpack[_Options]) -> FSDPModule: ...


@overload
def fully_shard(module: list[nn.Module], **options: Unpack[_Options]) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    block_policy: BlockPolicy | None = None,
    transport: TransportChoice | None = None,
    planner: Planner = plan,
    quantization_policy: Quantization | None = None,
    skippable: bool = False,
) -> Any:
    """Shard a module's parameters, gradients and optimizer states over the data-parallel ranks. In place.

    A drop-in for `torch.distributed.fsdp.fully_shard`. The parameters that no inner call has taken become one unit:
    gathered by one collective before the module's forward and backward, their gradients reduced by one after it.
    Parameters become `RaggedDTensor`s in one flat buffer, cut only between blocks. Call it on inner modules first, and
    on all before the first forward. A parameter that modules outside of its unit share is gathered by the smallest
    unit around all of them, with the others of its flat buffer. After veScale-FSDP (arXiv 2602.22437).

    Issues one 64-byte all-reduce per mesh axis and parameter group to check that all ranks planned the same layout;
    and with `shard_placement_fn` one per axis of `mesh` to check that they chose the same meshes.

    Args:
        module: to shard, or a list of modules that make one unit.
        mesh: 1-D; or 2-D with names: cut over the last dimension, copied over the first (HSDP). None: all ranks.
        reshard_after_forward: free full parameters after forward and gather them again in backward. None: True, but
            False for the outermost unit. An integer k: keep 1/k of them, and gather among k neighbors; it divides the
            ranks of each mesh.
        shard_placement_fn: FSDP2's: chooses the mesh of each parameter, by a `DeviceMesh` (1-D, or 2-D as `mesh`) or
            torch's `ShardPlacementResult`; None: `mesh`. A unit gathers and reduces once for each of its meshes.
            `Shard(dim)` asks for balance, which there is anyway; `block_policy` names the blocks that stay whole.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: `CPUOffloadPolicy` keeps shards in CPU memory.
        ignored_params: left as they are.
        dp_mesh_dims: which dimensions of `mesh` are data parallel, where parameters are DTensors on all of it.
        block_policy: `(name, parameter) -> block or None`: the runs of a parameter that must stay on one rank. See
            `fsdp_runtime.block_policies`.
        transport: how bytes get from rank to rank: "auto", "collectives" (on a GPU in this runtime's streams, as
            FSDP2's), "peer_memory", or a function that makes a `dbuffer.Transport` of a process group. Defaults to the
            environment variable DBUFFER_TRANSPORT, else "auto".
        planner: packs the tensors of a group: `(tensors, world_size, *, align) -> layout_planner.Layout`.
        quantization_policy: what is quantized, and how: a `fsdp_runtime.QuantizationPolicy`. Defaults to nothing.
        skippable: ranks may run this module in some steps and not in others, or use different parameters of it. It
            and the units inside are gathered when the nearest unit around them that is not skippable begins its
            forward or backward, on every rank, and freed when that ends. All of them are reduced, with zeros where a
            rank has no gradient; one small all-reduce at the end of backward finds which parameters any rank used, and
            only those get a `.grad`, on every rank.

    Returns:
        The module (or list), now an `FSDPModule`.

    Raises:
        ValueError, TypeError: naming the argument or parameter, its value and the remedy; on every rank, before
            anything is changed.
        RuntimeError: a unit is around the module already, or a forward has begun.
    """
    modules = _checked_modules(module)
    _check_policies(mp_policy, offload_policy, block_policy, planner, quantization_policy)
    data = data_mesh(mesh, dp_mesh_dims)
    keep, count = _checked_reshard(reshard_after_forward, data)
    streams = streams_of(data.device)
    offload = offload_policy if streams.layer.asynchronous else _NO_OFFLOAD  # on CPU shards are there anyway
    request = Request(data, mp_policy, offload, block_policy, transport, planner, quantization_policy, count)
    contents = _plan(modules, request, ignored_params, shard_placement_fn)
    options = UnitOptions(reshard_after_forward=keep, skippable=bool(skippable))
    unit = Unit(modules, request, options, streams, hooks.gradient_hook)
    groups, buffers = _allocate(unit, contents)
    classes = [mixed_class(type(each)) for each in modules]  # may refuse, as all before
    _commit(Member(unit, Pass(streams)), contents, groups, buffers, classes)
    return module


# As of torch's function, in whose place a script may put ours.
fully_shard.state = compat.TORCHS_FULLY_SHARD.state  # type: ignore[attr-defined]


def _checked_modules(module: Any) -> tuple[nn.Module, ...]:
    listed = [module] if isinstance(module, nn.Module) else module
    refused = f"fully_shard takes a module or a list of modules, got {type(module).__name__}: "
    if not isinstance(listed, (list, tuple)) or not listed:
        raise TypeError(f"{refused}{module!r}")
    for each in listed:
        if not isinstance(each, nn.Module):
            raise TypeError(f"{refused}{module!r}")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {each}. "
                "Call it on each of the modules inside"
            )
        if member_of(each) is not None:
            raise WrongCallError(f"fully_shard was already called on this {type(each).__name__}")
    if len(listed) == 1:
        return tuple(listed)
    inside = {sub for each in listed for sub in each.modules() if sub is not each}
    return tuple(dict.fromkeys([each for each in listed if each not in inside]))


def _check_policies(precision: Any, offload: Any, blocks: Any, planner: Any, quantization: Any) -> None:
    def expect(fits: bool, name: str, value: Any, expected: str) -> None:
        if not fits:
            raise TypeError(f"{name} is {value!r}; expected {expected}")

    functions = "a function (name, parameter) -> block or None, such as one of fsdp_runtime.block_policies"
    quantizes = quantization is None or isinstance(quantization, Quantization)
    expect(
        isinstance(precision, MixedPrecisionPolicy), "mp_policy", precision, "torch's MixedPrecisionPolicy"
    )
    expect(isinstance(offload, OffloadPolicy), "offload_policy", offload, "torch's OffloadPolicy")
    expect(blocks is None or callable(blocks), "block_policy", blocks, functions)
    expect(callable(planner), "planner", planner, "a function such as layout_planner.plan")
    expect(quantizes, "quantization_policy", quantization, "a fsdp_runtime.QuantizationPolicy")


def _checked_reshard(value: Any, data: DataMesh) -> tuple[bool | None, int | None]:
    """Whether to free parameters after forward, and among how many neighbors to keep them then."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, "
            f"not {value!r}"
        )
    if value < 1 or value > data.shard_size or data.shard_size % value:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {data.shard_size}, not {value}"
        )
    if value == 1:
        _log.warning(
            "reshard_after_forward=1 means groups of one rank, which keep all parameters, like False"
        )
        return False, None
    return True, value


@dataclass
class _Tied:
    """A parameter of another unit that the new unit's modules use on a path past that unit."""

    param: Param
    owner: Member
    moves: bool  # whether the new unit is around the other one, and gathers its group from now on
    places: dict[Place, None] = field(default_factory=dict)  # where such a path ends


@dataclass
class _Contents:
    """The parameters of a new unit."""

    # params, values: the parameters that it cuts, and the plain tensors by name
    params: list[Param]
    values: dict[str, torch.Tensor]
    tied: list[_Tied]  # the parameters that other units have cut
    names: dict[Place, str]  # the name at each place in its modules
    managed: set[nn.Module]  # the modules whose buffers move


def _plan(
    modules: tuple[nn.Module, ...],
    request: Request,
    ignored: Iterable[nn.Parameter] | None,
    placement_fn: PlacementFn | None,
) -> _Contents:
    """Find the parameters and check them. Changes nothing; compares the meshes that `placement_fn` chooses."""
    without = set(ignored or ())
    for param in without:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"ignored_params holds {param!r}; expected parameters of the module")
    managed = _managed_modules(modules)
    sources, tied, names = _find_params(modules, managed, without)
    meshes: dict[torch.Tensor, DataMesh] = {}
    if placement_fn is not None:
        meshes = choose_meshes({each.tensor: each.name for each in sources}, placement_fn, request.data)
    params: list[Param] = []
    values: dict[str, torch.Tensor] = {}
    for each in sources:
        taken, values[each.name] = _take(each, meshes.get(each.tensor, request.data))
        params.append(taken)
    for shared in tied:
        if shared.moves and placement_fn is None and shared.param.data.groups != request.data.groups:
            raise ValueError(
                f"{names[next(iter(shared.places))]} was cut over {shared.param.data.mesh} by the unit "
                f"{shared.owner.unit.name}, to be cut over {request.data.mesh} here; pass the same mesh object to "
                "all calls that parameters are tied across, since an equal one has separate process groups"
            )
    if request.neighbors is not None:
        moved = [param for each in tied if each.moves for param in each.param.group.params]
        _check_neighbors([*params, *moved], request.neighbors)
    find_kinds(params, request)
    return _Contents(params, values, tied, names, managed)


def _allocate(unit: Unit, contents: _Contents) -> tuple[list[Group], Moved]:
    """Allocate and fill the groups of the unit, and copies of buffers that are elsewhere. Modules do not change."""
    for param in contents.params:
        if not param.data.single_process:
            param.digest = digest_of(contents.values[param.name])
    groups = unit.lay_out(contents.params, contents.values)
    return groups, _moved_buffers(contents.managed, unit.data.device)


def _commit(
    member: Member, contents: _Contents, groups: list[Group], buffers: Moved, classes: list[type[nn.Module]]
) -> None:
    """Put the sharded parameters into the modules, and hook the unit in. Nothing is refused from here on."""
    unit = member.unit
    unit.take(groups)
    for each in contents.tied:
        _tie(each, unit, contents.names)
    for slots, name, buffer in buffers:
        slots[name] = buffer
    for inner in contents.managed:
        compat.mark_for_dynamo(inner)
    register(member)
    hooks.attach(member)
    torch_state.attach(member)
    holders = [place.module for param in unit.params for place in param.places]
    state_dict.attach(unit, dict.fromkeys([*unit.modules, *holders]))
    stale.watch()
    for module, mixed in zip(unit.modules, classes, strict=True):
        module.__class__ = mixed
    member.join()


def _tie(tied: _Tied, unit: Unit, names: dict[Place, str]) -> None:
    """Let modules hold a parameter of another unit, whose group the new unit gathers if it is around that one."""
    param, owner = tied.param, tied.owner.unit
    owner.reshard()
    new = [place for place in tied.places if place not in param.places]
    param.add_places(new)
    for place in new:
        slots_of(place.module)[place.attribute] = param.sharded
    if not tied.moves:
        state_dict.attach(owner, dict.fromkeys(place.module for place in new))
    elif param.group in owner.groups:  # else with another parameter of its group
        unit.take_over(param.group, owner, names)


def _managed_modules(modules: tuple[nn.Module, ...]) -> set[nn.Module]:
    """The modules whose parameters a unit takes: `modules` and all inside, up to where another unit begins."""
    managed, ahead = set(modules), list(modules)
    while ahead:
        for child in ahead.pop().children():
            if member_of(child) is None and child not in managed:
                managed.add(child)
                ahead.append(child)
    return managed


@dataclass
class _Source:
    """A plain parameter inside the modules."""

    name: str
    tensor: torch.Tensor
    places: dict[Place, None] = field(default_factory=dict)  # those inside the modules
    alone: bool = False  # whether a path leads to it that no unit inside is on


def _find_params(
    modules: tuple[nn.Module, ...], managed: set[nn.Module], ignored: set[nn.Parameter]
) -> tuple[list[_Source], list[_Tied], dict[Place, str]]:
    """Plain parameters to take, parameters of other units that a path past their unit uses, and names by place."""
    inside = dict.fromkeys([sub for module in modules for sub in module.modules()])
    _check_inner(modules, inside)
    sources: dict[torch.Tensor, _Source] = {}
    tied: dict[Param, _Tied] = {}
    names: dict[Place, str] = {}
    for name, path, attribute, used in uses_in(modules):
        place, param = Place(path[-1], attribute), managed_of(used)
        names.setdefault(place, name)
        if used in ignored or used.numel() == 0 or (param is not None and param.sharded in ignored):
            continue
        if param is None:
            each = sources.setdefault(used, _Source(name, used))
            each.places[place] = None
            each.alone = each.alone or path[-1] in managed
            continue
        owner = owner_of(param)
        if set(path).isdisjoint(owner.unit.modules):
            if param not in tied:
                tied[param] = _Tied(param, owner, _moves(owner, modules, inside))
            tied[param].places[place] = None
    return [each for each in sources.values() if each.alone], [*tied.values()], names


def _check_inner(modules: tuple[nn.Module, ...], inside: dict[nn.Module, None]) -> None:
    """Raise RuntimeError if a unit inside has been used, or the unit around it is around these modules too."""
    outermost: dict[Unit, None] = {}
    for inner in inside:
        member = member_of(inner)
        if member is not None:
            _check_unused(member, modules)
            outermost[member.passes.units[0]] = None
    for unit in outermost:
        _check_not_around(unit, modules, inside)


def _check_unused(member: Member, modules: tuple[nn.Module, ...]) -> None:
    if member.passes.frozen:
        raise RuntimeError(
            f"fully_shard was called on {type(modules[0]).__name__}, which uses parameters of {member.unit.name}, "
            "after the first forward of that one. Call fully_shard on all modules before the first forward"
        )


def _check_not_around(unit: Unit, modules: tuple[nn.Module, ...], inside: dict[nn.Module, None]) -> None:
    if unit.modules[0] in inside:
        return
    if any(module in outer.modules() for outer in unit.modules for module in modules):
        raise RuntimeError(
            f"fully_shard was called on {type(modules[0]).__name__} after {unit.name}, which it is inside of and which "
            "has its parameters. Call fully_shard on the inner modules first"
        )


def _moves(owner: Member, modules: tuple[nn.Module, ...], inside: dict[nn.Module, None]) -> bool:
    """Whether the unit of these modules is around another one: then it gathers what they share.

    Raises:
        RuntimeError: it is inside of the other one, or that one has been used.
    """
    _check_unused(owner, modules)
    _check_not_around(owner.unit, modules, inside)
    owner.unit.check_unwritten()
    return all(module in inside for module in owner.unit.modules)


def _take(source: _Source, data: DataMesh) -> tuple[Param, torch.Tensor]:
    """The parameter, and the plain tensor that this rank computes with."""
    name, param, places = source.name, source.tensor, list(source.places)
    if isinstance(param, RaggedDTensor):
        raise ValueError(
            f"{name} is a RaggedDTensor that no unit holds; fully_shard takes plain parameters and cuts them itself"
        )
    if param.dtype.is_complex or param.dtype == torch.bool:
        instead = ", or keep torch.view_as_real of it" if param.dtype.is_complex else ""
        raise ValueError(
            f"parameter {name} is {param.dtype}: buffers hold real numbers; pass it in ignored_params{instead}"
        )
    if type(param.data) is torch.Tensor:
        return ManagedParam(name, places, param, tuple(param.shape), data, None, param), param
    plain, other = take_apart(name, param, data)
    plain, wrapper = unwrapped(name, plain)
    return ManagedParam(name, places, param, tuple(plain.shape), data, other, plain, wrapper), plain


def _check_neighbors(params: list[Param], count: int) -> None:
    for param in params:
        size = param.data.shard_size
        if isinstance(param.wrapper, Extension) and count < size:
            raise NotImplementedError(
                f"reshard_after_forward={count}: parameter {param.name} is a {param.wrapper.kind.__name__}, which "
                "defines its own all-gather and does not support an integer; use True or False"
            )
        if size % count:
            raise ValueError(
                f"reshard_after_forward={count}: parameter {param.name} is cut over {size} ranks of a separate mesh "
                f"({param.data.mesh}); pass a factor of each mesh's ranks, or a bool"
            )


def _moved_buffers(modules: set[nn.Module], device: torch.device) -> Moved:
    return [
        (module._buffers, name, buffer.to(device))
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and buffer.device != device
    ]
