"""`fully_shard`, a drop-in for FSDP2's that respects the structure of the model. After veScale-FSDP (arXiv 2602.22437).

    from fsdp_runtime import fully_shard            # was: from torch.distributed.fsdp import fully_shard
    fully_shard(model, block_policy=block_policies.rows(32))

Policies (`MixedPrecisionPolicy`, `CPUOffloadPolicy` ...) are torch's own classes. More names are in

    fsdp_runtime.checkpoint      loading, export, rules for names, full state dicts, states in CPU memory
    fsdp_runtime.memory          memory of units
    fsdp_runtime.quantization    formats of quantized blocks
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from . import block_policies
from ._fully_shard import fully_shard
from ._module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ._torch_compat import DataParallelMeshDims

if TYPE_CHECKING:
    from .checkpoint import (
        get_full_state_dict,
        iter_full_params,
        load_safetensors,
        merged_params,
        reload,
        save_safetensors,
        set_full_state_dict,
    )
    from .checkpoint.full_params import full_params
    from .checkpoint.offload import offload
    from .optim.clip import clip_grad_norm_
    from .quantization import QuantizationPolicy

__version__ = "0.1.0"
__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizationPolicy",
    "UnshardHandle",
    "block_policies",
    "clip_grad_norm_",
    "disable_fsdp_module_new_init",
    "full_params",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "get_full_state_dict",
    "iter_full_params",
    "load_safetensors",
    "merged_params",
    "offload",
    "register_fsdp_forward_method",
    "reload",
    "save_safetensors",
    "set_full_state_dict",
    "share_comm_ctx",
]

# Modules that the core does not need are imported with the first use of one of their names.
_FOLDERS = ("checkpoint", "memory", "quantization")
_OPTIONAL = {
    "clip_grad_norm_": "optim.clip",
    "full_params": "checkpoint",
    "get_full_state_dict": "checkpoint",
    "iter_full_params": "checkpoint",
    "load_safetensors": "checkpoint",
    "merged_params": "checkpoint",
    "offload": "checkpoint",
    "reload": "checkpoint",
    "save_safetensors": "checkpoint",
    "set_full_state_dict": "checkpoint",
    "QuantizationPolicy": "quantization",
}


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _OPTIONAL:
        return getattr(importlib.import_module(f"{__name__}.{_OPTIONAL[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OPTIONAL, *_FOLDERS})
