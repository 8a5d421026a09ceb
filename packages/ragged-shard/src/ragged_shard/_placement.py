"""The placements: which share of a tensor's flattened leading dimensions each rank holds.

    tensor (4, 6), RaggedShard(dims=(0,), local_units=(1, 2, 1))     a share of 1 is 1 row

      row 0  . . . . . .   rank 0: local (1, 6)
      row 1  . . . . . .   rank 1: local (2, 6)
      row 2  . . . . . .
      row 3  . . . . . .   rank 2: local (1, 6)

A placement is a value: frozen, hashable, cheap to compare, picklable. It knows neither mesh nor shape; `_geometry`
puts the three together.
"""

import math
import operator
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NoReturn, SupportsIndex

from torch.distributed.tensor import Placement, Shard


def _checked_ints(name: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}") from None


class _LeadingDim(int):
    """The dim 0 of a ragged placement: an index that equals no number, as the placement equals no ``Shard(dim)``.

    So ``isinstance(p, Shard) and p.dim == 0`` is False, as ``p.is_shard(0)`` is: code that asks so cuts evenly. The
    spec of a plain DTensor, and `distribute_tensor` for a placement that cuts no dim, order dims, which raises.
    """

    placement: "RaggedShard"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = int.__hash__

    def __le__(self, other: int) -> bool:
        raise self.placement._refusal("a plain DTensor cannot have this placement")

    __gt__ = __le__  # torch 2.11 asks for this one

    def __lt__(self, other: int) -> bool:
        if not self.placement.dims:
            raise self.placement._refusal("it cuts no dimension")
        return super().__lt__(other)


class RaggedShard(Shard):
    """Each rank of a mesh axis holds a contiguous run of the flattened leading dimensions; lengths may differ.

    The format of that name in veScale-FSDP (arXiv 2602.22437). It derives from torch's ``Shard`` only so that torch
    does not overlook it: torch's code ignores placements that it does not know, and then takes a rank's local tensor
    for the full one. Its `dim` serves torch's functions that slice full tensors; a plain DTensor cannot carry it.

    Args:
        dims: the dimensions that are flattened and cut: a prefix ``(0, 1, ..., k-1)``; ``()`` cuts nothing
            and puts the whole tensor on one rank (the only choice for a 0-d tensor).
        local_units: each rank's share, relative to their sum, one for each rank of the mesh axis. The sum must
            divide the number of elements of the flattened dims. Zeros are ordinary. Kept in lowest terms, so
            equal placements compare and hash equal.

    The local tensor of rank r has shape ``(prefix_numel * local_units[r] / sum(local_units), *shape[k:])``.

    Raises:
        TypeError: dims or local_units are not sequences of integers.
        ValueError: dims are not a prefix; local_units are empty, negative or all zero; ``dims=()`` with more than
            one holder.
    """

    __slots__ = ("_hash", "_starts", "dims", "local_units", "total_units")

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    #: Sum of the shares.
    total_units: int
    _starts: tuple[int, ...]
    _hash: int

    def __init__(
        self, dims: Iterable[SupportsIndex] = (0,), local_units: Iterable[SupportsIndex] = (1,)
    ) -> None:
        super().__init__(0)
        checked_dims = _checked_ints("RaggedShard dims", dims)
        units = _checked_ints("RaggedShard local_units", local_units)
        if checked_dims != tuple(range(len(checked_dims))):
            raise ValueError(
                f"RaggedShard dims={checked_dims} is not a prefix of a tensor's dimensions: "
                f"expected {tuple(range(len(checked_dims)))}, the leading dimensions in order"
            )
        if not units or min(units) < 0 or max(units) == 0:
            raise ValueError(
                f"RaggedShard local_units={units}: expected one share >= 0 for each rank, at least one > 0"
            )
        divisor = math.gcd(*units)
        if divisor > 1:
            units = tuple([unit // divisor for unit in units])
        if not checked_dims and sum(units) != 1:
            raise ValueError(
                f"RaggedShard(dims=(), local_units={units}) has no dimension to cut: "
                f"with dims=() give one rank all of the tensor, as in {(1,) + (0,) * (len(units) - 1)}"
            )
        setattr_ = object.__setattr__
        setattr_(self, "dims", checked_dims)
        setattr_(self, "local_units", units)
        setattr_(self, "_starts", tuple(accumulate(units, initial=0)))
        setattr_(self, "total_units", self._starts[-1])
        setattr_(self, "_hash", hash((type(self).__name__, checked_dims, units)))

    def _key(self) -> tuple[Any, ...]:
        return (self.dims, self.local_units)

    @property
    def dim(self) -> int:  # type: ignore[override]
        """0, for torch's functions that slice a full tensor: `distribute_tensor` and `set_model_state_dict`.

        `distribute_tensor` makes a DTensor with ``Shard(0)`` of it, which modules and optimizers of this project load;
        it raises NotImplementedError if no dim is cut, as making a DTensor with this placement does. Equals no number.
        """
        dim = _LeadingDim()
        dim.placement = self
        return dim

    def _local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: int, **_: Any
    ) -> tuple[int, int]:
        """A rank's rows, for torch's functions that slice full tensors; raises if they are no run of whole rows."""
        rows, rest = divmod(curr_local_size, self.total_units)
        of_rows = self.dims == (0,) and not isinstance(self, StridedRaggedShard)
        if not of_rows or rest or num_chunks != len(self.local_units):
            raise self._refusal("a rank does not hold one run of whole rows, as torch slices full tensors")
        start, stop = self.unit_range(rank)
        return (stop - start) * rows, start * rows

    def _split_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal("it does not split evenly")

    def _refusal(self, reason: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self} cannot be handled as torch's Shard(dim): {reason}. Use ragged_shard.distribute_tensor, "
            "distribute_like, redistribute or RaggedDTensor.from_local for a tensor, "
            "ragged_shard.state_dict.load_full_state_dict or fsdp_runtime.set_full_state_dict for a "
            "module, load_full_optimizer_state_dict for an optimizer"
        )

    def unit_range(self, rank: int) -> tuple[int, int]:
        """Start and end of the run of ``rank``: the shares before it, and those up to and including it."""
        return self._starts[rank], self._starts[rank + 1]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: make a new one instead of setting {name!r}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return False
        assert isinstance(other, RaggedShard)
        return self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self._key())

    def is_shard(self, dim: int | None = None) -> bool:
        """False: it does not shard a dimension evenly, as ``Shard`` does."""
        return False

    def is_replicate(self) -> bool:
        """False: ranks hold different elements."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False: no reduction is pending."""
        return False


