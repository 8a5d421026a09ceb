"""The elements of each rank: pure integer geometry of placements over a mesh. No tensors, no communication.

Two views of the same thing:

* **Extents along one mesh axis** (`axis_extents`), for redistribution: the other axes have already cut the tensor
  down to a *base* of some shape; along this axis each rank holds all of it (Replicate, Partial), a flat range of
  it (Ragged, ``Shard(0)``), or a slab of it (``Shard(d)``).
* **A region of the full tensor** (`region`), for checkpoints and reductions along a dimension: a box that the Shard
  axes cut out, and a range of its flattened prefix.

All results are cached: they depend only on placements, mesh shape and tensor shape (the metadata that veScale-FSDP,
arXiv 2602.22437, keeps with a tensor).
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ragged_shard._placement import RaggedShard, StridedRaggedShard
from ragged_shard._torch_compat import TorchStridedShard

Ints = tuple[int, ...]
Placements = tuple[Placement, ...]
REDUCTIONS = ("sum", "avg")
TORCHS = (Shard, Replicate, Partial)  # of torch's placements, those known here; no subclass of theirs


@dataclass(frozen=True, slots=True)
class Box:
    """An N-d box of elements of a tensor: its offset and size along each dimension. Arithmetic only."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def slices(self, origin: Ints | None = None) -> tuple[slice, ...]:
        """The box as an index into the tensor that its offsets refer to, or a part of it from `origin` on."""
        starts = (
            self.offsets if origin is None else [a - b for a, b in zip(self.offsets, origin, strict=True)]
        )
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def moved(self, by: Ints) -> "Box":
        """The same box, ``by`` further along each dimension."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def intersection(self, other: "Box") -> "Box | None":
        """The box that both have in common, or None."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Region:
    """One rank's part: elements [start, stop) of a box's flattened first ``prefix`` dims, and all of the others.

    Without a ragged axis ``prefix`` is 0 and the range is [0, 1): the entire box.
    """

    box: Box
    prefix: int
    start: int
    stop: int
    ragged: bool

    @property
    def local_shape(self) -> Ints:
        """Shape of the local tensor: ``(local_prefix, *rest)``, or the box's own shape if nothing is ragged."""
        if not self.ragged:
            return self.box.sizes
        return (self.stop - self.start, *self.box.sizes[self.prefix :])

    @lru_cache(maxsize=65536)  # noqa: B019  # regions are small values
    def boxes(self) -> tuple[Box, ...]:
        """The fewest boxes of the full tensor that cover the region, in row-major order; none if it is empty."""
        if not self.box.numel:
            return ()
        rest = self.box.sizes[self.prefix :]
        boxes = range_boxes(self.box.sizes[: self.prefix], self.start, self.stop)
        return tuple(Box(b.offsets + (0,) * len(rest), b.sizes + rest).moved(self.box.offsets) for b in boxes)


def range_boxes(sizes: Ints, start: int, stop: int) -> tuple[Box, ...]:
    """Boxes that cover elements [start, stop) of a row-major tensor: at most ``2 * len(sizes) - 1`` of them.

    sizes (4, 5), range [3, 14)         . . . a a        a: the end of the first row
                                        b b b b b        b: whole rows
                                        c c c c .        c: the beginning of the last row
                                        . . . . .
    """
    if start >= stop:
        return ()
    if len(sizes) <= 1:
        return (Box((start,) * len(sizes), (stop - start,) * len(sizes)),)
    inner = math.prod(sizes[1:])
    first, last = start // inner, (stop - 1) // inner

    def in_row(row: int, begin: int, end: int) -> list[Box]:
        return [Box((row, *b.offsets), (1, *b.sizes)) for b in range_boxes(sizes[1:], begin, end)]

    if first == last and stop - start < inner:
        return tuple(in_row(first, start - first * inner, stop - first * inner))
    boxes: list[Box] = []
    if start > first * inner:
        boxes += in_row(first, start - first * inner, inner)
        first += 1
    whole = stop // inner
    if whole > first:
        zeros = (0,) * (len(sizes) - 1)
        boxes.append(Box((first, *zeros), (whole - first, *sizes[1:])))
    if stop > whole * inner:
        boxes += in_row(whole, 0, stop - whole * inner)
    return tuple(boxes)


