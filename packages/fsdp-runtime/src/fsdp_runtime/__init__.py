"""`fully_shard`, a drop-in for FSDP2's that respects the structure of the model. After veScale-FSDP (arXiv 2602.22437).

    from fsdp_runtime import fully_shard            # was: from torch.distributed.fsdp import fully_shard
    fully_shard(model, block_policy=block_policies.rows(32))

Policies (`MixedPrecisionPolicy`, `CPUOffloadPolicy` ...) are torch's own classes.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from dbuffer import BlockFP8, BlockInt8, BlockNF4

from . import block_policies
from ._memory import UnitMemory, gathered_memory, unit_memory
from ._module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ._torch_compat import DataParallelMeshDims, fake_tensors
from ._wrap import fully_shard
from .quantization import QuantizationPolicy, matrices_only
from .safetensors_export import save_safetensors
from .safetensors_fp8 import read_safetensors
from .watchdog import Watchdog

__version__ = "0.1.0"
__all__ = [
    "BlockFP8",
    "BlockInt8",
    "BlockNF4",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizationPolicy",
    "UnitMemory",
    "UnshardHandle",
    "Watchdog",
    "block_policies",
    "disable_fsdp_module_new_init",
    "fake_tensors",
    "fully_shard",
    "gathered_memory",
    "get_cls_to_fsdp_cls",
    "matrices_only",
    "read_safetensors",
    "register_fsdp_forward_method",
    "save_safetensors",
    "share_comm_ctx",
    "unit_memory",
]
