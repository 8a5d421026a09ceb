"""What must hold before a buffer is built, on this rank and between ranks."""

from typing import TYPE_CHECKING

import torch

from layout_planner import Layout

from ._geometry import alignment_problem, first_difference
from ._mesh import coordinates, gather_digests, gather_objects

if TYPE_CHECKING:
    from ._buffer import DBuffer


def check(buffer: "DBuffer", check_ranks: bool) -> None:
    """Raise what `DBuffer` documents; with `check_ranks`, only after all ranks have heard of it."""
    problem = _local_problem(buffer)
    if check_ranks and buffer.mesh_view.size * buffer.mesh_view.num_replicas > 1:
        _compare(buffer, problem)
    if problem is not None:
        raise problem


def _local_problem(buffer: "DBuffer") -> Exception | None:
    layout, view, device = buffer.layout, buffer.mesh_view, buffer.device
    given: object = layout
    if not isinstance(given, Layout):
        return TypeError(
            f"layout is a {type(given).__name__}; expected a layout_planner.Layout (layout_planner.plan)"
        )
    for dtype in (buffer.dtype, buffer.full_dtype):
        if not isinstance(dtype, torch.dtype) or dtype.is_complex or dtype == torch.bool:
            return ValueError(f"dtype {dtype}: buffers hold real numbers, such as torch.float32")
    if layout.world_size != view.size:
        return ValueError(
            f"{layout.tensors[0].name}: the layout was planned for {layout.world_size} ranks, mesh dimension "
            f"{view.shard_dim} has {view.size}; plan with world_size={view.size}"
        )
    if device.type != view.mesh.device_type:
        return ValueError(
            f"{layout.tensors[0].name}: device {device} on a mesh of {view.mesh.device_type}; they must be of one kind"
        )
    try:
        travelling = buffer._wire.dtypes(buffer.dtype, buffer.full_dtype)
    except ValueError as error:
        return error
    text = alignment_problem(layout, (buffer.dtype, buffer.full_dtype, *travelling))
    return None if text is None else ValueError(text)


def _compare(buffer: "DBuffer", problem: Exception | None) -> None:
    layout = buffer.layout if isinstance(buffer.layout, Layout) else None
    said = f"dtype {buffer.dtype}, full dtype {buffer.full_dtype}, wire {type(buffer._wire).__name__}"
    fingerprint = "" if layout is None else layout.fingerprint()
    if gather_digests(buffer.mesh_view, f"{fingerprint} {said} {problem!r}", buffer.device):
        return
    item = (None if layout is None else layout.to_json(), said, None if problem is None else str(problem))
    all_items = gather_objects(buffer.mesh_view, item)
    if problem is not None:
        raise problem
    for (replica, rank), (text, theirs, trouble) in zip(
        coordinates(buffer.mesh_view), all_items, strict=True
    ):
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
    # All equal this rank's: so the others differ among each other, which cannot be.
    raise AssertionError("digests differ, yet everything that they were made of is equal")