def shard_box(placements: Placements, mesh_shape: Ints, shape: Ints, coordinate: Ints) -> Box:
    """The box that the Shard axes leave of a tensor at one mesh coordinate (left to right, as DTensor cuts)."""
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            dim = placement.dim
            step = -(-sizes[dim] // mesh_shape[axis])  # torch.chunk's: the last ones are short or empty
            start, stop = (min(sizes[dim], step * (coordinate[axis] + i)) for i in (0, 1))
            offsets[dim] += start
            sizes[dim] = stop - start
    return Box(tuple(offsets), tuple(sizes))


def ragged_range(placement: RaggedShard, base: Ints, rank: int) -> tuple[int, int]:
    """Elements of the flattened prefix of ``base`` that ``rank`` holds."""
    prefix_numel = math.prod(base[: len(placement.dims)])
    first, last = placement._starts[rank : rank + 2]
    return prefix_numel * first // placement.total_units, prefix_numel * last // placement.total_units


def ragged_axis(placements: Placements) -> int | None:
    """The mesh axis with a ragged placement, or None."""
    return next((axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)), None)


def region(
    placements: Placements, axis: int | None, mesh_shape: Ints, shape: Ints, coordinate: Ints
) -> Region:
    """The part of the rank at ``coordinate`` of a tensor of ``shape``; ``axis`` is the ragged one, or None."""
    box = Box((0,) * len(shape), shape)
    if Shard in map(type, placements):
        box = shard_box(placements, mesh_shape, shape, coordinate)
    if axis is None:
        return Region(box, 0, 0, 1, False)
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    start, stop = ragged_range(placement, box.sizes, coordinate[axis])
    return Region(box, len(placement.dims), start, stop, True)


def held_boxes(
    shape: Iterable[int],
    mesh_shape: Iterable[int],
    placements: Iterable[Placement],
    coordinate: Iterable[int],
) -> tuple[tuple[Ints, Ints], ...]:
    """The boxes of a tensor on the rank at a mesh coordinate: (offsets, sizes), none empty.

    In the order of the local tensor, in which each box is one row-major run. Communicates nothing.

    Args:
        shape: of the full tensor.
        mesh_shape: ranks along each mesh axis.
        placements: one for each mesh axis: Replicate, Shard, torch's ``_StridedShard`` as FSDP2 makes it with tensor
            parallelism, RaggedShard and StridedRaggedShard.
        coordinate: the rank's on each mesh axis.

    Raises:
        ValueError: a placement of another kind, or another ``split_factor``.
    """
    shape, mesh_shape, coordinate = tuple(shape), tuple(mesh_shape), tuple(coordinate)
    placements = normalize(placements, len(shape))
    if TorchStridedShard in map(type, placements):
        placements, mesh_shape, coordinate = _in_order_of_cuts(placements, mesh_shape, coordinate)
    for placement in placements:
        if type(placement) not in (Shard, Replicate) and not isinstance(placement, RaggedShard):
            raise ValueError(
                f"{placement!r}: expected Replicate, Shard, RaggedShard or StridedRaggedShard; redistribute the tensor"
            )
    own = region(placements, ragged_axis(placements), mesh_shape, shape, coordinate)
    return tuple((box.offsets, box.sizes) for box in own.boxes() if box.numel)


def _in_order_of_cuts(
    placements: Placements, mesh_shape: Ints, coordinate: Ints
) -> tuple[Placements, Ints, Ints]:
    """The same cuts as plain Shards: an axis with torch's strided one comes after the axes to its right."""
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if type(placement) is TorchStridedShard:
            right = [a for a in order if getattr(placements[a], "dim", None) == placement.dim]
            if placement.split_factor != math.prod(mesh_shape[a] for a in right):
                raise ValueError(
                    f"placements {placements} on a mesh of shape {mesh_shape}: a strided Shard is known only with the "
                    "number of ranks that cut its dimension to its right as split_factor; redistribute the tensor"
                )
            order.append(axis)
        else:
            order.insert(0, axis)
    plain = [Shard(p.dim) if type(p) is TorchStridedShard else p for p in placements]
    return (
        tuple(plain[a] for a in order),
        tuple(mesh_shape[a] for a in order),
        tuple(coordinate[a] for a in order),
    )


@dataclass(frozen=True, slots=True)
class Extent:
    """One rank's part of a base tensor along one mesh axis."""

    flat: tuple[int, int] | None  # its range of the flattened base, or None if it is not one run
    boxes: tuple[Box, ...]  # boxes of the base that cover it
    shape: Ints  # its local tensor's shape


@lru_cache(maxsize=65536)
def axis_extents(base: Ints, placement: Placement, num_ranks: int) -> tuple[Extent, ...]:
    """Each rank's extent of a base tensor with one placement on an axis; all of it for Replicate and Partial."""
    extents = []
    for rank in range(num_ranks):
        if isinstance(placement, RaggedShard):
            k = len(placement.dims)
            rest = math.prod(base[k:])
            start, stop = ragged_range(placement, base, rank)
            part = Region(Box((0,) * len(base), base), k, start, stop, True)
            extents.append(Extent((start * rest, stop * rest), part.boxes(), part.local_shape))
        else:
            box = shard_box((placement,), (num_ranks,), base, (rank,))
            dim = placement.dim if type(placement) is Shard else 0
            start = box.offsets[dim] * math.prod(base[dim + 1 :]) if base else 0
            flat = (start, start + box.numel) if math.prod(base[:dim]) == 1 else None
            extents.append(Extent(flat, (box,) if box.numel else (), box.sizes))
    return tuple(extents)


