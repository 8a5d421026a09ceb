"""DBuffer: the flat memory of one group, cut over ranks and gathered in place. After veScale-FSDP.

    rank 0   shard [  S ]----.
    rank 1   shard [  S ]----+--all-gather-->  full [  S  |  S  |  S  ]   on every rank, for as long as it is needed
    rank 2   shard [  S ]----'                       [ view a ][view b]    one view a tensor, in its own shape

Gradients go the other way: into the views of a buffer of their own, and from its gathered memory, reduced, into its
shard.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from layout_planner import Layout
from ragged_shard import DeviceLayer, RaggedDTensor, device_layer

from . import _torch_compat as compat
from ._collectives import AllReduce, Gather, ReduceScatter
from ._handle import Handle
from ._memory import BufferMemory
from ._mesh import MeshView, view_mesh
from ._order import count_compared
from ._spec import BufferSpec
from .memory.gathered import NeighborSlices
from .memory.geometry import Geometry
from .memory.recycler import Recycler, shared_recycler
from .transport import Op, TransportChoice, resolved
from .wire import CastOnWire, ReductionForm, WireForm

Memory = Literal["shard", "full"]


class DBuffer:
    """The memory of a group of tensors: this rank's shard always, the gathered whole while it is needed.

    The same class serves parameters (gather: shard -> full) and gradients (reduce: full -> shard). There is one
    storage per segment and role, none per tensor. The gathered memory comes from a recycler and is absent after
    construction.

    Args:
        layout: where the tensors lie; planned for as many ranks as `shard_dim` has.
        mesh: of one axis, or of two with `replicate_dim`.
        dtype: of the shard.
        device: where the buffer lives. Defaults to the current device of the mesh's type.
        shard_device: "cpu" keeps the shard in CPU memory while `device` computes (offload): a gather copies it
            into the gathered memory's own slice, a reduction copies the reduced slice back. On CUDA synchronize with
            an event recorded after the reduction's `wait` before the CPU reads the shard. Defaults to `device`.
        pin_memory: page-lock a shard on the CPU, so that these copies do not block; on CUDA exactly its bytes.
        full_dtype: of the gathered memory: what is computed with, or what gradients are reduced in. Defaults to
            `dtype`.
        shard_dim: the mesh axis that cuts, by name or index.
        replicate_dim: the mesh axis over which shards are copies (HSDP), or None.
        wire: what travels in a gather. Defaults to `CastOnWire`, the full dtype. With `BlocksAtRest` the shard is
            codes and scales, of values in `dtype`.
        reduction: what travels in a reduction, by one all-to-all, such as `CastReduction()`. None: the full dtype, by
            a reduce-scatter.
        transport: how it travels: "auto", "collectives", "peer_memory", or a function that makes a
            `Transport` of a process group. Defaults to the environment variable DBUFFER_TRANSPORT, else "auto".
        recycler: where the gathered memory comes from. Defaults to the one that all buffers of this device share.
        alias: with one rank and one dtype, let shard and full be the same memory. False: keep them apart.
        name: the group's, for errors. Defaults to its first tensor's.
        check_ranks: compare the layouts of all ranks: one all-gather of 32 bytes (HSDP: and one of 32 a rank of
            the shard axis). False where it is known that they agree, and with torch's fake process group.
        in_common: what else all ranks must have in common, by name, such as versions. Compared in the same all-gather.

    Raises:
        ValueError: mesh and layout of different sizes, a dtype or device that cannot be used, a slice or tensor
            that is not on a 16-byte boundary in every dtype in use, or ranks that were given different things. With
            `check_ranks` on every rank, with the first difference.
        TypeError: `layout` or `mesh` is something else.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        shard_device: torch.device | str | None = None,
        pin_memory: bool = False,
        full_dtype: torch.dtype | None = None,
        shard_dim: int | str = -1,
        replicate_dim: int | str | None = None,
        wire: WireForm | None = None,
        reduction: ReductionForm | None = None,
        transport: TransportChoice | None = None,
        recycler: Recycler | None = None,
        alias: bool = True,
        name: str | None = None,
        check_ranks: bool = True,
        in_common: Mapping[str, str] | None = None,
    ) -> None:
        view = view_mesh(mesh, shard_dim, replicate_dim)
        layer = device_layer(device or mesh.device_type)
        placed = layer.device if shard_device is None else torch.device(shard_device)
        spec = BufferSpec(
            layout=layout,
            view=view,
            layer=layer,
            dtype=dtype,
            full_dtype=full_dtype or dtype,
            shard_device=placed,
            pin_memory=pin_memory and placed != layer.device,
            wire=wire or CastOnWire(),
            reduction=reduction,
            transport=resolved(transport),
            alias=alias and wire is None,
            in_common=in_common or {},
        )
        spec.check(compare_ranks=check_ranks)
        recycler = recycler or shared_recycler(layer.device)
        if recycler.device != layer.device:
            raise ValueError(f"{name}: the recycler is on {recycler.device}, not {layer.device}")
        #: What the functions of this package work on.
        self.memory = BufferMemory(name or layout.tensors[0].name, spec, recycler)
        self._numbers: dict[dist.ProcessGroup, int] = {}
        if check_ranks:
            for group in (view.group, view.replica_group):
                if group is not None:
                    self._numbers[group] = count_compared(group)

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The group's, for errors."""
        return self.memory.name

    @name.setter
    def name(self, name: str) -> None:
        self.memory.name = name

    @property
    def reductions(self) -> int:
        """How many reductions were encoded, in this process or since it was set.

        Stochastic rounding depends on it: a run that resumes sets it to continue with the bits of the run before,
        on every rank to the same number.
        """
        return self.memory.reductions

    @reductions.setter
    def reductions(self, count: int) -> None:
        self.memory.reductions = count

    def number_on(self, group: dist.ProcessGroup) -> int:
        """How many buffers had been compared over a process group with this one: the same on all of its ranks.

        Args:
            group: of the mesh; any other counts as the one over which the buffer is cut. 0 without `check_ranks`.
        """
        return self._numbers.get(group) or self._numbers.get(self.memory.spec.view.group, 0)

    @property
    def layout(self) -> Layout:
        """Where the tensors lie."""
        return self.memory.spec.layout

    @property
    def geometry(self) -> Geometry:
        """Where they lie on this rank."""
        return self.memory.geometry

    @property
    def mesh_view(self) -> MeshView:
        """The axes of the mesh in use."""
        return self.memory.spec.view

    @property
    def layer(self) -> DeviceLayer:
        """Streams and events of the device."""
        return self.memory.spec.layer

    @property
    def device(self) -> torch.device:
        """Where the gathered memory is, with index."""
        return self.memory.spec.layer.device

    @property
    def shard_device(self) -> torch.device:
        """Where the shard is."""
        return self.memory.spec.shard_device

    @property
    def dtype(self) -> torch.dtype:
        """Of the shard."""
        return self.memory.spec.dtype

    @property
    def full_dtype(self) -> torch.dtype:
        """Of the gathered memory."""
        return self.memory.spec.full_dtype

    @property
    def aliased(self) -> bool:
        """Whether shard and gathered memory are the same."""
        return self.memory.aliased

    @property
    def offloaded(self) -> bool:
        """Whether the shard is in CPU memory while the device computes elsewhere."""
        return self.memory.spec.offloaded

    # -- what is in it ----------------------------------------------------------------------------------------------

    @property
    def shard(self) -> tuple[torch.Tensor, ...]:
        """This rank's slices, 1-D, `shard_size` elements of `dtype`, one a segment; padding in them is zero.

        With `BlocksAtRest`: uint8, the codes of each segment, then the scales of all.

        Raises:
            RuntimeError: given away.
        """
        flats = self.memory.shard.flats
        if not flats:
            self.memory.check_shard("shard")
        return flats

    @property
    def full(self) -> tuple[torch.Tensor, ...]:
        """The gathered memory, 1-D, `world_size * shard_size` elements of `full_dtype`, one a segment.

        Raises:
            RuntimeError: released.
            ValueError: tensors are gathered as codes, without values.
        """
        self.memory.check_gathered_values("full")
        return self.memory.gathered.flats

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """One tensor for each of the layout's, in its own shape, in the memory of `full`. Always the same objects.

        With a wire form of `read_back=False` each is a `BlockQuantizedTensor` on the codes that arrived.

        Raises:
            RuntimeError: released.
        """
        self.memory.check_gathered("views")
        return self.memory.gathered.views

    @property
    def empty_views(self) -> Mapping[str, torch.Tensor]:
        """The objects of `views`, also while the buffer is released: to build parameters on, once.

        They have shape and dtype but no memory: reading one while released crashes the process, as torch does not
        check.
        """
        return self.memory.gathered.views

    @property
    def local_views(self) -> Mapping[str, torch.Tensor]:
        """This rank's slice of each tensor, of shape `(local_prefix, *shape[len(dims):])`, in the memory of `shard`.

        A slice may be empty; that of a 0-d tensor has shape (1,) or (0,). The same objects while there is a shard.
        With `BlocksAtRest` each is a `BlockQuantizedTensor`: `copy_` into one quantizes values.

        Raises:
            RuntimeError: the shard was given away.
        """
        if not self.memory.shard.flats:
            self.memory.check_shard("local_views")
        return self.memory.shard.views

    @property
    def materialized(self) -> bool:
        """Whether `full` has memory."""
        return self.memory.gathered.present

    @property
    def busy(self) -> bool:
        """Whether a collective was started and not yet waited for."""
        return self.memory.in_flight is not None

    def count_users(self) -> int:
        """How many tensors hold the gathered memory: this buffer's own, and autograd's for a backward to come."""
        return self.memory.gathered.count_users()

    def ragged_tensors(self, *, requires_grad: bool = False) -> dict[str, RaggedDTensor]:
        """The group as distributed tensors that share the shard's memory: what is written to one is in the buffer.

        Placed as `RaggedShard` on the shard axis and `Replicate` on the other. Communicates nothing.
        """
        slices = self.memory.geometry.slices
        return {
            name: RaggedDTensor.from_local(
                local, self.mesh_view.mesh, self.placements(name), shape=slices[name].shape
            ).requires_grad_(requires_grad)
            for name, local in self.local_views.items()
        }

    def placements(self, tensor: str) -> tuple[Placement, ...]:
        """How a tensor of the layout lies over the mesh. Raises KeyError where there is none of that name."""
        view, ragged = self.mesh_view, self.memory.geometry.placement(tensor)
        return tuple(ragged if axis == view.shard_axis else Replicate() for axis in range(view.mesh.ndim))

    # -- memory -----------------------------------------------------------------------------------------------------

    def give_shard(self) -> None:
        """Let go of the shard: its memory belongs to whoever still holds tensors on it, and ends with them.

        For gradients, which their users drop when they like. Nothing where shard and full are the same memory.
        """
        if self.memory.in_flight is not None:
            self.memory.check_idle("give_shard")
        if not self.memory.aliased:
            self.memory.shard.give()

    def new_shard(self) -> None:
        """Give the buffer a shard again after `give_shard`; uninitialised, padding too. Nothing where it has one.

        Page-locked memory is used again where no tensor holds the last shard; the host waits for the device then, once
        for all buffers whose shards were dropped before.
        """
        self.memory.shard.renew()

    def materialize(self) -> None:
        """Give `full` memory, uninitialised, for use on the current stream. Nothing where it has some."""
        self.memory.gathered.materialize()

    def release(self) -> None:
        """Take `full`'s memory away: zero bytes are left, and views are valid again after the next gather.

        On CUDA call it on the stream of the last use. Nothing where it is released. Where shard and full are one
        memory (`aliased`) that memory stays, and only reading through `full` and `views` ends.

        Raises:
            RuntimeError: a collective is under way.
        """
        if self.memory.in_flight is not None:
            self.memory.check_idle("release")
        if self.memory.encoder.decodes:
            self.memory.encoder.release()
        self.memory.gathered.release()

    def shrink(self, group: dist.ProcessGroup) -> None:
        """Release `full`, but keep this rank's slice of it among the ranks of a smaller group, for the next gather.

        The next `all_gather` then runs over that group, whose ranks must all have shrunk: it takes more memory than a
        shard, 1/size of the whole, and stays among neighbors. FSDP2's reshard to a smaller world. Nothing where
        shard and full are the same memory.

        Args:
            group: of ranks of the shard axis; its size divides that axis's.

        Raises:
            ValueError: the size does not divide.
            RuntimeError: released, a collective is under way, or tensors were gathered as codes that were not kept.
        """
        memory = self.memory
        memory.check_idle("shrink")
        memory.check_gathered("shrink")
        if self.mesh_view.size % group.size():
            raise ValueError(
                f"{self.name}: cannot shrink to {group.size()} ranks, which does not divide {self.mesh_view.size}"
            )
        if not self.aliased:
            kept = memory.encoder.kept()
            if kept is None and not memory.gathered.flats:
                raise RuntimeError(
                    f"{self.name}: shrink of tensors that are gathered as codes; call keep_codes_for before the gather"
                )
            if kept is None:
                memory.neighbor = memory.gathered.slices_of(group, self.layer)
            else:
                memory.neighbor = NeighborSlices(kept, group, self.layer.record(), coded=True)
        self.release()

    def keep_codes_for(self, group: dist.ProcessGroup | None) -> None:
        """Let the next gathers of a buffer that travels quantized keep their codes for `shrink(group)`.

        It then keeps 1/size of the codes instead of 1/size of the gathered memory. None: nothing is kept. A release
        drops them. No effect on other buffers.
        """
        self.memory.encoder.keep_for(group)

    def forget_encoding(self) -> None:
        """Encode the shard again at the next gather, also where its version counter has not moved.

        For writes that torch does not see, such as a kernel's of one's own. Only forms that quantize keep anything.
        """
        self.memory.encoder.forget()

    def forget_neighbors(self) -> None:
        """Drop what `shrink` kept: the next gather takes the shards again."""
        self.memory.check_idle("forget_neighbors")
        self.memory.neighbor = None

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_gather(self, *, stream: Any = None, after: Iterable[Any] | None = None) -> Handle:
        """Gather the shards of all ranks into `full`. See `dbuffer.all_gather`."""
        return all_gather([self], stream=stream, after=after)

    def reduce_scatter(
        self,
        *,
        op: Op = "avg",
        divide: float | None = None,
        accumulate: bool = False,
        stream: Any = None,
        after: Iterable[Any] | None = None,
    ) -> Handle:
        """Reduce `full` over the ranks, each rank's slice into its shard. See `dbuffer.reduce_scatter`."""
        return reduce_scatter([self], op=op, divide=divide, accumulate=accumulate, stream=stream, after=after)

    def all_reduce(
        self,
        *,
        op: Op = "avg",
        divide: float | None = None,
        stream: Any = None,
        after: Iterable[Any] | None = None,
    ) -> Handle:
        """Reduce the shard over the replicas, in place. See `dbuffer.all_reduce`."""
        return all_reduce([self], op=op, divide=divide, stream=stream, after=after)

    def wait(self) -> None:
        """Wait for the collective under way, if there is one."""
        if self.memory.in_flight is not None:
            self.memory.in_flight.wait()

    # -- the whole group at once: one call, whatever the number of tensors ------------------------------------------

    def zero_(self, of: Memory = "shard") -> Self:
        """Set shard or full to zero."""
        compat.zero(self._flats(of, "zero_"))
        return self

    def copy_(self, other: "DBuffer", of: Memory = "shard") -> Self:
        """Copy another buffer of this layout. Raises ValueError where layouts or dtypes differ."""
        mine, theirs = self._flats(of, "copy_"), self._partner(other, of, "copy_")
        if mine[0].dtype != theirs[0].dtype:
            raise ValueError(
                f"copy_: {self.name} holds {mine[0].dtype}, {other.name} {theirs[0].dtype}; use cast_from"
            )
        compat.copy(mine, theirs)
        return self

    def cast_from(self, other: "DBuffer", of: Memory = "shard") -> Self:
        """Copy another buffer of this layout, in this one's dtype. Raises ValueError where layouts differ."""
        compat.copy(self._flats(of, "cast_from"), self._partner(other, of, "cast_from"))
        return self

    def add_(self, other: "DBuffer", of: Memory = "shard", *, alpha: float = 1.0) -> Self:
        """Add `alpha` times another buffer of this layout, of any dtype. Raises ValueError where layouts differ."""
        compat.add(self._flats(of, "add_"), self._partner(other, of, "add_"), alpha)
        return self

    def mul_(self, factor: float | torch.Tensor, of: Memory = "shard") -> Self:
        """Multiply by a number, or by a tensor of one element (so that it need not leave the device)."""
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise ValueError(
                f"{self.name}: mul_ takes one number, got a tensor of shape {tuple(factor.shape)}"
            )
        compat.scale(self._flats(of, "mul_"), factor)
        return self

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Fill the shard from whole tensors that every rank holds. Communicates nothing.

        Args:
            tensors: for every name of the layout a plain tensor of its shape, any dtype and device.

        Raises:
            ValueError: a tensor missing, unknown, of another shape, or on meta; before anything is written.
        """
        self.memory.check_idle("load_full")
        views, slices = self.local_views, self.memory.geometry.slices
        if odd := sorted(slices.keys() ^ tensors.keys()):
            which = "is missing" if odd[0] in slices else "is not in the layout"
            raise ValueError(f"{odd[0]} {which}; expected {sorted(slices)}")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != slices[name].shape:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}; the layout says {slices[name].shape}")
            if isinstance(tensor, (DTensor, RaggedDTensor)):
                raise ValueError(
                    f"{name}: a {type(tensor).__name__}; expected a plain tensor, such as its full_tensor()"
                )
            if tensor.is_meta:
                raise ValueError(f"{name}: a meta tensor has no values")
        with torch.no_grad():
            held = [name for name, found in slices.items() if found.local_numel]
            sources = [self.memory.geometry.cut(name, tensors[name].detach()) for name in held]
            for name, source in zip(held, sources, strict=True) if self.memory.coded else ():
                views[name].copy_(source)
            if held and not self.memory.coded:
                compat.copy([views[name] for name in held], sources)
        return self

    def _flats(self, of: str, what: str) -> tuple[torch.Tensor, ...]:
        self.memory.check_idle(what)
        if of == "shard":
            self.memory.check_values(what)
            return self.shard
        if of != "full":
            raise ValueError(f"{self.name}: {what} acts on 'shard' or 'full', not {of!r}")
        self.memory.check_gathered_values(what)
        return self.memory.gathered.flats

    def _partner(self, other: "DBuffer", of: str, what: str) -> tuple[torch.Tensor, ...]:
        found = other._flats(of, what)
        if other.layout is not self.layout and other.layout != self.layout:
            raise ValueError(f"{what}: {self.name} and {other.name} have different layouts")
        return found


def all_gather(
    buffers: Sequence[DBuffer], *, stream: Any = None, after: Iterable[Any] | None = None
) -> Handle:
    """Gather the shards of all `buffers` into their gathered memory: one call, coalesced, over the shard axis.

    Gives each rank's wire form to all others: (N-1) * shard bytes in the wire's dtype sent by each rank. Buffers
    without gathered memory get it first, on `stream`. World size 1 communicates nothing. After veScale-FSDP.

    Args:
        buffers: of one mesh and device, none busy; dtypes may differ.
        stream: where to launch. Defaults to the current stream; CPU has none.
        after: events that must have completed first. None: all that the current stream holds. Empty: nothing.

    Raises:
        ValueError: no buffer, one twice, or of different meshes or devices.
        RuntimeError: one has a collective under way, or the collective could not start.
    """
    return prepare_gather(buffers).start(stream, after)


def prepare_gather(buffers: Sequence[DBuffer], *, transport: TransportChoice | None = None) -> Gather:
    """An `all_gather` of these buffers, checked now, to be started often: `prepared.start(stream, after)`.

    Args:
        buffers: as for `all_gather`.
        transport: for this gather. Defaults to the buffers' own.

    Raises:
        ValueError: as `all_gather`, or an unknown transport.
    """
    return Gather([buffer.memory for buffer in buffers], transport)


def prepare_reduction(
    buffers: Sequence[DBuffer],
    *,
    op: Op = "avg",
    divide: float | None = None,
    transport: TransportChoice | None = None,
    group: dist.ProcessGroup | None = None,
) -> ReduceScatter:
    """A `reduce_scatter` of these buffers, checked now: `prepared.start(accumulate=..., stream=..., after=...)`.

    Args:
        buffers, op, divide: as for `reduce_scatter`.
        transport: for this reduction. Defaults to the buffers' own.
        group: a process group of the shard axis's ranks to reduce in, so that gathers and reductions run at the same
            time. Defaults to the axis's own.

    Raises:
        ValueError: as `reduce_scatter`, but for `accumulate`; an unknown transport; a group of other ranks.
    """
    return ReduceScatter([buffer.memory for buffer in buffers], op, divide, transport, group)


def reduce_scatter(
    buffers: Sequence[DBuffer],
    *,
    op: Op = "avg",
    divide: float | None = None,
    accumulate: bool = False,
    stream: Any = None,
    after: Iterable[Any] | None = None,
) -> Handle:
    """Reduce the gathered memory over the shard axis; each rank's shard gets its slice. One call, coalesced.

    Each rank sends (N-1)/N of its gathered memory, in its dtype, by a reduce-scatter; where the buffers have a
    reduction form, N-1 rows in that form by an all-to-all, which are summed in fp32. That memory's contents are used
    up. Padding of the shard is zero afterwards, whatever was in the padding of the gathered memory. World size 1
    communicates nothing.

    Args:
        buffers: of one mesh and device, with gathered memory, none busy.
        op: "avg" or "sum" over the ranks of the shard axis. Integers have no average.
        divide: with "sum": divide the sum by this, in the shard's dtype.
        accumulate: add to the shard instead of replacing it.
        stream, after: as for `all_gather`.

    Raises:
        ValueError: an unknown op, `divide` with "avg" or not positive, a dtype that cannot be reduced so, `accumulate`
            where shard and full are the same memory, or buffers that do not go together.
        RuntimeError: released, a collective is under way, or the collective could not start.
    """
    prepared = prepare_reduction(buffers, op=op, divide=divide)
    return prepared.start(accumulate=accumulate, stream=stream, after=after)


def all_reduce(
    buffers: Sequence[DBuffer],
    *,
    op: Op = "avg",
    divide: float | None = None,
    stream: Any = None,
    after: Iterable[Any] | None = None,
) -> Handle:
    """Reduce the shards over the replicate axis, in place: one all-reduce, coalesced, in the shards' dtype.

    Each rank sends 2 (R-1)/R of its shards for R replicas.

    Args:
        buffers: of one mesh, device and dtype, none busy.
        op, divide: as for `reduce_scatter`, over the replicas.
        stream, after: as for `all_gather`.

    Raises:
        ValueError: the mesh has no replicate axis, or as for `reduce_scatter`.
        RuntimeError: one has a collective under way, or the collective could not start.
    """
    return AllReduce([buffer.memory for buffer in buffers], op, divide).start(stream=stream, after=after)
