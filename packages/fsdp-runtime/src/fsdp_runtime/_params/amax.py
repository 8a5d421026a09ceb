"""Largest magnitudes of quantized tiles that are cut: found before a gather, by all ranks of a mesh."""

from collections.abc import Iterable, Sequence
from typing import Any

import dbuffer

from .._torch.streams import Streams
from .group import Group


def share_amax(groups: Iterable[Group], streams: Streams, after: Sequence[Any] | None) -> bool:
    """Find the amax of tiles that are cut, where parameters changed: one all-reduce a mesh, on the gathers' stream.

    Args:
        after: events that must have completed first. None: all that the current stream holds.

    Returns:
        whether anything was to be done.
    """
    by_mesh: dict[Any, list[dbuffer.DBuffer]] = {}  # units may have equal meshes of their own
    for group in groups:
        if group.plan.shares_amax and group.buffer is not None and dbuffer.needs_amax(group.buffer):
            by_mesh.setdefault(group.plan.data.mesh, []).append(group.buffer)
    if by_mesh:
        with streams.layer.on(streams.gather, after):
            for buffers in by_mesh.values():
                dbuffer.share_amax(buffers)
    return bool(by_mesh)
