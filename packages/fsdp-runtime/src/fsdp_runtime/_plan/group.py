"""What is fixed when a group is made: where its parameters lie, in which dtypes, and how each is placed. Frozen.

A step plans, validates and hashes nothing of this again.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Placement

import layout_planner
import ragged_shard
from dbuffer import (
    BlockFormat,
    BlocksAtRest,
    BlocksOnWire,
    CodePlanes,
    Geometry,
    ReductionForm,
    TransportChoice,
    WireForm,
    geometry_of,
)
from layout_planner import Elements, Layout, Rows, Segment, TensorSpec, Whole
from ragged_shard import CPU, RaggedDTensor

from ..block_policies import BlockPolicy
from ..quantization import QuantizationPolicy, check_products, check_values, matrices_only, meet_tiles
from .dtypes import Dtypes, dtypes_for
from .mesh import DataMesh, OtherParallelism, place
from .param import ManagedParam

MIN_CHILD = 1 << 18  # elements. Smaller children share a buffer and a reduction.
Planner = Callable[..., Layout]  # as `layout_planner.plan`: (tensors, world_size, *, align) -> Layout
ROW = Rows(1)
MOST_OF_BF16 = 0.55  # of the bytes of a bf16 gather: what cut="auto" lets whole tiles take
_ALIGNMENT = 16  # bytes; NCCL copies slices off this boundary element by element


# Equal units, such as the layers of a transformer, have one layout.
_layouts: "weakref.WeakValueDictionary[tuple[Any, ...], Layout]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter is cut.

    Attributes:
        name: in its unit.
        shape: of the plain tensor that a rank computes with.
        global_shape: of the whole parameter, before another parallelism cut it.
        mesh, placements: of the sharded parameter.
        cut_by_others: whether another parallelism had cut it.
    """

    name: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    cut_by_others: bool


@dataclass(frozen=True)
class GroupPlan:
    """How the parameters of one group lie and travel.

    Attributes:
        data: the mesh that cuts them.
        dtypes: in which they are kept, computed with and reduced.
        precision: the policy that the dtypes follow from.
        offload: keep shards in CPU memory; None: where the unit computes.
        transport: how bytes get from rank to rank; see `dbuffer.DBuffer`.
        wire: what parameters travel as; None: their compute dtype.
        scaled: whether gathered parameters stay codes, which products are taken with.
        shares_amax: whether tiles may be cut, so that their amax must be shared.
        reduction: what gradients travel as; None: a reduce-scatter of their dtype.
        layout, geometry: where they lie, and what of that is this rank's.
        params: one for each, in the order of the module.
        neighbors: the ranks to keep gathered slices among after forward; None: no fewer than all.
    """

    data: DataMesh
    dtypes: Dtypes
    precision: MixedPrecisionPolicy
    offload: CPUOffloadPolicy | None
    transport: TransportChoice | None
    wire: WireForm | None
    scaled: bool
    shares_amax: bool
    reduction: ReductionForm | None
    layout: Layout
    geometry: Geometry
    params: tuple[ParamPlan, ...]
    neighbors: dist.ProcessGroup | None

    @property
    def large(self) -> bool:
        """Whether the group is worth a reduction of its own."""
        return self.layout.numel >= MIN_CHILD

    @property
    def planes(self) -> CodePlanes | None:
        """Where the codes of parameters lie; None where they travel as they are."""
        wire = self.wire
        return (
            CodePlanes(self.layout, wire.format) if isinstance(wire, (BlocksOnWire, BlocksAtRest)) else None
        )

    @property
    def at_rest(self) -> BlockFormat | None:
        """The format of the codes that parameters are kept as; None where values are kept."""
        return self.wire.format if isinstance(self.wire, BlocksAtRest) else None

    def buffer_options(self) -> dict[str, Any]:
        """What the buffers of parameters and of gradients have in common, as arguments of `DBuffer`."""
        data = self.data
        options: dict[str, Any] = {
            "dtype": self.dtypes.kept,
            "device": data.device,
            "replicate_dim": 0 if data.hybrid else None,
            "transport": self.transport,
            "reduction": self.reduction,
        }
        if self.offload is not None:
            options.update(shard_device=CPU, pin_memory=self.offload.pin_memory)
        return options

    def with_kept_dtype(self, dtype: torch.dtype) -> "GroupPlan":
        """The plan after the parameters were converted."""
        return replace(self, dtypes=dtypes_for(dtype, self.precision))