def normalize(placements: Iterable[Placement], ndim: int) -> Placements:
    """Placements as a tuple: negative Shard dimensions count from the front, one slice is not strided."""

    def normal(p: Placement) -> Placement:
        if type(p) is Shard and p.dim < 0:
            return Shard(p.dim + ndim)
        if type(p) is StridedRaggedShard and p.split_factor == 1:
            return RaggedShard(p.dims, p.local_units)
        return p

    return tuple([normal(p) for p in placements])


def validate(placements: Placements, axis: int | None, mesh_shape: Ints, shape: Ints) -> None:
    """Raise if the placements do not fit the mesh or the tensor. Reads global metadata only, so all ranks agree.

    ValueError: wrong number of placements or shares, shares that do not divide, a cut through a Shard's dimension.
    NotImplementedError: two ragged axes, or a placement that cannot be combined with `axis`, the (first) ragged one.
    """
    try:
        if len(placements) != len(mesh_shape):
            raise ValueError(f": expected {len(mesh_shape)} placements, one for each mesh axis")
        for placement in placements:
            if type(placement) is Shard and not 0 <= placement.dim < len(shape):
                raise ValueError(f": {placement} is outside the dimensions of a {len(shape)}-d tensor")
        if axis is not None:
            if len(placements) > axis + 1 and ragged_axis(placements[axis + 1 :]) is not None:
                raise NotImplementedError(": only one mesh axis can be ragged, found more")
            for placement in placements:
                known = type(placement) in TORCHS or isinstance(placement, RaggedShard)
                if not known or (type(placement) is Partial and placement.reduce_op not in REDUCTIONS):
                    raise NotImplementedError(
                        f": {placement!r} cannot be combined with a ragged axis; "
                        "use Replicate, Shard(d), Partial('sum') or Partial('avg')"
                    )
            _validate_ragged(placements, mesh_shape, shape, axis)
    except (ValueError, NotImplementedError) as error:
        what = f"placements {placements} of a tensor of shape {shape} on a mesh of shape {mesh_shape}"
        raise type(error)(f"{what}{error}") from None


def _validate_ragged(placements: Placements, mesh_shape: Ints, shape: Ints, axis: int) -> None:
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    k, units = len(placement.dims), placement.local_units
    if k > len(shape):
        raise ValueError(f": dims={placement.dims} of a {len(shape)}-d tensor")
    if len(units) != mesh_shape[axis]:
        raise ValueError(
            f": {len(units)} local_units for a mesh axis of {mesh_shape[axis]} ranks; give one to each"
        )
    if type(placement) is RaggedShard and Shard not in map(type, placements):
        _check_divides(shape, placement)
        return
    # Shards on axes to the left cut first anyway; those to the right would cut the ragged ranges, unless strided.
    # An axis of size 1 cuts nothing.
    after = {
        i: p.dim
        for i, p in enumerate(placements)
        if i > axis and mesh_shape[i] > 1 and type(p) is Shard and p.dim < k
    }
    if isinstance(placement, StridedRaggedShard):
        slices = math.prod(mesh_shape[i] for i in after)
        if not after or slices != placement.split_factor:
            raise ValueError(
                f": split_factor={placement.split_factor}, but the Shard axes to its right make "
                f"{slices if after else 'no'} slices of dims {placement.dims}"
            )
        after = {}
    first = tuple([Replicate() if i in after else p for i, p in enumerate(placements)])
    for coordinate in itertools.product(*map(range, mesh_shape)):
        base = shard_box(first, mesh_shape, shape, coordinate).sizes
        _check_divides(base, placement, "" if base == shape else f", in the slice at {coordinate}")
        cuts = [ragged_range(placement, base, rank)[1] for rank in range(len(units))] if after else []
        for dim in after.values():
            slab = max(math.prod(base[dim:k]), 1)
            if any(cut % slab for cut in cuts):
                raise ValueError(
                    f": a ragged cut goes through dim {dim}, which Shard({dim}) cuts too; use "
                    "StridedRaggedShard, which cuts inside each of its slices"
                )


def _check_divides(shape: Ints, placement: RaggedShard, where: str = "") -> None:
    prefix_numel = math.prod(shape[: len(placement.dims)])
    if prefix_numel % placement.total_units:
        raise ValueError(
            f"{where}: the {prefix_numel} elements of dims {placement.dims} are not divisible by "
            f"sum(local_units)={placement.total_units}; choose shares whose sum divides {prefix_numel}"
        )