class CarriedRows(RaggedShard):
    """The RaggedShard of whole rows that a tensor on the meta device shows: plain DTensors carry it and cannot compute.

    `set_model_state_dict` with ``broadcast_from_rank0=True`` makes such DTensors of the rows that each rank is to load.
    Every op of a DTensor hashes its placements first, which raises; `to_local()` is this rank's rows. Equal to the
    RaggedShard that it stands for.
    """

    __slots__ = ()

    @property
    def dim(self) -> int:  # type: ignore[override]
        """0: the rows."""
        return 0

    def __eq__(self, other: object) -> bool:
        return type(other) in (RaggedShard, CarriedRows) and self._key() == other._key()  # type: ignore[attr-defined]

    def __ne__(self, other: object) -> bool:
        # DTensorSpec checks that it is not ``!= Shard(dim)``. Tuples of placements compare with ==.
        return type(other) is not Shard and not self == other

    def __hash__(self) -> int:
        raise self._refusal(
            "torch's loader made a plain DTensor of it, since the module's tensor is on the meta device, and that can "
            "only be loaded into a module that fully_shard took. Call to_empty(device=...) of other modules before "
            "set_model_state_dict, which then fills ragged tensors in place"
        )


def carried(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """The placements with `CarriedRows` in place of a RaggedShard of whole rows."""
    return tuple(
        CarriedRows(p.dims, p.local_units) if type(p) is RaggedShard and p.dims == (0,) else p
        for p in placements
    )


def without_carried(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """The placements with RaggedShard in place of `CarriedRows`."""
    return tuple(RaggedShard(p.dims, p.local_units) if type(p) is CarriedRows else p for p in placements)


class StridedRaggedShard(RaggedShard):
    """A RaggedShard of a tensor that another mesh axis has already cut along one of the same dimensions.

    With tensor or expert parallelism on dimension 0 the ragged cut is made inside each rank's ``Shard(0)``, so a rank's
    elements are not one run of the full tensor. As torch's ``_StridedShard`` does for FSDP with TP, this placement
    records that: ``(StridedRaggedShard(..., split_factor=2), Shard(0))`` on a mesh (fsdp=3, tp=2) is

        full tensor   [    tp 0     |    tp 1     ]     Shard(0) first,
                      [ f0 | f1 |f2 | f0 | f1 |f2 ]     then the ragged cut inside each of its slices.

    Args:
        dims: as for RaggedShard.
        local_units: as for RaggedShard, of one slice.
        split_factor: how many slices the Shard axes to the right make of the dims: the product of their sizes. With 1
            a tensor has a plain RaggedShard, as with Shard axes to the left, which cut first anyway.
    """

    __slots__ = ("split_factor",)

    split_factor: int

    def __init__(
        self,
        dims: Iterable[SupportsIndex] = (0,),
        local_units: Iterable[SupportsIndex] = (1,),
        split_factor: SupportsIndex = 2,
    ) -> None:
        factor = operator.index(split_factor)
        if factor < 1:
            raise ValueError(
                f"StridedRaggedShard split_factor={factor}: expected the number of slices that Shard axes make of "
                "the same dimensions, at least 1"
            )
        object.__setattr__(self, "split_factor", factor)
        super().__init__(dims, local_units)

    def _key(self) -> tuple[Any, ...]:
        return (self.dims, self.local_units, self.split_factor)

    def __repr__(self) -> str:
        return (
            f"StridedRaggedShard(dims={self.dims}, local_units={self.local_units}, "
            f"split_factor={self.split_factor})"
        )