@dataclass(frozen=True)
class Request:
    """What `fully_shard` was asked for, for all parameters of a unit.

    Attributes:
        data: the unit's mesh; a parameter may have another.
        precision, offload, blocks: the policies.
        transport: see `dbuffer.DBuffer`.
        planner: packs the tensors of a group.
        quantization: the policy, or None.
        neighbors: among how many ranks parameters are kept after forward; None: all or nothing is kept.
    """

    data: DataMesh
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    blocks: BlockPolicy | None
    transport: TransportChoice | None
    planner: Planner
    quantization: QuantizationPolicy | None
    neighbors: int | None


def check_quantized(
    params: Sequence[ManagedParam[Any]], request: Request, policy: QuantizationPolicy
) -> None:
    """Raise ValueError, naming the parameter or option, where one cannot travel as asked."""
    if policy.blocks is not None and isinstance(request.offload, CPUOffloadPolicy):
        raise ValueError(
            "quantization_policy: weights are quantized on the device that computes; offload_policy=CPUOffloadPolicy "
            "keeps their shards elsewhere. Leave one of the two out"
        )
    for param in params:
        dtypes, selected = dtypes_for(param.dtype, request.precision), is_selected(param, policy)
        if selected and policy.blocks is not None and param.extension is not None:
            raise ValueError(
                f"quantization_policy: parameter {param.name} was selected, but is a {param.extension.kind.__name__}, "
                "which defines its own all-gather; do not select it (QuantizationPolicy.select)"
            )
        if selected and policy.blocks is not None:
            check_values(param.name, policy.blocks, (dtypes.kept, dtypes.compute))
        if selected and policy.at_rest is not None:
            _check_at_rest(param)
        if selected and policy.scaled:
            _check_products(param, request.data.device)
        try:
            policy.reduction(selected, dtypes.reduce)
        except ValueError as error:
            raise ValueError(
                f"quantization_policy: parameter {param.name} of {param.dtype}: {error}"
            ) from error


def _check_products(param: ManagedParam[Any], device: torch.device) -> None:
    uses = [(place.module, place.attribute) for place in param.places]
    check_products(param.name, param.shape, uses, device)
    if param.other is not None:
        raise ValueError(
            f"quantization_policy: parameter {param.name} was selected for compute='scaled', and another parallelism "
            "has cut it; use compute='dequantize'"
        )


def _check_at_rest(param: ManagedParam[Any]) -> None:
    if param.requires_grad:
        raise ValueError(
            f"quantization_policy: parameter {param.name} was selected to be kept as codes, and is trained; freeze it "
            "(requires_grad_(False)) before fully_shard, or do not select it (QuantizationPolicy.select)"
        )
    if param.other is not None:
        raise ValueError(
            f"quantization_policy: parameter {param.name} was selected to be kept as codes, and another parallelism "
            "has cut it; do not select it (QuantizationPolicy.select)"
        )


def is_selected(param: ManagedParam[Any], policy: QuantizationPolicy) -> bool:
    """Whether a policy quantizes a parameter: it selects it wherever it is used."""
    if policy.select is None and policy.at_rest is not None and param.requires_grad:
        return False
    select = policy.select or matrices_only
    return policy.selects and all(select(param.name, param.example, place.module) for place in param.places)


