"""`plan`: from a group's tensors to a layout."""

from collections.abc import Sequence
from operator import attrgetter

from layout_planner._checks import check_integer, check_world_size
from layout_planner._layout import Layout
from layout_planner._place import Item
from layout_planner._spec import Segment, TensorSpec
from layout_planner._split import split


def plan(
    tensors: Sequence[TensorSpec],
    world_size: int,
    *,
    align: int = 8,
    segment_cost: int = 1 << 19,
    max_segments: int = 4,
) -> Layout:
    """Pack the tensors of one group into equal shards, cutting no block, with the least padding found.

    Pure: the same arguments give the same layout in every process, on every rank and every Python. Searches
    are bounded by a number of steps, never by time. (The planner of veScale-FSDP, arXiv 2602.22437, plans one
    buffer; segments are an addition.)

    Args:
        tensors: the group, in the order to keep unless another one pads less.
        world_size: ranks that share the group.
        align: elements that every shard size and every tensor's offset is a multiple of. Choose it so that
            it makes 16 bytes in the narrowest dtype in use: 8 for bf16, 16 for one-byte types.
        segment_cost: elements of the gathered buffer that one more segment must save. The default is roughly
            the number that a gather moves in the time that one more collective takes to start.
        max_segments: the most segments to split the group into; 1 keeps a single buffer.

    Raises:
        ValueError: no tensors, a repeated name, or an argument below its minimum.
    """
    tensors = tuple(tensors)
    check_world_size(world_size)
    check_integer("align", align, 1)
    check_integer("segment_cost", segment_cost, 0)
    check_integer("max_segments", max_segments, 1)
    if not tensors:
        raise ValueError("there is nothing to plan: the group has no tensors")
    seen: set[str] = set()
    for spec in tensors:
        if spec.name in seen:
            raise ValueError(f"{spec.name}: two tensors of the group have this name; names must be unique")
        seen.add(spec.name)
    items = [Item.of(index, spec, align) for index, spec in enumerate(tensors)]
    packings = split(items, world_size, align, segment_cost, max_segments)
    segments = [Segment(p.shard, tuple(map(attrgetter("spec.name"), p.items)), p.offsets) for p in packings]
    return Layout(tensors, world_size, align, tuple(segments))
