"""The placements: which share of a tensor's flattened leading dimensions each rank holds.

    tensor (4, 6), RaggedShard(dims=(0,), local_units=(1, 2, 1))     one unit = 1 row

      row 0  . . . . . .   rank 0: local (1, 6)
      row 1  . . . . . .   rank 1: local (2, 6)
      row 2  . . . . . .
      row 3  . . . . . .   rank 2: local (1, 6)

A placement is a value: frozen, hashable, cheap to compare, picklable. It knows no mesh and no shape;
`_geometry` puts the three together.
"""

import math
import operator
from typing import Any

from torch.distributed.tensor import Placement

from ragged_shard._torch_compat import refuse_torch_rules


def _checked_ints(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}") from None


class RaggedShard(Placement):
    """Each rank of a mesh axis holds a contiguous run of units of the flattened leading dimensions.

    The format of that name in veScale-FSDP (arXiv 2602.22437).

    Args:
        dims: the dimensions that are flattened and cut: a prefix ``(0, 1, ..., k-1)``; ``()`` cuts nothing
            and puts the whole tensor on one rank (the only choice for a 0-d tensor).
        local_units: rank r's share, in units of ``prefix_numel / sum(local_units)`` elements of the prefix,
            one entry for each rank of the mesh axis. Zeros are ordinary; they are kept in lowest terms, so
            equal layouts compare and hash equal.

    The local tensor of rank r has shape ``(prefix_numel * units[r] / sum(units), *shape[k:])``.

    Raises:
        TypeError: dims or units are no sequence of integers.
        ValueError: dims are no prefix; units are empty, negative or all zero; ``dims=()`` with more than one
            holder.
    """

    __slots__ = ("_hash", "_starts", "dims", "local_units")

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    _starts: tuple[int, ...]
    _hash: int

    def __init__(self, dims: Any = (0,), local_units: Any = (1,)) -> None:
        super().__init__()
        checked_dims = _checked_ints("RaggedShard dims", dims)
        units = _checked_ints("RaggedShard local_units", local_units)
        if checked_dims != tuple(range(len(checked_dims))):
            raise ValueError(
                f"RaggedShard dims={checked_dims} is no prefix of a tensor's dimensions: "
                f"expected {tuple(range(len(checked_dims)))}, the leading dimensions in order"
            )
        if not units or min(units) < 0 or max(units) == 0:
            raise ValueError(
                f"RaggedShard local_units={units}: expected one share >= 0 for each rank, at least one > 0"
            )
        divisor = math.gcd(*units)
        units = tuple(unit // divisor for unit in units)
        if not checked_dims and sum(units) != 1:
            raise ValueError(
                f"RaggedShard(dims=(), local_units={units}) cuts a tensor that has nothing to cut: "
                f"with dims=() give one rank all of it, as in {(1,) + (0,) * (len(units) - 1)}"
            )
        starts = [0]
        for unit in units:
            starts.append(starts[-1] + unit)
        setattr_ = object.__setattr__
        setattr_(self, "dims", checked_dims)
        setattr_(self, "local_units", units)
        setattr_(self, "_starts", tuple(starts))
        setattr_(self, "_hash", hash((type(self).__name__, *self._key())))

    def _key(self) -> tuple[Any, ...]:
        return (self.dims, self.local_units)

    @property
    def total_units(self) -> int:
        """Sum of the shares: how many units the flattened prefix is cut into."""
        return self._starts[-1]

    def unit_range(self, rank: int) -> tuple[int, int]:
        """First unit of ``rank`` and the one after its last."""
        return self._starts[rank], self._starts[rank + 1]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: make a new one instead of setting {name!r}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return False
        assert isinstance(other, RaggedShard)
        return self._key() == other._key()

    def __hash__(self) -> int:
        refuse_torch_rules(self)
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self._key())

    def is_shard(self, dim: int | None = None) -> bool:
        """False: torch's own code must not take this for a ``Shard``."""
        return False

    def is_replicate(self) -> bool:
        """False: ranks hold different parts."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False: no reduction is pending."""
        return False


class StridedRaggedShard(RaggedShard):
    """A RaggedShard of a tensor that another mesh axis has already cut along one of the same dimensions.

    With tensor or expert parallelism on dimension 0 the ragged cut is made inside each ``Shard(0)`` part, so that
    a rank's elements are not one run of the full tensor. As torch's ``_StridedShard`` does for FSDP with TP, this
    placement remembers that: ``(StridedRaggedShard(..., split_factor=2), Shard(0))`` on a mesh (fsdp=3, tp=2) is

        full tensor   [    tp 0     |    tp 1     ]     Shard(0) first,
                      [ f0 | f1 |f2 | f0 | f1 |f2 ]     then the ragged cut inside each part.

    Args:
        dims: as for RaggedShard.
        local_units: as for RaggedShard; relative to one part.
        split_factor: how many parts the Shard axes to the right make of the prefix: the product of their sizes, at
            least 2. Shard axes to the left cut first anyway: beside them a plain RaggedShard does.
    """

    __slots__ = ("split_factor",)

    split_factor: int

    def __init__(self, dims: Any = (0,), local_units: Any = (1,), split_factor: int = 2) -> None:
        factor = operator.index(split_factor)
        if factor < 2:
            raise ValueError(
                f"StridedRaggedShard split_factor={factor}: expected the number of parts that Shard axes make of "
                "the same dimensions, at least 2; with none of them use RaggedShard"
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
