"""Values of all ranks, errors on all ranks, and the types of tensors that ranks hold together."""

from ragged_shard._ranks import (
    equal_on_all_ranks,
    equalize_group_counts,
    gather_from_ranks,
    installed_versions,
    list_ranks,
    raise_on_all_ranks,
    same_on_all_ranks,
)
from ragged_shard._tensor import DISTRIBUTED

__all__ = [
    "DISTRIBUTED",
    "equal_on_all_ranks",
    "equalize_group_counts",
    "gather_from_ranks",
    "installed_versions",
    "list_ranks",
    "raise_on_all_ranks",
    "same_on_all_ranks",
]
