"""DBuffer: the flat memory of one group, cut over ranks and gathered in place. After veScale-FSDP.

    rank 0   shard [  S ]----.
    rank 1   shard [  S ]----+--all-gather-->  full [  S  |  S  |  S  ]   on every rank, for as long as it is needed
    rank 2   shard [  S ]----'                       [ view a ][view b]    one view a tensor, in its own shape

Gradients go the other way: into the views of a buffer of their own, and from its full memory, reduced, into its
shard.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from layout_planner import Layout
from ragged_shard import RaggedDTensor, RaggedShard

from . import _collectives, _construct, _fill
from . import _torch_compat as compat
from ._device import DeviceLayer, device_layer
from ._geometry import gaps_of, pieces_of
from ._handle import Handle
from ._mesh import MeshView, view_mesh
from ._recycler import Recycler, check_aligned, shared_recycler
from ._share import Share, cut_share
from ._wire import CastOnWire, WireForm

Part = Literal["shard", "full"]


class DBuffer:
    """The memory of a group of tensors: this rank's shard always, the gathered whole while it is needed.

    The same class serves parameters (gather: shard -> full) and gradients (reduce: full -> shard). There is one
    storage per segment and role, none per tensor. The full memory comes from a recycler and is absent after
    construction.

    Args:
        layout: where the tensors lie; planned for as many ranks as `shard_dim` has.
        mesh: of one dimension, or of two with `replicate_dim`.
        dtype: of the shard.
        device: of everything, but see `shard_device`; None: the mesh's kind of device, the current one.
        shard_device: "cpu" keeps the shard in the CPU's memory while `device` computes (offload): a gather copies it
            into the full buffer's own slice, a reduction copies the reduced slice back. On CUDA synchronise with an
            event recorded after the reduction's `wait` before the CPU reads the shard. None: `device`.
        pin_memory: page-lock a shard on the CPU, so that these copies do not block.
        full_dtype: of the gathered buffer: what is computed with, or what gradients are reduced in. None: `dtype`.
        shard_dim: the mesh dimension that cuts, by name or index.
        replicate_dim: the mesh dimension over which shards are copies (HSDP), or None.
        wire: what travels in a gather. None: `CastOnWire`, the full dtype.
        recycler: where the full memory comes from. None: the one that all buffers of this device share.
        alias: with one rank and one dtype, let shard and full be the same memory. False: keep them apart.
        name: of the group, for errors. None: its first tensor's.
        check_ranks: compare the layouts of all ranks: one all-gather of 32 bytes (HSDP: and one of 32 a rank of
            the shard dimension). False where it is known that they agree, and with torch's fake process group.

    Raises:
        ValueError: mesh and layout of different sizes, a dtype or device that cannot be, a slice or tensor that
            is not on a 16-byte boundary in every dtype in use, or ranks that were given different things. With
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
        recycler: Recycler | None = None,
        alias: bool = True,
        name: str | None = None,
        check_ranks: bool = True,
    ) -> None:
        self.mesh_view: MeshView = view_mesh(mesh, shard_dim, replicate_dim)
        self.layer: DeviceLayer = device_layer(device or mesh.device_type)
        self.layout = layout
        self.dtype = dtype
        self.full_dtype = full_dtype or dtype
        self._wire: WireForm = wire or CastOnWire()
        _construct.check(self, check_ranks)
        self.name = name or layout.tensors[0].name
        self.casts = self.full_dtype != dtype
        self.shard_device = self.layer.device if shard_device is None else torch.device(shard_device)
        self.apart = self.shard_device != self.layer.device
        if self.apart and self.shard_device.type != "cpu":
            raise ValueError(
                f"{self.name}: shard_device {shard_device} is neither {self.layer.device} nor the CPU"
            )
        self._pinned = pin_memory and self.apart
        self.aliased = (
            alias and not self.casts and not self.apart and self.mesh_view.size == 1 and wire is None
        )
        self._share: Share | None = None
        self._recycler = recycler or shared_recycler(self.device)
        if self._recycler.device != self.device:
            raise ValueError(f"{self.name}: the recycler is on {self._recycler.device}, not {self.device}")
        self._in_flight: Handle | None = None
        self._materialized = True
        self._pieces = pieces_of(layout, self.mesh_view.rank)
        self._build()

    def _build(self) -> None:
        """Allocate the shard, and make every tensor that will ever view the full memory."""
        rank = self.mesh_view.rank
        sizes = [segment.shard_size for segment in self.layout.segments]
        self._shard = self._new_shards(torch.zeros)
        self._storages: list[tuple[torch.UntypedStorage, int]] = []  # and what each needs, in bytes
        if self.aliased:
            self._full = self._raw_full = self._own = self._shard
        else:
            bytes_per_element = self.mesh_view.size * self.full_dtype.itemsize
            self._storages = [
                (torch.UntypedStorage(0, device=self.device), size * bytes_per_element) for size in sizes
            ]
            self._materialized = False
            self.materialize()
            # Gathers write through tensors with a version counter of their own: autograd sees no change.
            self._full, self._raw_full = self._flat_tensors(), self._flat_tensors()
            self._own = tuple(
                raw.narrow(0, rank * size, size) for raw, size in zip(self._raw_full, sizes, strict=True)
            )
        self._views = MappingProxyType(
            {p.name: self._full[p.segment].narrow(0, p.offset, p.numel).view(p.shape) for p in self._pieces}
        )
        self._gap_ranges = gaps_of(self.layout, self._pieces)
        self._view_shard()
        self.release()

    def _new_shards(self, make: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        where: dict[str, Any] = {"device": self.shard_device, "pin_memory": self._pinned}
        shards = tuple(
            make(segment.shard_size, dtype=self.dtype, **where) for segment in self.layout.segments
        )
        for shard in shards:
            check_aligned(shard.data_ptr())
        return shards

    def _view_shard(self) -> None:
        shards = self._shard
        # Where the shard is written by a copy that may still be under way, padding is zeroed before it travels.
        padded = self._own if self.apart else shards
        self._gaps = [padded[s].narrow(0, begin, n) for s, begin, n in self._gap_ranges]
        self._local_views = MappingProxyType(
            {
                p.name: shards[p.segment].narrow(0, p.begin, p.local_numel).view(p.local_shape)
                for p in self._pieces
            }
        )

    def count_users(self) -> int:
        """How many tensors hold the full memory: this buffer's own, and autograd's for a backward to come."""
        return sum(compat.users(storage) for storage, _ in self._storages)

    def _flat_tensors(self) -> tuple[torch.Tensor, ...]:
        empty = torch.empty(0, dtype=self.full_dtype, device=self.device)
        return tuple(
            empty.detach().clone().set_(storage, 0, (nbytes // self.full_dtype.itemsize,), (1,))
            for storage, nbytes in self._storages
        )

    # -- what is in it ----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where shard and full are, with index."""
        return self.layer.device

    @property
    def shard(self) -> tuple[torch.Tensor, ...]:
        """This rank's slices, 1-D, `shard_size` elements of `dtype`, one a segment; padding in them is zero.

        Raises:
            RuntimeError: given away.
        """
        self._check_shard("shard")
        return self._shard

    @property
    def full(self) -> tuple[torch.Tensor, ...]:
        """The gathered buffers, 1-D, `world_size * shard_size` elements of `full_dtype`, one a segment.

        Raises:
            RuntimeError: released.
        """
        self._check_materialized("full")
        return self._full

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """One tensor for each of the layout's, in its own shape, in the memory of `full`. Always the same objects.

        Raises:
            RuntimeError: released.
        """
        self._check_materialized("views")
        return self._views

    @property
    def resting_views(self) -> Mapping[str, torch.Tensor]:
        """The objects of `views`, also while the buffer is released: to build parameters on, once.

        They have shape and dtype but no memory: reading one while released crashes the process, as torch does not
            check.
        """
        return self._views

    @property
    def local_views(self) -> Mapping[str, torch.Tensor]:
        """This rank's part of each tensor, of shape `(local_prefix, *shape[len(dims):])`, in the memory of `shard`.

        A part may be empty; that of a 0-d tensor has shape (1,) or (0,). The same objects while there is a shard.

        Raises:
            RuntimeError: the shard was given away.
        """
        self._check_shard("local_views")
        return self._local_views

    @property
    def materialized(self) -> bool:
        """Whether `full` has memory."""
        return self._materialized

    @property
    def busy(self) -> bool:
        """Whether a collective was started and not yet waited for."""
        return self._in_flight is not None

    def ragged_tensors(self, *, requires_grad: bool = False) -> dict[str, RaggedDTensor]:
        """The group as distributed tensors that share the shard's memory: what is written to one is in the buffer.

        Placed as `RaggedShard` on the shard dimension and `Replicate` on the other. Communicates nothing.
        """
        return {
            piece.name: RaggedDTensor.from_local(
                self._local_views[piece.name],
                self.mesh_view.mesh,
                self.placements(piece.name),
                shape=piece.shape,
            ).requires_grad_(requires_grad)
            for piece in self._pieces
        }

    def placements(self, tensor: str) -> tuple[Any, ...]:
        """How a tensor of the layout lies over the mesh. Raises KeyError where there is none of that name."""
        ragged = RaggedShard(dims=self.layout.local_dims(tensor), local_units=self.layout.local_units(tensor))
        dims = range(self.mesh_view.mesh.ndim)
        return tuple(ragged if dim == self.mesh_view.shard_dim else Replicate() for dim in dims)

    # -- memory -----------------------------------------------------------------------------------------------------

    def give_shard(self) -> None:
        """Let go of the shard: its memory belongs to whoever still holds tensors on it, and ends with them.

        For gradients, which their users drop when they like. Nothing where shard and full are one memory.
        """
        self._check_idle("give_shard")
        if not self.aliased:
            self._shard, self._gaps, self._local_views = (), [], MappingProxyType({})

    def new_shard(self) -> None:
        """Give the buffer a shard again after `give_shard`; uninitialised, padding too. Nothing where it has one."""
        if not self._shard:
            self._shard = self._new_shards(torch.empty)
            self._view_shard()

    def materialize(self) -> None:
        """Give `full` memory, uninitialised, for use on the current stream. Nothing where it has some."""
        if self._materialized:
            return
        for storage, nbytes in self._storages:
            self._recycler.lend(storage, nbytes)
        self._materialized = True

    def release(self) -> None:
        """Take `full`'s memory away: zero bytes are left, and views are valid again after the next gather.

        On CUDA call it on the stream of the last use. Nothing where it is released. Where shard and full are one
        memory (`aliased`) that memory stays, and only reading through `full` and `views` ends.

        Raises:
            RuntimeError: a collective is under way.
        """
        self._check_idle("release")
        if not self._materialized:
            return
        for storage, _ in self._storages:
            self._recycler.take_back(storage)
        self._materialized = False

    def shrink(self, group: dist.ProcessGroup) -> None:
        """Release `full`, but keep this rank's share of it among the ranks of a smaller group, for the next gather.

        The next `all_gather` then runs over that group, whose ranks must all have shrunk: it takes more memory than a
        shard, 1/size of the whole, and stays among neighbours. Reshard to a smaller world of FSDP2. Nothing where
        shard and full are one memory.

        Args:
            group: of ranks of the shard dimension; its size divides that dimension's.

        Raises:
            ValueError: the size does not divide.
            RuntimeError: released, or a collective is under way.
        """
        self._check_idle("shrink")
        self._check_materialized("shrink")
        if self.mesh_view.size % group.size():
            raise ValueError(
                f"{self.name}: cannot shrink to {group.size()} ranks, which does not divide {self.mesh_view.size}"
            )
        if not self.aliased:
            self._share = cut_share(self._raw_full, group, self.layer)
        self.release()

    def forget_share(self) -> None:
        """Drop what `shrink` kept: the next gather takes the shards again."""
        self._share = None

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_gather(self, *, stream: Any = None, after: Iterable[Any] | None = None) -> Handle:
        """Gather the shards of all ranks into `full`; see `dbuffer.all_gather`."""
        return _collectives.all_gather([self], stream=stream, after=after)

    def reduce_scatter(
        self,
        *,
        op: _collectives.Op = "avg",
        divide: float | None = None,
        accumulate: bool = False,
        stream: Any = None,
        after: Iterable[Any] | None = None,
    ) -> Handle:
        """Reduce `full` over the ranks into the shard; see `dbuffer.reduce_scatter`."""
        return _collectives.reduce_scatter(
            [self], op=op, divide=divide, accumulate=accumulate, stream=stream, after=after
        )

    def all_reduce(
        self,
        *,
        op: _collectives.Op = "avg",
        divide: float | None = None,
        stream: Any = None,
        after: Iterable[Any] | None = None,
    ) -> Handle:
        """Reduce the shard over the replicas, in place; see `dbuffer.all_reduce`."""
        return _collectives.all_reduce([self], op=op, divide=divide, stream=stream, after=after)

    def wait(self) -> None:
        """Wait for the collective that is under way, if there is one: `Handle.wait` for whoever has lost the handle."""
        if self._in_flight is not None:
            self._in_flight.wait()

    # -- the whole group at once: one call, whatever the number of tensors ------------------------------------------

    def zero_(self, part: Part = "shard") -> Self:
        """Set shard or full to zero."""
        compat.zero(self._flat(part, "zero_"))
        return self

    def copy_(self, other: "DBuffer", part: Part = "shard") -> Self:
        """Copy another buffer of this layout. Raises ValueError where layouts or dtypes differ."""
        compat.copy(self._flat(part, "copy_"), self._partner(other, part, "copy_", same_dtype=True))
        return self

    def cast_from(self, other: "DBuffer", part: Part = "shard") -> Self:
        """Copy another buffer of this layout, in this one's dtype. Raises ValueError where layouts differ."""
        compat.copy(self._flat(part, "cast_from"), self._partner(other, part, "cast_from"))
        return self

    def add_(self, other: "DBuffer", part: Part = "shard", *, alpha: float = 1.0) -> Self:
        """Add `alpha` times another buffer of this layout, of any dtype. Raises ValueError where layouts differ."""
        compat.add(self._flat(part, "add_"), self._partner(other, part, "add_"), alpha)
        return self

    def mul_(self, factor: float | torch.Tensor, part: Part = "shard") -> Self:
        """Multiply by a number, or by a tensor of one element (so that it need not leave the device)."""
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise ValueError(
                f"{self.name}: mul_ takes one number, got a tensor of shape {tuple(factor.shape)}"
            )
        compat.scale(self._flat(part, "mul_"), factor)
        return self

    def _flat(self, part: str, what: str) -> tuple[torch.Tensor, ...]:
        self._check_idle(what)
        if part == "shard":
            return self.shard
        if part != "full":
            raise ValueError(f"{self.name}: {what} acts on part 'shard' or 'full', not {part!r}")
        self._check_materialized(what)
        return self._full

    def _partner(
        self, other: "DBuffer", part: str, what: str, *, same_dtype: bool = False
    ) -> tuple[torch.Tensor, ...]:
        tensors = other._flat(part, what)
        if other.layout is not self.layout and other.layout != self.layout:
            raise ValueError(f"{what}: {self.name} and {other.name} have different layouts")
        mine = self.dtype if part == "shard" else self.full_dtype
        if same_dtype and tensors[0].dtype != mine:
            raise ValueError(
                f"{what}: {self.name} holds {mine}, {other.name} {tensors[0].dtype}; use cast_from"
            )
        return tensors

    # -- contents ---------------------------------------------------------------------------------------------------

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Fill the shard from full tensors that every rank holds. Communicates nothing.

        Args:
            tensors: for every name of the layout a plain tensor of its shape, any dtype and device.

        Raises:
            ValueError: a tensor missing, unknown, of another shape, or on meta; before anything is written.
        """
        _fill.load_full(self, tensors)
        return self

    def load_from_rank(self, tensors: Mapping[str, torch.Tensor] | None, src: int = 0) -> Self:
        """Fill the shards of all ranks from full tensors that one rank holds.

        Sends each rank its own shard, one after the other, through a staging buffer of one shard; with replicas one
        broadcast of the shard follows. Beside it two small object exchanges.

        Args:
            tensors: as for `load_full` on the source, None elsewhere.
            src: the source's rank in the shard dimension, in replica 0.

        Raises:
            ValueError: as `load_full`, on every rank, before anything is sent.
        """
        _fill.load_from_rank(self, tensors, src)
        return self

    def initialize(
        self, init_fn: Callable[[str, torch.Tensor, torch.Generator], None], *, seed: int = 0
    ) -> Self:
        """Fill the shard with values that do not depend on the number of ranks. Communicates nothing.

        Tensor by tensor, and only those of which this rank holds a part, the full tensor is made on the device,
        filled and cut; so at most one full tensor is in memory. Random numbers come from a generator seeded by
        `seed` and the tensor's name.

        Args:
            init_fn: called as `init_fn(name, full, generator)`; fills `full` (the tensor's shape, the shard's
                dtype) in place.
            seed: equal on all ranks.
        """
        _fill.initialize(self, init_fn, seed)
        return self

    @classmethod
    def from_dtensors(
        cls,
        tensors: Mapping[str, Any],
        layout: Layout,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        **options: Any,
    ) -> Self:
        """A new buffer with the contents of distributed tensors: RaggedDTensors or torch's DTensors on the same mesh.

        A tensor that lies as the layout says is copied; any other is redistributed first (the collective that
        `ragged_shard.redistribute` uses for it).

        Args:
            tensors: for every name of the layout one of its shape.
            layout, mesh, dtype, options: as for `DBuffer`.

        Raises:
            ValueError: a tensor missing, unknown, of another shape or on another mesh; on every rank, before any
                is moved.
        """
        buffer = cls(layout, mesh, dtype=dtype, **options)
        _fill.load_dtensors(buffer, tensors)
        return buffer

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_materialized(self, what: str) -> None:
        if not self._materialized:
            raise RuntimeError(f"{self.name}: {what} after release; call all_gather or materialize first")

    def _check_shard(self, what: str) -> None:
        if not self._shard:
            raise RuntimeError(f"{self.name}: {what} after give_shard; call new_shard first")

    def _check_idle(self, what: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(
                f"{self.name}: {what} while a collective is under way; call wait() on its handle first"
            )
