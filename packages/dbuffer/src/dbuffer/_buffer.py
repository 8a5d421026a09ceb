"""DBuffer: the flat memory of a group of tensors, sharded over ranks and gathered in place. After veScale-FSDP.

    rank 0   shard [  S ]----.
    rank 1   shard [  S ]----+--all-gather-->  full [  S  |  S  |  S  ]   on every rank, while it is needed
    rank 2   shard [  S ]----'                       [ view a ][view b]    one view per tensor, in its shape

Gradients go the other way: into the views of a second buffer, and from its gathered memory, reduced, into its shard.
The collectives are `Gather`, `ReduceScatter` and `AllReduce`.
"""

import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from layout_planner import Layout
from ragged_shard import RaggedDTensor
from ragged_shard.device import device_layer, is_cpu
from ragged_shard.dist import equal_on_all_ranks, gather_from_ranks, raise_on_all_ranks, same_on_all_ranks

from . import _torch_compat as compat
from ._encoding import ReductionForm, WireForm
from ._mesh import view_mesh
from ._order import COMPARE_VARIABLE, compare_mode
from .memory.gathered import Flats, GatheredMemory, NeighborSlices, slices
from .memory.geometry import alignment_problem, first_difference, geometry_of
from .memory.recycler import Recycler, Scratch, ShardMemory, hold_forever, shared_recycler
from .transport import Pairs, TransportChoice, arena_of, resolved


