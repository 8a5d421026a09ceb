"""`fully_shard`, a drop-in for FSDP2's that respects the structure of the model. After veScale-FSDP (arXiv 2602.22437).

    from fsdp_runtime import fully_shard            # was: from torch.distributed.fsdp import fully_shard
    fully_shard(model, block_policy=block_policies.rows(32))

Policies (`MixedPrecisionPolicy`, `CPUOffloadPolicy` ...) are torch's own classes.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from dbuffer import BlockFP8, BlockInt8, BlockNF4

from . import block_policies
from ._fully_shard import fully_shard
from ._module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ._torch.versions import installed_versions
from ._torch_compat import DataParallelMeshDims, fake_tensors
from .checkpoint.changes import ChangedBlocks, ExportedParams
from .checkpoint.export import iter_full_params
from .checkpoint.fp8_files import read_safetensors
from .checkpoint.full_params import full_params
from .checkpoint.full_state import (
    get_full_optimizer_state_dict,
    get_full_state_dict,
    set_full_optimizer_state_dict,
    set_full_state_dict,
)
from .checkpoint.loading import LoadReport, load_safetensors
from .checkpoint.offload import offload, reload
from .checkpoint.offloaded_optimizer import OffloadedOptimizer
from .checkpoint.rules import MIXTRAL_EXPERTS, STACKED_EXPERTS, Fused, Rename, Split
from .checkpoint.safetensors_export import save_safetensors
from .checkpoint.snapshot import Snapshot, snapshot
from .memory.meter import LiveBytes, StepMeter
from .memory.tune import BudgetError, Tuning, tune
from .memory.units import UnitMemory, gathered_memory, unit_memory
from .optim.clip import clip_grad_norm_
from .optim.in_backward import optimizer_in_backward, step_rest
from .quantization import QuantizationPolicy, matrices_only
from .watchdog import Watchdog

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
    "step_rest",
    "tune",
    "unit_memory",
]
