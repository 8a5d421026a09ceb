"""`fully_shard`, a drop-in for FSDP2's that respects the structure of the model. After veScale-FSDP (arXiv 2602.22437).

    from fsdp_runtime import fully_shard            # was: from torch.distributed.fsdp import fully_shard
    fully_shard(model, block_policy=block_policies.rows(32))

Policies (`MixedPrecisionPolicy`, `CPUOffloadPolicy` ...) are torch's own classes.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from dbuffer import BlockFP8, BlockInt8, BlockNF4

from . import block_policies
from ._clip import clip_grad_norm_
from ._live_bytes import LiveBytes, StepMeter
from ._memory import UnitMemory, gathered_memory, unit_memory
from ._module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ._optimizer_in_backward import OptimizerInBackward, optimizer_in_backward
from ._torch_compat import DataParallelMeshDims, fake_tensors
from ._tune import BudgetError, Tuning, tune
from ._versions import installed_versions
from ._wrap import fully_shard
from .quantization import QuantizationPolicy, matrices_only
from .safetensors_export import save_safetensors
from .watchdog import Watchdog
from .weights.changes import ChangedBlocks, ExportedParams
from .weights.export import iter_full_params
from .weights.fp8_files import read_safetensors
from .weights.full_params import full_params
from .weights.full_state import (
    get_full_optimizer_state_dict,
    get_full_state_dict,
    set_full_optimizer_state_dict,
    set_full_state_dict,
)
from .weights.loading import LoadReport, load_safetensors
from .weights.offloaded_optimizer import OffloadedOptimizer
from .weights.rules import MIXTRAL_EXPERTS, STACKED_EXPERTS, Fused, Rename, Split
from .weights.sleep import offload, reload
from .weights.snapshot import Snapshot, snapshot

__version__ = "0.1.0"
__all__ = [
    "MIXTRAL_EXPERTS",
    "STACKED_EXPERTS",
    "BlockFP8",
    "BlockInt8",
    "BlockNF4",
    "BudgetError",
    "CPUOffloadPolicy",
    "ChangedBlocks",
    "DataParallelMeshDims",
    "ExportedParams",
    "FSDPModule",
    "Fused",
    "LiveBytes",
    "LoadReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "QuantizationPolicy",
    "Rename",
    "Snapshot",
    "Split",
    "StepMeter",
    "Tuning",
    "UnitMemory",
    "UnshardHandle",
    "Watchdog",
    "block_policies",
    "clip_grad_norm_",
    "disable_fsdp_module_new_init",
    "fake_tensors",
    "full_params",
    "fully_shard",
    "gathered_memory",
    "get_cls_to_fsdp_cls",
    "get_full_optimizer_state_dict",
    "get_full_state_dict",
    "installed_versions",
    "iter_full_params",
    "load_safetensors",
    "matrices_only",
    "offload",
    "optimizer_in_backward",
    "read_safetensors",
    "register_fsdp_forward_method",
    "reload",
    "save_safetensors",
    "set_full_optimizer_state_dict",
    "set_full_state_dict",
    "share_comm_ctx",
    "snapshot",
    "tune",
    "unit_memory",
]