class DBuffer:
    """Memory of a group of tensors: this rank's shard, and the gathered whole while it is needed.

    Serves parameters (gather: shard -> full) and gradients (reduce: full -> shard). Has one storage per segment and
    role, none per tensor. Gathered memory comes from a recycler; a new buffer has none.

    Args:
        layout: positions of the tensors, planned for as many ranks as `shard_dim` has.
        mesh: 1-D, or 2-D with `replicate_dim`.
        dtype: dtype of the shard.
        device: device of the gathered memory. Defaults to the current device of the mesh's type.
        shard_device: "cpu" keeps the shard in CPU memory while `device` computes (offload): a gather copies it
            into the gathered memory's slice, a reduction copies the reduced slice back. On CUDA synchronize with
            an event recorded after the reduction's `wait` before the CPU reads the shard. Defaults to `device`.
        pin_memory: page-lock a shard on the CPU, so that these copies do not block.
        full_dtype: dtype of the gathered memory: of compute, or of reductions. Defaults to `dtype`.
        shard_dim: mesh axis that shards, by name or index.
        replicate_dim: mesh axis over which shards are copies (HSDP), or None.
        wire: format of gathers. Defaults to the full dtype: no copy if dtypes agree, else one cast. With
            `BlocksAtRest` the shard holds codes and scales of values in `dtype`.
        reduction: format of reductions, sent by one all-to-all, such as `CastReduction()`. None: the full dtype, by
            a reduce-scatter.
        transport: "auto", "collectives", "peer_memory" (see `transport`), or a function that makes a `Transport` of a
            process group. Defaults to the environment variable DBUFFER_TRANSPORT, else "auto".
        recycler: source of the gathered memory. Defaults to the one that all buffers of this device share.
        alias: with one rank and one dtype, let shard and full be the same memory. False: keep them separate.
        name: name of the group in errors. Defaults to its first tensor's.
        check_ranks: compare the layouts of all ranks: one all-reduce of 64 bytes on each axis of the mesh.
            False where it is known that they agree, and with torch's fake process group.
        in_common: other values that all ranks must share, by name, such as versions. Compared in the same all-reduce.
        hint: a text in which ranks may differ, such as a digest of values; see `alike`. Compared in the same
            all-reduce; where it differs a second one compares the rest.

    Attributes:
        name: name of the group in errors.
        layout: positions of the tensors.
        geometry: positions of the tensors on this rank.
        mesh_view: axes of the mesh in use.
        layer: streams and events of the device.
        device, shard_device: devices of the gathered memory, with index, and of the shard.
        dtype, full_dtype: dtypes of the shard and of the gathered memory.
        aliased: whether shard and gathered memory are the same.
        alike: whether all ranks passed the same `hint`; True without `check_ranks`.
        offloaded: whether the shard is in CPU memory while the device computes elsewhere.
        reductions: number of reductions encoded so far. Stochastic rounding depends on it: a resumed run sets it, on
            every rank to the same number, to continue with the bits of the run before.
        retired: whether a failed collective may still write the memory. It is never used again.
        in_flight: the handle of a collective that has not been waited for, or None.
        wire, reduction, transport, casts, shard_memory, gathered, encoder, neighbor, scratch, recycler, coded: for the
            collectives only.

    Raises:
        ValueError: mesh and layout of different sizes, a dtype or device that cannot be used, a slice or tensor
            that is not on a 16-byte boundary in every dtype in use, or ranks with different arguments. With
            `check_ranks` on every rank, with the first difference.
        TypeError: `layout` or `mesh` has another type.
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
        hint: str = "",
    ) -> None:
        self.mesh_view = view = view_mesh(mesh, shard_dim, replicate_dim)
        self.layer = layer = device_layer(device or mesh.device_type)
        self.device = layer.device
        self.shard_device = layer.device if shard_device is None else torch.device(shard_device)
        self.offloaded = self.shard_device != layer.device
        self.layout, self.dtype, self.full_dtype = layout, dtype, full_dtype or dtype
        self.casts = self.full_dtype != dtype
        self.wire, self.reduction, self.transport = wire, reduction, resolved(transport)
        self.coded = wire is not None and wire.keeps_codes
        self.alike = True
        problem = self._problem()
        if check_ranks and view.size * view.num_replicas > 1:
            self._compare(in_common or {}, hint, problem)
        if problem is not None:
            raise problem
        self.name = name or layout.tensors[0].name
        self.recycler = recycler or shared_recycler(layer.device)
        if self.recycler.device != layer.device:
            raise ValueError(f"{self.name}: the recycler is on {self.recycler.device}, not {layer.device}")
        self.geometry = geometry_of(layout, view.rank)
        self.aliased = alias and wire is None and not self.casts and not self.offloaded and view.size == 1
        self._allocate(pin_memory and self.offloaded)
        self.neighbor: NeighborSlices | None = None
        self.scratch: list[Scratch] = []
        self.reductions = 0
        self.in_flight: Any = None
        self.retired = False

    def _allocate(self, pin_memory: bool) -> None:
        geometry, wire, recycler = self.geometry, self.wire, self.recycler
        on_host = is_cpu(self.device) and not self.layer.asynchronous
        if on_host and (arena := arena_of(self.mesh_view.group, self.transport)) is not None:
            recycler.take_from(arena)
        if wire is not None and wire.keeps_codes:
            self.shard_memory = wire.shard_memory(geometry, self.dtype, self.shard_device)
        else:
            self.shard_memory = ShardMemory(geometry, self.dtype, self.shard_device, pin_memory)
        alias = self.shard_memory.flats if self.aliased else None
        self.gathered = GatheredMemory(geometry, self.full_dtype, recycler, alias)
        # None if gathers have no wire form.
        self.encoder = None if wire is None else wire.encoder(geometry, self.gathered, recycler)
        self._sent: Flats = ()  # in the last gather without one
        self._pairs: Pairs = []

    def _problem(self) -> Exception | None:
        """The error that the class documents, as far as this rank can see it."""
        layout, view, device = self.layout, self.mesh_view, self.device
        argument: object = layout
        if not isinstance(argument, Layout):
            return TypeError(
                f"layout is a {type(argument).__name__}; expected a layout_planner.Layout (layout_planner.plan)"
            )
        first = layout.tensors[0].name
        for dtype in (self.dtype, self.full_dtype):
            if not isinstance(dtype, torch.dtype) or dtype.is_complex or dtype == torch.bool:
                return ValueError(f"dtype {dtype}: buffers hold real numbers, such as torch.float32")
        if layout.world_size != view.size:
            return ValueError(
                f"{first}: the layout was planned for {layout.world_size} ranks, mesh axis "
                f"{view.shard_axis} has {view.size}; plan with world_size={view.size}"
            )
        if device.type != view.mesh.device_type:
            return ValueError(
                f"{first}: device {device} on a mesh of {view.mesh.device_type}; they must be of one kind"
            )
        if self.offloaded and not is_cpu(self.shard_device):
            return ValueError(f"{first}: shard_device {self.shard_device} is neither {device} nor the CPU")
        if self.offloaded and self.coded:
            return ValueError(
                f"{first}: codes at rest lie where they are read back, not on {self.shard_device}"
            )
        try:
            compare_mode()  # a variable of the environment
            sent = () if self.wire is None else self.wire.dtypes(self.dtype, self.full_dtype)
            if self.reduction is not None:
                self.reduction.check(self.full_dtype)
        except ValueError as error:
            return error
        text = alignment_problem(layout, (self.dtype, self.full_dtype, *sent))
        return None if text is None else ValueError(text)

    def _compare(self, in_common: Mapping[str, str], hint: str, problem: Exception | None) -> None:
        """Raise, on all ranks, the error of any rank, or of ranks that differ."""
        layout = self.layout if isinstance(self.layout, Layout) else None
        how = f"wire {_name(self.wire)}, reduction {_name(self.reduction)}, transport {_name(self.transport)}"
        how += f", {COMPARE_VARIABLE} {os.environ.get(COMPARE_VARIABLE)}"
        settings = f"dtype {self.dtype}, full dtype {self.full_dtype}, {how}"
        fingerprint = "" if layout is None else layout.fingerprint()
        groups = self.mesh_view.groups
        text = f"{fingerprint} {settings} {problem!r} {[*in_common.items()]}"
        self.alike = equal_on_all_ranks(text + hint, groups)
        if self.alike or equal_on_all_ranks(text, groups):
            return
        same_on_all_ranks(in_common, groups)
        raise_on_all_ranks(problem, "DBuffer", groups=groups)
        assert layout is not None
        for rank, other_layout, other_settings in gather_from_ranks(
            (dist.get_rank(), layout.to_json(), settings), groups
        ):
            difference = first_difference(layout, Layout.from_json(other_layout))
            if difference is None and other_settings != settings:
                difference = f"{settings} here, {other_settings} there"
            if difference is not None:
                raise ValueError(
                    f"the ranks do not agree: {difference} (rank {rank}); plan from the same tensors everywhere"
                )
        # All equal to this rank's: so the others differ from each other, which cannot be.
        raise AssertionError("digests differ, yet everything that they were made of is equal")

    # -- contents ---------------------------------------------------------------------------------------------------

    @property
    def shard(self) -> tuple[torch.Tensor, ...]:
        """This rank's slices, 1-D, `shard_size` elements of `dtype`, one a segment; padding in them is zero.

        With `BlocksAtRest`: one row of uint8, the codes of each segment, then the scales of all.

        Raises:
            RuntimeError: after `give_shard`.
        """
        flats = self.shard_memory.flats
        if not flats:
            self.check_shard("shard")
        return flats

    @property
    def full(self) -> tuple[torch.Tensor, ...]:
        """The gathered memory, 1-D, `world_size * shard_size` elements of `full_dtype`, one a segment.

        Raises:
            RuntimeError: after `release`.
            ValueError: the wire form keeps gathered tensors elsewhere.
        """
        self.check_gathered("full")
        if not self.gathered.flats:
            raise ValueError(
                f"{self.name}: full does not apply, since the wire form keeps gathered tensors elsewhere"
            )
        return self.gathered.flats

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """One tensor for each of the layout's, in its shape, in the memory of `full`. Always the same objects.

        Raises:
            RuntimeError: after `release`.
        """
        self.check_gathered("views")
        return self.gathered.views

    @property
    def empty_views(self) -> Mapping[str, torch.Tensor]:
        """The objects of `views`, also while the buffer is released: to build parameters on, once.

        They have shape and dtype but no memory: reading one while released crashes the process, as torch does not
        check.
        """
        return self.gathered.views

    @property
    def local_views(self) -> Mapping[str, torch.Tensor]:
        """This rank's slice of each tensor, of shape `(local_prefix, *shape[len(dims):])`, in the memory of `shard`.

        A slice may be empty; the slice of a 0-d tensor has shape (1,) or (0,). The same objects while there is a shard.
        `geometry.cut(name, full)` is the slice of a whole tensor to copy into it. With `BlocksAtRest` each is a
        `BlockQuantizedTensor`: `copy_` into one quantizes values.

        Raises:
            RuntimeError: after `give_shard`.
        """
        if not self.shard_memory.flats:
            self.check_shard("local_views")
        return self.shard_memory.views

    def other_shard(
        self, dtype: torch.dtype, device: torch.device, *, pin_memory: bool = False
    ) -> ShardMemory:
        """Uninitialised memory laid out as the shard, of another dtype or on another device: to copy the shard into."""
        return ShardMemory(self.geometry, dtype, device, pin_memory, zeroed=False)

    def ragged_tensors(self, *, requires_grad: bool = False) -> dict[str, RaggedDTensor]:
        """The group as distributed tensors in the shard's memory: writes to a tensor are writes to the buffer.

        Placed as `RaggedShard` on the shard axis and `Replicate` on the other. Communicates nothing.
        """
        view, tensors = self.mesh_view, {}
        for name, local in self.local_views.items():
            ragged, shape = self.geometry.placements[name], self.geometry.slices[name].shape
            placements = [
                ragged if axis == view.shard_axis else Replicate() for axis in range(view.mesh.ndim)
            ]
            tensor = RaggedDTensor.from_local(local, view.mesh, placements, shape=shape)
            tensors[name] = tensor.requires_grad_(requires_grad)
        return tensors

    # -- memory -----------------------------------------------------------------------------------------------------

    def give_shard(self) -> None:
        """Detach the shard: its memory belongs to the tensors that view it and is freed with the last of them.

        For gradients, which users drop at any time. No effect if shard and full are the same memory.
        """
        if self.in_flight is not None:
            self.check_idle("give_shard")
        if not self.aliased:
            self.shard_memory.give()

    def new_shard(self) -> None:
        """Allocate a shard after `give_shard`, uninitialised, padding too. No effect if there is one.

        Page-locked memory is reused if no tensor holds the last shard; the host then waits for the device, once for all
        buffers whose shards were dropped before.
        """
        if not self.shard_memory.flats:
            self.shard_memory.allocate()

    def renew_shard(self) -> None:
        """Replace the shard by a new, zeroed one; the memory of the last one belongs to the tensors that view it.

        `local_views` are new, and `empty_views` too if shard and full are the same memory.
        """
        self.check_idle("renew_shard")
        self.shard_memory.give()
        self.shard_memory.allocate(zeroed=True)
        if self.aliased:
            self.gathered = GatheredMemory(
                self.geometry, self.full_dtype, self.recycler, self.shard_memory.flats
            )
        self.forget_encoding()

    def materialize(self) -> None:
        """Allocate `full`, uninitialised, for use on the current stream. No effect if it is allocated."""
        self.gathered.materialize()

    def begin_gather(self) -> Pairs:
        """Allocate `full`, and prepare a gather: (receive, send) pairs. None if shard and full are the same memory."""
        self.gathered.materialize()
        if self.aliased:
            return []
        shards, own = self.shard_memory.flats, self.gathered.own
        if not shards:
            self.check_shard("all_gather")
        if self.encoder is not None:
            return self.encoder.encode(shards)
        sent = shards
        if self.casts or self.offloaded:
            compat.copy(own, shards, non_blocking=True)
            sent = own
        if sent is not self._sent:
            self._pairs = list(zip(self.gathered.raw, sent, strict=True))
            self._sent = sent  # last: after an interrupt the next gather lists the pairs again
        return self._pairs

    def release(self) -> None:
        """Free `full`; views are valid again after the next gather. No effect if it is released.

        On CUDA call it on the stream of the last use. If shard and full are one memory (`aliased`) that memory stays,
        and only reading through `full` and `views` ends.

        Raises:
            RuntimeError: a collective is under way.
        """
        if self.in_flight is not None:
            self.check_idle("release")
        if self.encoder is not None:
            self.encoder.release()
        self.gathered.release()

    def keep_gathered(self, enable: bool) -> None:
        """Let `release` keep the memory of `full`, so that it has the same addresses after each gather.

        Raises:
            ValueError: the wire form keeps gathered tensors elsewhere.
        """
        if enable and not self.gathered.flats:
            raise ValueError(
                f"{self.name}: keep_gathered does not apply, since gathers do not write into `full`"
            )
        if not self.aliased:
            self.gathered.keep(enable)

    def shrink(self, group: dist.ProcessGroup) -> None:
        """Release `full`, but keep this rank's slice of it among the ranks of a smaller group, for the next gather.

        The next `Gather` then runs over that group, whose ranks must all have shrunk. A slice is 1/size of the whole.
        FSDP2's reshard to a smaller world. No effect if shard and full are the same memory.

        Args:
            group: consecutive ranks of the shard axis; its size divides that axis's.

        Raises:
            ValueError: the size does not divide, or the wire form keeps gathered tensors elsewhere.
            RuntimeError: released, or a collective is under way.
        """
        self.check_idle("shrink")
        self.check_gathered("shrink")
        if not self.gathered.flats:
            raise ValueError(
                f"{self.name}: shrink does not apply, since the wire form keeps gathered tensors elsewhere"
            )
        if self.mesh_view.size % group.size():
            raise ValueError(
                f"{self.name}: cannot shrink to {group.size()} ranks, which does not divide {self.mesh_view.size}"
            )
        if not self.aliased:
            own = slices(self.gathered.raw, group.rank(), group.size())
            kept = tuple(flat.clone() for flat in own)
            self.neighbor = NeighborSlices(kept, group, self.layer.record())
        self.release()

    def forget_encoding(self) -> None:
        """Encode the shard again at the next gather, even if its version counter has not changed.

        For writes that torch does not see, such as a custom kernel's. Only quantizing forms cache anything.
        """
        if self.encoder is not None:
            self.encoder.forget()

    def forget_neighbors(self) -> None:
        """Drop the slices that `shrink` kept: the next gather uses the shards."""
        self.check_idle("forget_neighbors")
        self.neighbor = None

    def wait(self) -> None:
        """Wait for the collective under way, if there is one."""
        if self.in_flight is not None:
            self.in_flight.wait()

    def retire(self) -> None:
        """Never use this memory again: a failed collective may still write there."""
        self.retired = True
        self.gathered.retire()
        hold_forever(self.shard_memory.flats)
        if self.encoder is not None:
            self.encoder.retire()
        for scratch in self.scratch:
            scratch.retire()
        if self.neighbor is not None:
            hold_forever(self.neighbor.flats)

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_gathered(self, what: str) -> None:
        """Raises RuntimeError if there is no gathered memory."""
        if not self.gathered.present:
            raise RuntimeError(f"{self.name}: {what} after release; gather it or call materialize first")

    def check_shard(self, what: str) -> None:
        """Raises RuntimeError if the shard was detached."""
        if not self.shard_memory.flats:
            raise RuntimeError(f"{self.name}: {what} after give_shard; call new_shard first")

    def check_idle(self, what: str) -> None:
        """Raises RuntimeError if a collective is under way."""
        if self.in_flight is not None:
            raise RuntimeError(
                f"{self.name}: {what} while a collective is under way; call wait() on its handle first"
            )


def _name(choice: object) -> str:
    """A description of a choice without addresses, the same on all ranks."""
    if isinstance(choice, str) or is_dataclass(choice):
        return str(choice)
    return getattr(choice, "__qualname__", type(choice).__qualname__)
