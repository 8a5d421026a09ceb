"""`fully_shard`, a drop-in for FSDP2's that respects the structure of the model. After veScale-FSDP (arXiv 2602.22437).

    from fsdp_runtime import fully_shard            # was: from torch.distributed.fsdp import fully_shard
    fully_shard(model, block_policy=block_policies.rows(32))

Policies (`MixedPrecisionPolicy`, `CPUOffloadPolicy` ...) are torch's own classes. More names are in

    fsdp_runtime.checkpoint      loading, export, rules for names, full state dicts, states in CPU memory
    fsdp_runtime.memory          memory of units
    fsdp_runtime.quantization    formats of quantized blocks
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from . import block_policies
from . import memory as memory
from ._fully_shard import fully_shard
from ._module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ._torch_compat import DataParallelMeshDims
from .checkpoint import (
    full_params,
    get_full_state_dict,
    iter_full_params,
    load_safetensors,
    offload,
    reload,
    save_safetensors,
    set_full_state_dict,
)
from .optim.clip import clip_grad_norm_
from .optim.in_backward import optimizer_in_backward, step_rest
from .quantization import QuantizationPolicy
from .watchdog import Watchdog

__version__ = "0.1.0"
__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizationPolicy",
    "UnshardHandle",
    "Watchdog",
    "block_policies",
    "clip_grad_norm_",
    "disable_fsdp_module_new_init",
    "full_params",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "get_full_state_dict",
    "iter_full_params",
    "load_safetensors",
    "offload",
    "optimizer_in_backward",
    "register_fsdp_forward_method",
    "reload",
    "save_safetensors",
    "set_full_state_dict",
    "share_comm_ctx",
    "step_rest",
]
