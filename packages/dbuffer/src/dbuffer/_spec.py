"""What a buffer is to be, and what must hold before any of it is built: on this rank, and between ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from layout_planner import Layout
from ragged_shard import (
    DeviceLayer,
    equal_on_all_ranks,
    gather_from_ranks,
    is_cpu,
    raise_on_all_ranks,
    same_on_all_ranks,
)

from ._mesh import MeshView
from .memory.geometry import alignment_problem, first_difference
from .transport import TransportChoice
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
        wire: format of gathers. None: the full dtype.
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
    wire: WireForm | None
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
        """Raise the errors that `DBuffer` documents; with `compare_ranks`, on all ranks."""
        problem = self._local_problem()
        if compare_ranks and self.view.size * self.view.num_replicas > 1:
            self._compare(problem)
        if problem is not None:
            raise problem

    def _local_problem(self) -> Exception | None:
        layout, view, device = self.layout, self.view, self.layer.device
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
        if self.offloaded and isinstance(self.wire, BlocksAtRest):
            return ValueError(
                f"{first}: codes at rest lie where they are read back, not on {self.shard_device}"
            )
        try:
            sent = () if self.wire is None else self.wire.dtypes(self.dtype, self.full_dtype)
            if self.reduction is not None:
                self.reduction.check(self.full_dtype)
        except ValueError as error:
            return error
        text = alignment_problem(layout, (self.dtype, self.full_dtype, *sent))
        return None if text is None else ValueError(text)

    def _compare(self, problem: Exception | None) -> None:
        layout = self.layout if isinstance(self.layout, Layout) else None
        how = f"wire {_name(self.wire)}, reduction {_name(self.reduction)}, transport {_name(self.transport)}"
        settings = f"dtype {self.dtype}, full dtype {self.full_dtype}, {how}"
        fingerprint = "" if layout is None else layout.fingerprint()
        groups = self.view.groups
        text = f"{fingerprint} {settings} {problem!r} {[*self.in_common.items()]}"
        if equal_on_all_ranks(text, groups):
            return
        same_on_all_ranks(self.in_common, groups)
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


def _name(choice: object) -> str:
    """A description of a choice without addresses, the same on all ranks."""
    if isinstance(choice, str) or is_dataclass(choice):
        return str(choice)
    return getattr(choice, "__qualname__", type(choice).__qualname__)
