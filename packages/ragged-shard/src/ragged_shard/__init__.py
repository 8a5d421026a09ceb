"""RaggedShard: a DTensor placement in which each rank holds a contiguous run of whole blocks.

After the RaggedShard of veScale-FSDP (arXiv 2602.22437). Start with `distribute_tensor` or `RaggedDTensor.from_local`.
`ragged_shard.state_dict` has full state dicts, `device` the layer over devices, `dist` agreement of ranks, and
`testing` what tests of several ranks need.
"""

import torch as _torch

from ragged_shard import _tensor
from ragged_shard._distribute import distribute_like, distribute_tensor, redistribute
from ragged_shard._geometry import Box, held_boxes
from ragged_shard._ops import table as _table  # noqa: F401  # fills the op table
from ragged_shard._placement import RaggedShard, StridedRaggedShard
from ragged_shard._tensor import RaggedDTensor, RedistributeHandle

__version__ = "0.1.0"
__all__ = [
    "Box",
    "RaggedDTensor",
    "RaggedShard",
    "RedistributeHandle",
    "StridedRaggedShard",
    "distribute_like",
    "distribute_tensor",
    "held_boxes",
    "redistribute",
]

# So that torch.load reads these back with its default, weights_only=True.
_torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, StridedRaggedShard, _tensor._rebuild])
