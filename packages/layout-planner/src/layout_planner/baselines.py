"""Other ways to lay out the same group, to compare with `plan`. Written from their definitions.

    even_rows        FSDP2           every tensor alone:      |-- chunk --|-- chunk --|- chunk/// |
    lcm_rule         Megatron-FSDP   one buffer, shard size a multiple of the lcm of all blocks
    in_given_order   -               one buffer without any search: planning gains the difference to this

The first two cut a tensor between slices of dimension 0, and here only where a block ends: a chunk is a
multiple of the fewest slices that end at a cut point. With `Rows(1)` that is one slice, and the sizes are those
that FSDP2 and Megatron-FSDP allocate.
"""

import math
from collections.abc import Sequence
from itertools import count

from layout_planner._checks import check_integer, check_world_size
from layout_planner._layout import Layout
from layout_planner._pack import in_order
from layout_planner._place import Item
from layout_planner._spec import Segment, TensorSpec


def even_rows(tensors: Sequence[TensorSpec], world_size: int) -> int:
    """Elements that FSDP2's `Shard(0)` would allocate for the group, padding included.

    Every tensor is cut into `world_size` chunks of the same size along dimension 0, and padded to that.

    Raises:
        ValueError: a world size below 1.
    """
    check_world_size(world_size)
    padded = 0
    for spec in tensors:
        slices = _slices(spec)
        padded += world_size * slices * -(-spec.numel // (slices * world_size))
    return padded


def lcm_rule(tensors: Sequence[TensorSpec], world_size: int) -> int:
    """Elements that Megatron-FSDP's rule would allocate for the group, padding included.

    Tensors lie one after another in one buffer. Its shard size is a multiple of the least common multiple of
    all chunks, so that every shard boundary is a cut point of the tensor that it falls in.

    Raises:
        ValueError: a world size below 1.
    """
    check_world_size(world_size)
    chunk = math.lcm(*(_slices(spec) for spec in tensors))
    total = sum(spec.numel for spec in tensors)
    return world_size * -(-total // (world_size * chunk)) * chunk


def in_given_order(
    tensors: Sequence[TensorSpec], world_size: int, *, align: int = 8, lcm: bool = False
) -> Layout:
    """Lay out the group in one segment, in the order given, with the least shard size that this allows.

    Each tensor goes to its earliest feasible start. Shard sizes are tried in steps of the largest tensor's
    block, or with ``lcm`` of the least common multiple of all blocks. Takes time in proportion to the sizes
    tried, without a limit: meant for comparisons, not for production.

    Args:
        tensors: the group, in buffer order.
        world_size: ranks that share the group.
        align: elements that the shard size and all offsets are multiples of.
        lcm: step by all blocks instead of the largest tensor's.

    Raises:
        ValueError: no tensors, a repeated name, or an argument below its minimum.
    """
    check_world_size(world_size)
    check_integer("align", align, 1)
    if not tensors:
        raise ValueError("there is nothing to lay out: the group has no tensors")
    items = [Item.of(index, spec, align) for index, spec in enumerate(tensors)]
    if lcm:
        step = math.lcm(align, *(item.step or item.spec.grid.period for item in items))
    else:
        step = max(items, key=lambda item: item.spec.numel).step or align
    total = sum(item.size for item in items)
    tried = (
        in_order(items, size, world_size) for size in count(-(-total // (world_size * step)) * step, step)
    )
    packing = next(filter(None, tried))  # with all of them in one shard they always fit
    segment = Segment(packing.shard, tuple(spec.name for spec in tensors), packing.offsets)
    return Layout(tuple(tensors), world_size, align, (segment,))


def _slices(spec: TensorSpec) -> int:
    """Elements of the fewest slices along dimension 0 of which every multiple is a cut point."""
    slice_numel = spec.numel // spec.shape[0] if spec.shape else 1
    grid = spec.grid
    return min(math.lcm(grid.block if grid.uniform else grid.period, slice_numel), spec.numel)
