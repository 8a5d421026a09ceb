"""`fully_shard`: from a module to a unit. Nothing is changed when it raises.

check     types and values of the arguments
plan      which parameters, from where, on which mesh
allocate  plans and memory of all groups, compared with other ranks; values are copied there
commit    modules get the sharded parameters, hooks and their new class
"""

import logging
import operator
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
from ._params.subclass import unwrapped
from ._params.unit import Param, Unit, UnitOptions
from ._plan.group import Planner, Quantization, Request
from ._plan.mesh import DataMesh, WrongCallError, data_mesh, take_apart
from ._plan.mesh_choice import PlacementFn, choose_meshes
from ._plan.param import ManagedParam, Place, managed_of
from ._schedule import hooks, state_dict, torch_state
from ._schedule.model import (
    Member,
    gathered_around,
    member_of,
    owner_of,
    register,
    uses_in,
)
from ._schedule.passes import Pass
from ._torch.streams import streams_of
from .block_policies import BlockPolicy
from .optim import stale

_log = logging.getLogger(__name__)
_DEFAULT_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
Slots = dict[str, torch.Tensor | None]


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
    A parameter that several modules share belongs to the smallest unit around all of them. Parameters become
    `RaggedDTensor`s in one flat buffer, cut only between blocks. Units may be made in any order, outer first too.
    After veScale-FSDP (arXiv 2602.22437).

    Issues one 64-byte all-reduce per mesh axis and parameter group to check that all ranks planned the same layout;
    with `shard_placement_fn` one per axis of `mesh` to check that they chose the same meshes; and if another unit
    gives parameters to the new one, the collectives that move them between ranks.

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
            FSDP2's), "own_stream" (in the process group's), "peer_memory", or a function that makes a
            `dbuffer.Transport` of a process group. Defaults to the environment variable DBUFFER_TRANSPORT, else
            "auto".
        planner: packs the tensors of a group: `(tensors, world_size, *, align) -> layout_planner.Layout`.
        quantization_policy: what is quantized, and how: a `fsdp_runtime.QuantizationPolicy`. Defaults to nothing.
        skippable: ranks may run this module in some steps and not in others, or use different parameters of it. It
            and the units inside are gathered when the nearest unit around them that is not skippable begins its
            forward or backward, on every rank, and freed when that ends; then one small all-reduce finds which
            parameters any rank used, and only those are reduced and get a `.grad`, on every rank.

    Returns:
        The module (or list), now an `FSDPModule`.

    Raises:
        ValueError, TypeError: naming the argument or parameter, its value and the remedy; on every rank, before
            anything is changed.
    """
    modules = _checked_modules(module)
    _check_policies(mp_policy, offload_policy, block_policy, planner, quantization_policy)
    data = data_mesh(mesh, dp_mesh_dims)
    keep, count = _checked_reshard(reshard_after_forward, data)
    streams = streams_of(data.device)
    offload = offload_policy if streams.layer.asynchronous else _NO_OFFLOAD  # on CPU shards are there anyway
    request = Request(data, mp_policy, offload, block_policy, transport, planner, quantization_policy, count)
    takeover = _plan_takeover(modules, request, ignored_params, shard_placement_fn)
    unit = Unit(modules, request, UnitOptions(reshard_after_forward=keep, skippable=bool(skippable)), streams)
    ready = _allocate(Member(unit, Pass(streams)), takeover)
    _commit(takeover, ready)
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
    for name, value, expected in (
        ("mp_policy", precision, MixedPrecisionPolicy),
        ("offload_policy", offload, OffloadPolicy),
    ):
        if not isinstance(value, expected):
            raise TypeError(f"{name} is {value!r}; expected a {expected.__name__} of torch.distributed.fsdp")
    if getattr(precision, "param_dtype_override_fn", None) is not None:  # of torch 2.15
        raise NotImplementedError(
            "mp_policy.param_dtype_override_fn is not supported: call fully_shard with another mp_policy on modules "
            "whose parameters keep their dtype"
        )
    if blocks is not None and not callable(blocks):
        raise TypeError(
            f"block_policy is {blocks!r}; expected a function (name, parameter) -> block or None, such as one of "
            "fsdp_runtime.block_policies"
        )
    if not callable(planner):
        raise TypeError(f"planner is {planner!r}; expected a function such as layout_planner.plan")
    if quantization is not None and not isinstance(quantization, Quantization):
        raise TypeError(
            f"quantization_policy is {quantization!r}; expected a fsdp_runtime.QuantizationPolicy"
        )


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
class _Taken:
    """A parameter to take: the managed one, the original, its full or sharded value, and the unit that has it now."""

    param: Param
    original: torch.Tensor
    value: torch.Tensor
    owner: Member | None


_PARAM = operator.attrgetter("param")


@dataclass
class _Takeover:
    """The parameters that a unit takes, and the units that it takes them from.

    Attributes:
        managed: the modules whose buffers move.
        gathered: units that hold gathered memory, around, or giving parameters.
    """

    params: list[_Taken]
    managed: set[nn.Module]
    gathered: list[Unit]


@dataclass
class _Ready:
    """All memory and values that a call needs, before any module changes.

    Attributes:
        groups: of the new unit.
        givers: new groups of the units that give parameters away.
        buffers: copies of the modules' buffers on the device, and where to put them.
        classes: of the modules, with `FSDPModule`.
    """

    member: Member
    groups: list[Group]
    givers: dict[Member, list[Group]]
    buffers: list[tuple[Slots, str, torch.Tensor]]
    classes: list[type[nn.Module]]


def _plan_takeover(
    modules: tuple[nn.Module, ...],
    request: Request,
    ignored: Iterable[nn.Parameter] | None,
    placement_fn: PlacementFn | None,
) -> _Takeover:
    """Find the parameters and check them. Changes nothing; compares the meshes that `placement_fn` chooses."""
    without = set(ignored or ())
    for param in without:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"ignored_params holds {param!r}; expected parameters of the module")
    managed = _managed_modules(modules)
    sources = _find_params(modules, managed, without)
    meshes: dict[torch.Tensor, DataMesh] = {}
    if placement_fn is not None:
        meshes = choose_meshes({each.tensor: each.name for each in sources}, placement_fn, request.data)
    taken, gathered = [], gathered_around(modules)
    for each in sources:
        taken.append(_take(each, meshes.get(each.tensor, request.data)))
        if each.owner is not None:
            gathered.append(each.owner[0].unit)
    if request.neighbors is not None:
        _check_neighbors(taken, request.neighbors)
    find_kinds(map(_PARAM, taken), request)
    for entry in taken:
        giver = None if entry.owner is None else managed_of(entry.original)
        if giver is not None:
            giver.group.check_taken_over(entry.param, request)
    return _Takeover(taken, managed, list(dict.fromkeys(gathered)))


def _allocate(member: Member, takeover: _Takeover) -> _Ready:
    """Allocate and fill the groups of the unit, and of units that give parameters away. Modules do not change."""
    unit = member.unit
    unit.make_hook = hooks.gradient_hooks(member)
    params: list[Param] = []
    values: dict[str, torch.Tensor] = {}
    for each in takeover.params:
        params.append(each.param)
        values[each.param.name] = each.value
        if each.owner is None and not each.param.data.single_process:
            each.param.digest = digest_of(each.value)
    groups = unit.lay_out(params, values)
    givers = _lay_out_givers(takeover.params)
    buffers = _moved_buffers(takeover.managed, unit.data.device)
    return _Ready(member, groups, givers, buffers, list(map(mixed_class, map(type, unit.modules))))


def _commit(takeover: _Takeover, ready: _Ready) -> None:
    """Put the sharded parameters into the modules, and hook the unit in. Nothing is refused from here on."""
    member, unit = ready.member, ready.member.unit
    for around in takeover.gathered:
        around.reshard()
    unit.take(ready.groups)
    for giver, groups in ready.givers.items():
        giver.unit.take(groups)
    for slots, name, buffer in ready.buffers:
        slots[name] = buffer
    for inner in takeover.managed:
        compat.mark_for_dynamo(inner)
    register(member)
    hooks.attach(member)
    torch_state.attach(member)
    state_dict.attach(unit)
    stale.watch()
    for module, mixed in zip(unit.modules, ready.classes, strict=True):
        module.__class__ = mixed
    for joining in (member, *ready.givers):
        joining.join()


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
    """A parameter inside the modules.

    Attributes:
        tensor: a plain parameter, or the sharded one where a unit has it.
        owner: that unit.
        places: those inside the modules.
        alone: whether a path leads to it that no unit inside is on (plain), or not its owner.
    """

    name: str
    tensor: torch.Tensor
    owner: tuple[Member, Param] | None
    places: dict[Place, None] = field(default_factory=dict)
    alone: bool = False


def _find_params(
    modules: tuple[nn.Module, ...], managed: set[nn.Module], ignored: set[nn.Parameter]
) -> list[_Source]:
    """The parameters to take. Those that modules elsewhere share stay where they are, until a unit is around all."""
    taken: list[_Source] = []
    elsewhere: dict[Member, set[torch.Tensor] | None] = {}
    for each in _params_in(modules, managed, ignored):
        if not each.alone:
            continue
        if each.owner is not None:
            owner, param = each.owner
            if owner not in elsewhere:
                elsewhere[owner] = _used_elsewhere(owner, modules)
            others = elsewhere[owner]
            if others is None:  # a unit inside, or a sibling
                shared = any(place not in each.places for place in param.places)
            else:
                shared = param.sharded in others or param.unsharded in others
            if shared:
                continue
        taken.append(each)
    return taken


def _params_in(
    modules: tuple[nn.Module, ...], managed: set[nn.Module], ignored: set[nn.Parameter]
) -> Iterable[_Source]:
    sources: dict[torch.Tensor, _Source] = {}
    for name, path, attribute, used in uses_in(modules):
        param = managed_of(used)
        member = None if param is None else owner_of(param)
        owner = None if param is None or member is None else (member, param)
        tensor = used if owner is None else owner[1].sharded
        if used in ignored or tensor in ignored or tensor.numel() == 0:
            continue
        each = sources.setdefault(tensor, _Source(name, tensor, owner))
        each.places[Place(path[-1], attribute)] = None
        if owner is None:
            each.alone = each.alone or path[-1] in managed
        else:
            each.alone = each.alone or set(path).isdisjoint(owner[0].unit.modules)
    return sources.values()


def _used_elsewhere(outer: Member, modules: tuple[nn.Module, ...]) -> set[torch.Tensor] | None:
    """The parameters used in a unit around these modules on a path that leads past them; None: it is not around."""
    params: set[torch.Tensor] = set()
    around, tops = False, set(modules)
    for _, path, _, used in uses_in(outer.unit.modules):
        if tops.isdisjoint(path):
            params.add(used)
        else:
            around = True
    return params if around else None


def _take(source: _Source, data: DataMesh) -> _Taken:
    name, param, places = source.name, source.tensor, list(source.places)
    if source.owner is not None:
        return _take_over(name, places, data, *source.owner)
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
        taken: Param = ManagedParam(name, places, param, tuple(param.shape), data, None, param)
        return _Taken(taken, param, param, None)
    plain, other = take_apart(name, param, data)
    plain, wrapper = unwrapped(name, plain)
    taken = ManagedParam(name, places, param, tuple(plain.shape), data, other, plain, wrapper)
    return _Taken(taken, param, plain, None)


def _take_over(name: str, places: list[Place], data: DataMesh, owner: Member, managed: Param) -> _Taken:
    if managed.data.groups != data.groups:
        raise ValueError(
            f"{name} was cut over {managed.data.mesh} by the unit {owner.unit.name}, and is to be cut over "
            f"{data.mesh} here; call fully_shard on the inner module first, or pass the same mesh object, since an "
            "equal one has separate process groups (for parameters that are tied, always the same)"
        )
    taken: Param = ManagedParam(
        name, places, managed.sharded, managed.shape, data, managed.other, managed.example, managed.wrapper
    )
    taken.digest = managed.digest if managed.group.keeps_initial else None
    return _Taken(taken, managed.sharded, managed.sharded, owner)


def _lay_out_givers(params: list[_Taken]) -> dict[Member, list[Group]]:
    """New groups for each unit that parameters are taken from, with the parameters that it keeps."""
    taken: dict[Member, set[int]] = {}
    for each in params:
        if each.owner is not None:
            taken.setdefault(each.owner, set()).add(id(each.original))
    laid_out: dict[Member, list[Group]] = {}
    for giver, gone in taken.items():
        kept = [param for param in giver.unit.params if id(param.sharded) not in gone]
        values: dict[str, torch.Tensor] = {param.name: param.sharded for param in kept}
        laid_out[giver] = giver.unit.lay_out(kept, values)
    return laid_out


def _check_neighbors(params: list[_Taken], count: int) -> None:
    for param in (each.param for each in params):
        size = param.data.shard_size
        if size % count:
            raise ValueError(
                f"reshard_after_forward={count}: parameter {param.name} is cut over {size} ranks of a separate mesh "
                f"({param.data.mesh}); pass a factor of each mesh's ranks, or a bool"
            )


def _moved_buffers(modules: set[nn.Module], device: torch.device) -> list[tuple[Slots, str, torch.Tensor]]:
    """Copies on this device of the modules' buffers that are elsewhere, and where to put them."""
    moved: list[tuple[Slots, str, torch.Tensor]] = []
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                moved.append((module._buffers, name, buffer.to(device)))
    return moved
