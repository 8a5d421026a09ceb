"""Every name of torch that is private or differs between releases, in one place.

Tried on CPU with torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.

Private names: `DTensorSpec` and `TensorMeta` (what `DTensor.__new__` takes, as FSDP2 hands it over), `_StridedShard`
(what FSDP2 makes of a parameter that TP cuts along dimension 0), `OpOverload` (the type of an op),
`Tensor._make_wrapper_subclass` (2.11 only), DTensor's dispatcher (whether implicit replication is allowed), `_sleep` of
CUDA, `distributed_c10d._world` (which groups there are), and for the test harness what DTensor remembers of ops
(`_clear_sharding_prop_cache`).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Spec = DTensorSpec
TorchStridedShard = _StridedShard
Op = torch._ops.OpOverload
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

# From 2.12 on a subclass of DTensor keeps its own dispatch; before, C++ takes it for a plain DTensor and never
# asks it. There RaggedDTensor is a wrapper subclass of Tensor with the same methods.
SUBCLASSES_DTENSOR = TORCH_VERSION >= (2, 12)


class TensorWrapper(torch.Tensor):
    """The base class on torch 2.11: the part of DTensor's surface that RaggedDTensor inherits elsewhere."""

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: torch.Tensor
    _spec: DTensorSpec
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which this tensor is spread."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return self._spec.placements

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        spec = self._spec
        return ["_local_tensor"], (spec.placements, spec.tensor_meta, spec.mesh, self.requires_grad)


class EqualToDTensor(type(torch.Tensor)):  # type: ignore[misc]
    """The metaclass of a class that compares equal to DTensor.

    Where torch looks for DTensors by exact type it compares classes, and a subclass is passed over: optimizers and
    clip_grad_norm_ then do without foreach, and CommDebugMode runs the subclass's op where it sees no collective.
    """

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is DTensor

    __hash__ = type.__hash__


# Imported by torch when a DTensor first communicates (half a second): a process that forks ranks does it for them.
IMPORTED_LATE = ("torch._dynamo",)

BASE_CLASS: Any = DTensor if SUBCLASSES_DTENSOR else TensorWrapper
#: The types of tensors that ranks hold together, for isinstance; a RaggedDTensor is one of the two.
DISTRIBUTED: tuple[type[DTensor], ...] = (DTensor, TensorWrapper)  # type: ignore[assignment]


class RaggedSpec(DTensorSpec):
    """The DTensorSpec of a tensor with a ragged placement.

    torch's own reads the `dim` of every kind of Shard when it is made, which a RaggedShard answers with an error. That
    is how a plain DTensor cannot carry one; a RaggedDTensor, whose spec this is, can.
    """

    def __post_init__(self) -> None:
        self.use_strided_shard_as_shard_order = False
        object.__setattr__(self, "shard_order", ())  # past torch's check of it; nothing here reads it
        self._hash = None


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    *,
    ragged: bool,
) -> DTensorSpec:
    """DTensor's spec: mesh, placements and the global shape, stride and dtype."""
    kind = RaggedSpec if ragged else DTensorSpec
    return kind(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


if SUBCLASSES_DTENSOR:
    #: A bare instance of a class around a local tensor; no copy, no communication, no autograd.
    new_wrapper: Any = DTensor.__new__

else:

    def new_wrapper(cls: Any, local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> Any:
        """A bare instance of ``cls`` around ``local``; no copy, no communication, no autograd."""
        meta = spec.tensor_meta
        assert meta is not None
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride,
            storage_offset=local.storage_offset(),  # checkpoint staging reads it here
            dtype=local.dtype,
            device=local.device,
            layout=local.layout,
            requires_grad=requires_grad,
        )
        wrapper._local_tensor = local
        wrapper._spec = spec
        return wrapper


def all_gather_into(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of equal 1-D shards; torch 2.13 renamed it and warns about the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(output, shard, group=group, async_op=True)
    return work


def reduce_scatter_from(
    output: torch.Tensor, source: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work:
    """Start a reduce-scatter into equal 1-D shards; torch 2.13 renamed it and warns about the old name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = scatter(output, source, op=op, group=group, async_op=True)
    return work


def implicitly_replicated() -> bool:
    """Whether `torch.distributed.tensor.experimental.implicit_replication` is in effect."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def bound(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An op's arguments by name, with defaults filled in."""
    return {
        argument.name: args[position]
        if position < len(args)
        else kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(func._schema.arguments)
    }


def groups_by_name() -> dict[str, dist.ProcessGroup]:
    """This process's groups, the default one included."""
    return {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}


def forget_meshes() -> None:
    """Clear DTensor's caches of ops, and with them meshes whose groups are gone."""
    # Not at the top: it imports numpy.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def sleeper(device: torch.device) -> Any:
    """The function that keeps a stream of this kind of device busy for a number of cycles, or None if it has none."""
    return getattr(torch.get_device_module(device), "_sleep", None)


def mode_is_active(mode: Any) -> bool:
    """Whether a dispatch mode is on this thread's stack."""
    return any(active is mode for active in _get_current_dispatch_mode_stack())


def is_wrapper(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors answers ops itself, with ops on tensors that it holds."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
