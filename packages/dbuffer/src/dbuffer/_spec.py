"""What a buffer is to be, and what must hold before any of it is built: on this rank, and between ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from layout_planner import Layout
from ragged_shard import DeviceLayer, is_cpu

from ._mesh import MeshView
from .memory.geometry import alignment_problem, first_difference
from .transport import TransportChoice, collectives_of
from .wire import BlocksAtRest, ReductionForm, WireForm


@dataclass(frozen=True)
class BufferSpec:
    """The arguments of a `DBuffer`, with their defaults filled in.

    Attributes:
        layout, dtype, pin_memory, alias: as given.
        view: the axes of the mesh.
        layer: the device layer of the gathered memory.
        full_dtype: of the gathered memory.
        shard_device: where the shard is.
        wire: what travels in a gather.
        reduction: what travels in a reduction; None: gathered memory itself, summed on the way.
        transport: how it travels.
        in_common: what else all ranks must have in common, by name.
    """

    layout: Layout
    view: MeshView
    layer: DeviceLayer
    dtype: torch.dtype
    full_dtype: torch.dtype
    shard_device: torch.device
    pin_memory: bool
    wire: WireForm
    reduction: ReductionForm | None
    transport: TransportChoice
    alias: bool
    in_common: Mapping[str, str]

    @cached_property
    def casts(self) -> bool:
        """Whether shard and gathered memory have different dtypes."""
        return self.full_dtype != self.dtype

    @cached_property
    def offloaded(self) -> bool:
        """Whether the shard is in CPU memory while the device computes elsewhere."""
        return self.shard_device != self.layer.device

    def check(self, *, compare_ranks: bool) -> None:
        """Raise what `DBuffer` documents; with `compare_ranks`, only after all ranks have heard of it."""
        problem = self._local_problem()
        if compare_ranks and self.view.size * self.view.num_replicas > 1:
            self._compare(problem)
        if problem is not None:
            raise problem

    def _local_problem(self) -> Exception | None:
        layout, view, device = self.layout, self.view, self.layer.device
        given: object = layout
        if not isinstance(given, Layout):
            return TypeError(
                f"layout is a {type(given).__name__}; expected a layout_planner.Layout (layout_planner.plan)"
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
        if self.offloaded and isinstance(self.wire, BlocksAtRest):
            return ValueError(
                f"{first}: codes at rest lie where they are read back, not on {self.shard_device}"
            )
        try:
            travelling = self.wire.dtypes(self.dtype, self.full_dtype)
            if self.reduction is not None:
                self.reduction.check(self.full_dtype)
        except ValueError as error:
            return error
        text = alignment_problem(layout, (self.dtype, self.full_dtype, *travelling))
        return None if text is None else ValueError(text)

    def _compare(self, problem: Exception | None) -> None:
        layout = self.layout if isinstance(self.layout, Layout) else None
        how = f"wire {_name(self.wire)}, reduction {_name(self.reduction)}, transport {_name(self.transport)}"
        said = f"dtype {self.dtype}, full dtype {self.full_dtype}, {how}"
        fingerprint = "" if layout is None else layout.fingerprint()
        if _all_equal(
            self.view, f"{fingerprint} {said} {problem!r} {[*self.in_common.items()]}", self.layer.device
        ):
            return
        text = None if layout is None else layout.to_json()
        trouble = None if problem is None else str(problem)
        gathered = _gather_objects(self.view, (text, said, trouble, dict(self.in_common)))
        _check_in_common(self.view.ranks, [theirs for *_, theirs in gathered])
        if problem is not None:
            raise problem
        for (replica, rank), (text, theirs, trouble, _) in zip(self.view.coordinates, gathered, strict=True):
            who = f"rank {rank} of replica {replica}"
            if trouble is not None:
                raise ValueError(f"{who} failed: {trouble}")
            assert layout is not None
            difference = first_difference(layout, Layout.from_json(text))
            if difference is None and theirs != said:
                difference = f"{said} here, {theirs} there"
            if difference is not None:
                raise ValueError(
                    f"the ranks do not agree: {difference} ({who}); plan from the same tensors everywhere"
                )
        # All equal to this rank's: so the others differ from each other, which cannot be.
        raise AssertionError("digests differ, yet everything that they were made of is equal")


def _check_in_common(ranks: Sequence[int], said: Sequence[Mapping[str, str]]) -> None:
    """Raise ValueError for the first name whose values differ, with the ranks that have each."""
    for name in dict.fromkeys(name for theirs in said for name in theirs):
        having: dict[str, list[int]] = {}
        for rank, theirs in zip(ranks, said, strict=True):
            having.setdefault(theirs.get(name, "absent"), []).append(rank)
        if len(having) > 1:
            shown = "; ".join(f"{value} on {_shown(which)}" for value, which in having.items())
            raise ValueError(f"the ranks do not agree on {name}: {shown}; all must have the same")


def _shown(ranks: Sequence[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def _name(choice: object) -> str:
    """A choice in words that are the same on all ranks: addresses are not."""
    if isinstance(choice, str) or is_dataclass(choice):
        return str(choice)
    return getattr(choice, "__qualname__", type(choice).__qualname__)


def _all_equal(view: MeshView, text: str, device: torch.device) -> bool:
    """Whether all ranks gave the same text. One all-gather of 32 bytes, on a second axis one of 32 a rank."""
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=device)
    # Both steps run on every rank, whatever the first shows, so that nobody waits for a rank that has raised.
    for group, size in ((view.group, view.size), (view.replica_group, view.num_replicas)):
        if size > 1 and group is not None:
            gathered = digest.new_empty(size * digest.numel())
            collectives_of(group).all_gather([(gathered, digest)], "comparing ranks").wait()
            digest = gathered
    rows = digest.view(-1, 32).cpu()
    return bool((rows == rows[0]).all())


def _gather_objects(view: MeshView, item: Any) -> list[Any]:
    """Every rank's picklable object, replica by replica in rank order. One object all-gather an axis."""
    items = [item]
    for group, size in ((view.group, view.size), (view.replica_group, view.num_replicas)):
        if size > 1 and group is not None:
            found: list[Any] = [None] * size
            dist.all_gather_object(found, items, group=group)
            items = [one for listed in found for one in listed]
    return items