def plan_group(params: Sequence[ManagedParam[Any]], request: Request) -> GroupPlan:
    """Plan where parameters of one dtype and mesh lie. Makes process groups where neighbors were asked for.

    Raises:
        ValueError: naming the parameter, where the policy returned something that is not a block or does not fit.
    """
    data, policy = params[0].data, request.quantization
    dtypes = dtypes_for(params[0].dtype, request.precision)
    selected = policy is not None and is_selected(params[0], policy)
    shared = False
    if params[0].extension is not None:
        layout = _lay_out_apart(params, request, dtypes)
    elif policy is not None and selected:
        layout, shared = _lay_out(params, request, dtypes, policy)
    else:
        specs = [_spec(param, request.blocks, None) for param in params]
        layout = _planned(request.planner, specs, data.shard_size, max(8, _ALIGNMENT // dtypes.narrowest))
    geometry = geometry_of(layout, data.shard_rank)
    wire = policy.wire(shared) if policy is not None and selected and params[0].extension is None else None
    return GroupPlan(
        data=data,
        dtypes=dtypes,
        precision=request.precision,
        offload=request.offload if isinstance(request.offload, CPUOffloadPolicy) else None,
        transport=request.transport,
        wire=wire,
        shares_amax=shared,
        reduction=None if policy is None else policy.reduction(selected, dtypes.reduce),
        layout=layout,
        geometry=geometry,
        params=tuple([_plan_param(param, data, geometry) for param in params]),
        neighbors=None if request.neighbors is None else data.neighbors(request.neighbors),
        scaled=policy is not None and wire is not None and policy.scaled,
    )


def _planned(planner: Planner, specs: list[TensorSpec], ranks: int, align: int) -> Layout:
    """What the planner makes of these tensors; of layout-planner's own the same object for the same tensors."""
    if planner is not layout_planner.plan:
        return planner(specs, ranks, align=align)
    key = (tuple(specs), ranks, align)
    found = _layouts.get(key)
    if found is None:
        found = _layouts[key] = planner(specs, ranks, align=align)
    return found


def _lay_out(
    params: Sequence[ManagedParam[Any]], request: Request, dtypes: Dtypes, policy: QuantizationPolicy
) -> tuple[Layout, bool]:
    """The layout of parameters that a policy quantizes; and whether it may cut tiles."""
    weights = policy.blocks
    align = _ALIGNMENT if weights is not None else max(8, _ALIGNMENT // dtypes.narrowest)

    def planned(rows: int) -> Layout:
        specs = [_spec(param, request.blocks, rows) for param in params]
        return request.planner(specs, params[0].data.shard_size, align=align)

    if weights is None or not weights.shares_amax:
        return planned(1), False
    if policy.cut == "shared":
        return planned(1), True
    whole = planned(weights.tile[0])
    if policy.cut == "whole" or policy.at_rest is not None:
        return whole, False
    by_rows = planned(1)
    bf16 = 2 * sum(segment.shard_size for segment in by_rows.segments)
    asked = CodePlanes(whole, weights).row_bytes
    shared = asked > MOST_OF_BF16 * bf16 and asked > CodePlanes(by_rows, weights).row_bytes
    return (by_rows if shared else whole), shared


def _lay_out_apart(params: Sequence[ManagedParam[Any]], request: Request, dtypes: Dtypes) -> Layout:
    """Each parameter in a segment of its own, cut between slices of its first dimension.

    As many on each rank, but for the last ones: what arrives is contiguous, and extensions count on it.

    Raises:
        ValueError: the planner lays one tensor out otherwise.
    """
    align, ranks = max(8, _ALIGNMENT // dtypes.narrowest), params[0].data.shard_size
    specs, segments = [], []
    for param in params:
        given = _spec(param, request.blocks, None)
        width = math.prod(param.shape[1:])
        # Blocks that start over in each stacked matrix allow any cut between matrices.
        block = math.lcm(width, given.grid.block) if given.grid.uniform else width
        spec = TensorSpec(param.name, param.shape, Elements(min(block, given.numel)))
        found = request.planner([spec], ranks, align=align)
        if len(found.segments) != 1 or found.segments[0].offsets != (0,):
            raise ValueError(
                f"planner laid {param.name} out in {found.segments}; expected one segment that starts with it, since "
                "it is a tensor subclass with all-gather extensions"
            )
        specs.append(spec)
        segments.append(found.segments[0])
    return Layout(tuple(specs), ranks, align, tuple(segments))


def _spec(param: ManagedParam[Any], blocks: BlockPolicy | None, rows: int | None) -> TensorSpec:
    """How a parameter may be cut; `rows`: of the tiles that stay whole, None where there are none."""
    block = None if blocks is None else blocks(param.name, param.example)
    try:
        if rows is not None:
            block = meet_tiles(block, rows, param.shape)
        return TensorSpec(param.name, param.shape, ROW if block is None else block)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"block_policy gave {block!r} for parameter {param.name} of shape {param.shape}: {error}"
        ) from error


def _plan_param(param: ManagedParam[Any], data: DataMesh, geometry: Geometry) -> ParamPlan:
    other: OtherParallelism | None = param.other
    mesh, placements = place(data, geometry.placements[param.name], other)
    global_shape = param.shape if other is None else tuple(other.shape)
    return ParamPlan(param.name, param.shape, global_shape, mesh, placements, other is not None)


def trained_layout(layout: Layout, trained: frozenset[int]) -> Layout:
    """Where the gradients of some of a layout's tensors lie, so that nothing of the others travels.

    A rank gets the gradient of the very elements that it holds of the parameter. Each run of elements of a tensor on a
    rank is a tensor of its own here, `name@rank`; the shard is as large as the most that one rank holds.

    Args:
        trained: the numbers of the tensors.
    """
    runs: list[TensorSpec] = []
    starts: list[tuple[int, int]] = []  # (rank, offset in its shard)
    filled = [0] * layout.world_size
    for index in sorted(trained):
        name = layout.tensors[index].name
        for rank in range(layout.world_size):
            start, stop = layout.local_range(name, rank)
            if stop > start:
                runs.append(TensorSpec(f"{name}@{rank}", (stop - start,), Whole()))
                starts.append((rank, filled[rank]))
                filled[rank] += -(-(stop - start) // layout.align) * layout.align
    size = max(filled)
    order = sorted(range(len(runs)), key=starts.__getitem__)
    names = tuple(runs[i].name for i in order)
    offsets = tuple(starts[i][0] * size + starts[i][1] for i in order)
    return Layout(tuple(runs), layout.world_size, layout.align, (Segment(size, names, offsets),))


def children_of(params: Sequence[ManagedParam[Any]]) -> dict[str, int]:
    """Which parameters of a unit around other units go together: those of each large child; all small ones, 0.

    embed.weight: 1    final_norm.weight: 0    head.weight: 2         (the other units run in between)
    """
    sizes: dict[str, int] = {}
    for param in params:
        child = param.name.split(".")[0]
        sizes[child] = sizes.get(child, 0) + math.prod(param.shape)
    large = [child for child, size in sizes.items() if size >= MIN_CHILD]
    numbers = {child: number for number, child in enumerate(large, start=1)}
    return {param.name: numbers.get(param.name.split(".")[0], 0) for param in params}


# -- values in a planned layout ----------------------------------------------------------------------------------------


def wrap_local(plan: ParamPlan, local: torch.Tensor) -> RaggedDTensor:
    """A distributed tensor laid out as planned around a local tensor; shares its memory."""
    return RaggedDTensor.from_local(local, plan.mesh, plan.placements, shape=plan.global_shape)


def local_value(plan: GroupPlan, param: ParamPlan, value: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a value, in the shape of the local tensor; shares memory where it can.

    Args:
        value: the plain tensor that this rank computes with, or a RaggedDTensor on the planned mesh: one that lies
            otherwise is redistributed (see `ragged_shard.redistribute`).
    """
    value = value.detach()
    if not isinstance(value, RaggedDTensor):
        return plan.geometry.cut(param.name, value)
    with torch.no_grad():
        local: torch.Tensor = value.redistribute(placements=param.placements).to_local()
    return local


def as_sharded(plan: GroupPlan, param: ParamPlan, like: torch.Tensor, value: torch.Tensor) -> RaggedDTensor:
    """A tensor of the parameter's global shape, laid out like the sharded parameter; memory of its own or shared.

    A full plain tensor is cut where it is; a distributed one that lies otherwise is redistributed.
    """
    with torch.no_grad():
        value = value.detach()
        if isinstance(value, RaggedDTensor):
            same = value.device_mesh == param.mesh and value.placements == param.placements
            return value if same else value.redistribute(placements=param.placements)
        if isinstance(value, DTensor):
            moved: RaggedDTensor = ragged_shard.redistribute(value, placements=param.placements)
            return moved
        if not param.cut_by_others:
            device = value.device if like.is_meta else like.device
            return wrap_local(param, plan.geometry.cut(param.name, value).to(device, copy=True))
        return ragged_shard.distribute_tensor(value, param.mesh, param.placements, src_data_rank=None)
