"""The plan of a group: layout, dtypes and placements of its parameters. Frozen when the group is made.

A step plans, validates and hashes nothing of this again.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Placement

import layout_planner
import ragged_shard
from dbuffer import Geometry, ReductionForm, TransportChoice, WireForm, geometry_of
from layout_planner import Block, Layout, Rows, Segment, TensorSpec, Whole
from ragged_shard import RaggedDTensor
from ragged_shard.device import CPU

from .. import _torch_compat as compat
from ..block_policies import BlockPolicy
from .mesh import DataMesh, place
from .param import ManagedParam

Enlarged = Callable[[Block | None, Sequence[int]], Block]
Planner = Callable[..., Layout]  # as `layout_planner.plan`: (tensors, world_size, *, align) -> Layout
ROW = Rows(1)
ALIGNMENT = 16  # bytes; NCCL copies slices off this boundary element by element


LayOut = Callable[["Sequence[ManagedParam[Any]]", "Request", "Dtypes"], tuple[Layout, WireForm | None]]
# Equal units, such as the layers of a transformer, have one layout.
_layouts: "weakref.WeakValueDictionary[tuple[Any, ...], Layout]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one group."""

    kept: torch.dtype  # dtype of sharded parameters
    compute: torch.dtype  # dtype of unsharded parameters
    reduce: torch.dtype  # dtype in which gradients are accumulated and reduced
    grad: torch.dtype  # dtype of sharded gradients

    @property
    def alignment(self) -> int:
        """Elements on whose multiples slices start, at 16 bytes or more in each dtype."""
        kept, compute, reduce, grad = self.kept, self.compute, self.reduce, self.grad
        return max(8, ALIGNMENT // min(kept.itemsize, compute.itemsize, reduce.itemsize, grad.itemsize))


def dtypes_for(kept: torch.dtype, policy: MixedPrecisionPolicy, grad: torch.dtype | None = None) -> Dtypes:
    """The dtypes of parameters kept in `kept` under a policy. Integers stay as they are.

    `grad` is the dtype of sharded gradients, and of their reduction if the policy has none: by default `kept`, and the
    reduction's is torch's.
    """
    if not kept.is_floating_point:
        return Dtypes(kept, kept, kept, kept)
    compute = policy.param_dtype or kept
    reduce = policy.reduce_dtype or grad or (kept if compat.REDUCES_AS_KEPT else compute)
    return Dtypes(kept, compute, reduce, grad or kept)


def precision_of(param: ManagedParam[Any], policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of one parameter. Calls `param_dtype_override_fn`, which policies have from torch 2.15 on.

    Raises ValueError, by name, if that returned something else than None, `param_dtype` or the parameter's dtype.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is None:
        return policy
    chosen = override(param.original())
    if chosen not in (None, policy.param_dtype, param.dtype):
        raise ValueError(
            f"param_dtype_override_fn gave {chosen!r} for parameter {param.name} of {param.dtype}; expected None, "
            f"param_dtype ({policy.param_dtype}), or the parameter's own dtype"
        )
    changes: dict[str, Any] = {"param_dtype": chosen or policy.param_dtype, "param_dtype_override_fn": None}
    return replace(policy, **changes)


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter is cut."""

    name: str  # in its unit
    shape: tuple[int, ...]  # of the plain tensor that a rank computes with
    global_shape: tuple[int, ...]  # of the whole parameter, before another parallelism cut it
    # mesh, placements: of the sharded parameter
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    cut_by_others: bool  # whether another parallelism had cut it


@dataclass(frozen=True)
class GroupPlan:
    """How the parameters of one group lie and travel."""

    data: DataMesh  # the mesh that cuts them
    dtypes: Dtypes  # in which they are kept, computed with and reduced
    precision: MixedPrecisionPolicy  # the policy that the dtypes follow from
    offload: CPUOffloadPolicy | None  # keep shards in CPU memory; None: where the unit computes
    transport: TransportChoice | None  # how bytes get from rank to rank; see `dbuffer.DBuffer`
    wire: WireForm | None  # encoding of gathers. Defaults to the compute dtype
    # encoding of reductions. Defaults to a reduce-scatter of the reduce dtype
    reduction: ReductionForm | None
    # layout, geometry: their positions, and this rank's part
    layout: Layout
    geometry: Geometry
    params: tuple[ParamPlan, ...]  # one for each, in the order of the module
    # the ranks to keep gathered slices among after forward; None: no fewer than all
    neighbors: dist.ProcessGroup | None

    @property
    def call(self) -> tuple[DataMesh, TransportChoice | None]:
        """Groups with equal ones are in one collective."""
        return self.data, self.transport

    def buffer_options(self, *, gradients: bool = False) -> dict[str, Any]:
        """Common arguments of the `DBuffer`s of parameters and of gradients."""
        data = self.data
        options: dict[str, Any] = {
            "dtype": self.dtypes.grad if gradients else self.dtypes.kept,
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
        grad = None if self.dtypes.grad == self.dtypes.kept else self.dtypes.grad
        return replace(self, dtypes=dtypes_for(dtype, self.precision, grad))


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """A group's memory on this rank, in bytes; see `fsdp_runtime.memory.UnitMemory`."""

    weights: int = 0
    gradients: int = 0
    sent: int = 0
    gathered: tuple[int, ...] = ()
    reduced: int = 0
    reducing: tuple[int, ...] = ()
    codes: int = 0
    decoding: tuple[int, ...] = ()


@runtime_checkable
class Quantization(Protocol):
    """The interface of a quantization policy; `fsdp_runtime.quantization` has the policy."""

    @property
    def blocks(self) -> Any:
        """The format of selected weights, at rest or before a gather; None: weights are not quantized."""
        ...

    def selects(self, param: ManagedParam[Any]) -> bool:
        """Whether the parameter is quantized."""
        ...

    def kind_of(self, param: ManagedParam[Any]) -> Any:
        """The class of the groups of a parameter that is selected."""
        ...

    def reduction(self, selected: bool, gathered: torch.dtype) -> ReductionForm | None:
        """The encoding of gradients that are reduced in this dtype. Raises ValueError if there is none for it."""
        ...


@dataclass(frozen=True)
class Request:
    """The arguments of `fully_shard` that concern all parameters of a unit."""

    data: DataMesh  # the unit's mesh; a parameter may have another
    # precision, offload, blocks: the policies
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    blocks: BlockPolicy | None
    transport: TransportChoice | None  # see `dbuffer.DBuffer`
    planner: Planner  # packs the tensors of a group
    quantization: Quantization | None  # the policy, or None
    # among how many ranks parameters are kept after forward; None: all or nothing is kept
    neighbors: int | None


def plan_group(params: Sequence[ManagedParam[Any]], request: Request, lay_out: LayOut) -> GroupPlan:
    """Plan the layout of parameters of one dtype, mesh and kind. Makes process groups for an integer reshard.

    `lay_out` is the kind's. Raises ValueError, by name, if the block policy returned no block, or a wrong one.
    """
    data, policy = params[0].data, request.quantization
    dtypes = dtypes_for(params[0].dtype, params[0].precision, params[0].grad_dtype)
    layout, wire = lay_out(params, request, dtypes)
    geometry = geometry_of(layout, data.shard_rank)
    plans: list[ParamPlan] = []
    for param in params:
        name, shape, other = param.name, param.shape, param.other
        mesh, placements = place(data, geometry.placements[name], other)
        whole = shape if other is None else tuple(other.shape)
        plans.append(ParamPlan(name, shape, whole, mesh, placements, other is not None))
    return GroupPlan(
        data=data,
        dtypes=dtypes,
        precision=params[0].precision,
        offload=request.offload if isinstance(request.offload, CPUOffloadPolicy) else None,
        transport=request.transport,
        wire=wire,
        reduction=None if policy is None else policy.reduction(params[0].selected, dtypes.reduce),
        layout=layout,
        geometry=geometry,
        params=tuple(plans),
        neighbors=data.neighbors(request.neighbors),
    )


def planned(
    params: Sequence[ManagedParam[Any]], request: Request, align: int, enlarged: Enlarged | None = None
) -> Layout:
    """The planner's layout of these parameters; for layout-planner's own, equal tensors get the same object.

    `enlarged` makes the block that is not cut of the block policy's and a shape. Defaults to the policy's.
    """
    specs, ranks = [spec_of(param, request.blocks, enlarged) for param in params], params[0].data.shard_size
    if request.planner is not layout_planner.plan:
        return request.planner(specs, ranks, align=align)
    key = (tuple(specs), ranks, align)
    layout = _layouts.get(key)
    if layout is None:
        layout = _layouts[key] = layout_planner.plan(specs, ranks, align=align)
    return layout


def spec_of(
    param: ManagedParam[Any], blocks: BlockPolicy | None, enlarged: Enlarged | None = None
) -> TensorSpec:
    """How a parameter may be cut; `enlarged`: as in `planned`."""
    block = None if blocks is None else blocks(param.name, param.example)
    try:
        if enlarged is not None:
            block = enlarged(block, param.shape)
        return TensorSpec(param.name, param.shape, ROW if block is None else block)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"block_policy gave {block!r} for parameter {param.name} of shape {param.shape}: {error}"
        ) from error


def trained_layout(layout: Layout, trained: frozenset[int]) -> Layout:
    """The layout of the gradients of some of a layout's tensors, so that the others' gradients are not sent.

    A rank gets the gradient of the very elements that it holds of the parameter. Each run of elements of a tensor on a
    rank is a separate tensor here, `name@rank`; the shard is as large as the most that one rank holds.
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


# -- values in a planned layout ----------------------------------------------------------------------------------------


def wrap_local(plan: ParamPlan, local: torch.Tensor) -> RaggedDTensor:
    """A distributed tensor laid out as planned around a local tensor; shares its memory."""
    return RaggedDTensor.from_local(local, plan.mesh, plan.placements, shape=plan.global_shape)


def is_laid_out(param: ParamPlan, value: torch.Tensor) -> bool:
    """Whether a tensor is laid out like the sharded parameter, so that `as_sharded` shares its memory."""
    return (
        isinstance(value, RaggedDTensor)
        and value.device_mesh == param.mesh
        and value.placements == param.placements
    )


def as_sharded(plan: GroupPlan, param: ParamPlan, like: torch.Tensor, value: torch.Tensor) -> RaggedDTensor:
    """A tensor of the parameter's global shape, laid out like the sharded parameter; in new memory or shared.

    A full plain tensor is cut where it is; a distributed one in another layout is redistributed.
    """
    with torch.no_grad():
        value = value.detach()
        if isinstance(value, RaggedDTensor):
            return value if is_laid_out(param, value) else value.redistribute(placements=param.placements)
        if isinstance(value, DTensor):
            moved: RaggedDTensor = ragged_shard.redistribute(value, placements=param.placements)
            return moved
        if not param.cut_by_others:
            device = value.device if like.is_meta else like.device
            return wrap_local(param, plan.geometry.cut(param.name, value).to(device, copy=True))
        return ragged_shard.distribute_tensor(value, param.mesh, param.placements, src_data_rank=None)
