"""What a layout must be, written from the definitions alone and by brute force; shares no code with the planner."""

import math
from itertools import count


def blocks_of(shape, block):
    """Every block of a tensor as (start, stop), in order. `block` is a kind and its numbers, as text prints it."""
    numel = math.prod(shape)
    row = shape[-1] if len(shape) >= 2 else 1
    kind, _, number = block.partition(":")
    period = numel
    if kind == "rows":
        length = int(number) * row
    elif kind == "elements":
        length = int(number)
    elif kind == "whole":
        length = numel
    else:
        length = int(number.split("x")[0]) * row
        period = shape[-2] * row
    found = []
    for begin in range(0, numel, period or 1):
        stop = begin + period
        while begin < stop:
            found.append((begin, min(begin + length, stop)))
            begin += length
    return found


def check(layout):
    """Assert all that a layout promises: contiguous, no overlap, no block cut, equal shards, aligned, partitioned."""
    names = [name for segment in layout.segments for name in segment.names]
    assert sorted(names) == sorted(spec.name for spec in layout.tensors)
    specs = {spec.name: spec for spec in layout.tensors}
    for segment in layout.segments:
        size = segment.shard_size
        assert size > 0
        assert size % layout.align == 0
        taken = 0
        for name, start in sorted(zip(segment.names, segment.offsets, strict=True), key=lambda pair: pair[1]):
            spec = specs[name]
            assert start % layout.align == 0, name
            assert start >= taken, f"{name} overlaps what lies before it"
            taken = start + math.prod(spec.shape)
            assert taken <= size * layout.world_size, f"{name} does not fit"
            for first, last in blocks_of(spec.shape, str(spec.block)):
                assert (start + first) // size == (start + last - 1) // size, f"a block of {name} is cut"
            check_local(layout, name, start, size)
    assert layout.padded_numel == layout.world_size * sum(segment.shard_size for segment in layout.segments)
    assert layout.padding == layout.padded_numel - sum(math.prod(spec.shape) for spec in layout.tensors)
    assert layout.lower_bound <= layout.padded_numel


def check_local(layout, name, start, size):
    """Assert that the local ranges partition the tensor, hold what the shards hold, and equal the units."""
    shape = layout.spec(name).shape
    numel, at, lengths = math.prod(shape), 0, []
    for rank in range(layout.world_size):
        first, stop = layout.local_range(name, rank)
        assert first in (at, stop), f"rank {rank} of {name} leaves a hole"
        assert 0 <= first <= stop <= numel
        if stop > first:
            assert rank * size <= start + first
            assert start + stop <= (rank + 1) * size
            at = stop
        lengths.append(stop - first)
    assert at == numel
    units, dims = layout.local_units(name), layout.local_dims(name)
    assert math.gcd(*units) == 1
    assert dims == tuple(range(len(dims)))
    total = sum(units)
    assert [unit * numel for unit in units] == [length * total for length in lengths]
    rows = math.prod(shape[: len(dims)])
    assert rows % total == 0, f"{name}: {units} do not divide the {rows} rows of dims {dims}"


def least_shard(tensors, world_size, align):
    """The least shard size of one buffer over all orders and all shard sizes, by trying every one of them."""
    blocks = [blocks_of(spec.shape, str(spec.block)) for spec in tensors]
    numels = [math.prod(spec.shape) for spec in tensors]
    least = -(-sum(numels) // (world_size * align)) * align
    for size in count(least, align):
        if _some_order_fits(blocks, numels, world_size, align, size):
            return size
    raise AssertionError("unreachable")


def _some_order_fits(blocks, numels, world_size, align, size):
    starts: dict = {}

    def earliest(tensor, position):
        """How far after `position` the tensor can start; None: nowhere. Depends on the place in a shard only."""
        key = tensor, position % size
        if key not in starts:
            starts[key] = None
            for shift in range(0, 2 * size + align, align):
                begin = key[1] + shift
                if all((begin + a) // size == (begin + b - 1) // size for a, b in blocks[tensor]):
                    starts[key] = shift
                    break
        return starts[key]

    def extend(end, left):
        if not left:
            return True
        for tensor in left:
            shift = earliest(tensor, end)
            if shift is None:
                return False  # at this size the tensor fits nowhere
            stop = end + shift + numels[tensor]
            if stop <= size * world_size and extend(-(-stop // align) * align, left - {tensor}):
                return True
        return False

    return extend(0, frozenset(range(len(numels))))
