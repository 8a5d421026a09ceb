"""RaggedShard: a DTensor placement in which each rank holds a contiguous run of whole blocks.

After the RaggedShard of veScale-FSDP (arXiv 2602.22437). Start with `distribute_tensor` or `RaggedDTensor.from_local`.
"""

import torch as _torch

from ragged_shard import _tensor
from ragged_shard._agreement import (
    equal_on_all_ranks,
    equalize_group_counts,
    gather_from_ranks,
    installed_versions,
    list_ranks,
    raise_on_all_ranks,
    same_on_all_ranks,
)
from ragged_shard._device import (
    CPU,
    DeviceLayer,
    device_layer,
    has_triton,
    is_cpu,
    use_device_layer,
)
from ragged_shard._distribute import distribute_like, distribute_tensor, redistribute
from ragged_shard._geometry import Box, held_boxes
from ragged_shard._ops import table as _table  # noqa: F401  # fills the op table
from ragged_shard._placement import RaggedShard, StridedRaggedShard
from ragged_shard._state_dict import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ragged_shard._tensor import DISTRIBUTED, RaggedDTensor, RedistributeHandle

__version__ = "0.1.0"
__all__ = [
    "CPU",
    "DISTRIBUTED",
    "Box",
    "DeviceLayer",
    "RaggedDTensor",
    "RaggedShard",
    "RedistributeHandle",
    "StridedRaggedShard",
    "device_layer",
    "distribute_like",
    "distribute_tensor",
    "equal_on_all_ranks",
    "equalize_group_counts",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gather_from_ranks",
    "has_triton",
    "held_boxes",
    "installed_versions",
    "is_cpu",
    "list_ranks",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "raise_on_all_ranks",
    "redistribute",
    "same_on_all_ranks",
    "use_device_layer",
]

# So that torch.load reads these back with its default, weights_only=True.
_torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, StridedRaggedShard, _tensor._rebuild])
