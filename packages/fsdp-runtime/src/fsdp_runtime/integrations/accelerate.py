"""Hugging Face Accelerate: `shard` before `prepare`, and `load_state` for both kinds of checkpoints.

    accelerator = Accelerator(fsdp_plugin=plugin)                 plugin.fsdp_version == 2
    shard(model, plugin, mesh)                                    in place of what prepare would do with the model
    optimizer = AdamW(model.parameters())                         after it
    model, optimizer = prepare(accelerator, model, optimizer)     accelerator.prepare, which leaves the model as it is
    ...                                                           train, accumulate, clip, save_state, get_state_dict
    load_state(accelerator, folder)                               accelerator.load_state

Tried with accelerate 1.15.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as AnyFSDPModule

from fsdp_runtime import FSDPModule, fully_shard, set_full_state_dict
from fsdp_runtime.checkpoint import set_full_optimizer_state_dict
from ragged_shard.dist import gather_from_ranks

from .._torch_compat import IncompatibleKeys


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Replace names of another project's module inside: for projects without an option that an adapter needs."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def shard(model: nn.Module, plugin: Any, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard a model in place with the options of an FSDP2 plugin. Call it before making the optimizer.

    Accelerate's own function chooses the units, casts trained parameters to fp32 with mixed precision, and calls our
    `fully_shard`: during a call, and only then, that name is replaced in `torch.distributed.fsdp`. With
    `cpu_ram_efficient_loading` only rank 0's values count: the others free their memory before the model is sharded,
    and every rank receives its slices from rank 0, a tensor at a time.

    Args:
        model: not sharded; after activation checkpointing was applied to it.
        plugin: its wrap policy, precision, offload, `reshard_after_forward`, `ignored_modules`.
        mesh: as for `fully_shard`; `accelerator.torch_device_mesh`'s data-parallel axes. None: all ranks.
        options: further arguments of `fully_shard`, such as `block_policy` and `quantization_policy`.

    Raises:
        ValueError: a plugin of FSDP1, or one with activation checkpointing; a model that is sharded already.
    """
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    if plugin.fsdp_version != 2:
        raise ValueError(f"shard: the plugin has fsdp_version={plugin.fsdp_version}; expected 2")
    if plugin.activation_checkpointing:
        raise ValueError(
            "shard: the plugin has activation_checkpointing=True, which accelerate would apply to the sharded model; "
            "leave it out and apply torch's checkpoint_wrapper, or model.gradient_checkpointing_enable(), before shard"
        )
    if isinstance(model, AnyFSDPModule):
        raise ValueError(f"shard: this {type(model).__name__} is sharded already")
    from_rank0 = plugin.cpu_ram_efficient_loading
    values = model.state_dict() if from_rank0 and dist.get_rank() == 0 else {}
    if from_rank0:
        _move_to_meta(model)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no" if plugin.mixed_precision_policy is None else "yes",
        is_main_process=False,  # says nothing
        device=None,  # ignored modules stay where they are
    )

    def ours(module: Any, **passed: Any) -> Any:
        return fully_shard(module, **{**passed, "mesh": mesh, **options})

    here = replaced(plugin, cpu_ram_efficient_loading=False)
    with replaced(torch.distributed.fsdp, fully_shard=ours), here:
        fsdp2_prepare_model(accelerator, model)
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"shard: accelerate did not shard this {type(model).__name__} with fully_shard of torch.distributed.fsdp; "
            "use accelerate 1.15, or call fsdp_runtime.fully_shard yourself before prepare"
        )
    if from_rank0:
        set_full_state_dict(model, values, rank0_only=True)
    return model


def _move_to_meta(model: nn.Module) -> None:
    """Move a model's parameters to meta; shared ones stay shared."""
    made: dict[Any, Any] = {None: None}
    for param in model.parameters():
        made[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        vars(made[param]).update(vars(param))
    for module in model.modules():
        module._parameters.update({name: made[param] for name, param in module._parameters.items()})


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """`accelerator.prepare` of a sharded model, its optimizer, loaders and schedulers. Communicates nothing more.

    Accelerate identifies parameters by the address of their memory, which those without elements on this rank share: so
    this restores the optimizers' parameters.
    """
    optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
    before = [list(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
    prepared = accelerator.prepare(*objects, **options)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, params in zip(groups, before, strict=True):
        group["params"] = params
    return prepared


def load_state(accelerator: Any, input_dir: str | Path | None = None, **options: Any) -> None:
    """`accelerator.load_state` of prepared models from `shard`, also of full state dicts, which torch cannot slice.

    Each rank reads sharded ones; rank 0 sends slices of full ones, a tensor at a time. A rank that alone cannot read a
    file raises, and the launcher ends the others.
    """
    with full_state_dicts():
        accelerator.load_state(None if input_dir is None else str(input_dir), **options)


@contextmanager
def full_state_dicts() -> Iterator[None]:
    """Inside, `torch.distributed.checkpoint.state_dict`'s two setters are replaced: ours load full state dicts, too."""
    of_model, of_optimizer = torch_state_dict.set_model_state_dict, torch_state_dict.set_optimizer_state_dict

    def set_model(model: nn.Module, model_state_dict: Any, *, options: Any = None) -> Any:
        if not _full(model, options):
            return of_model(model, model_state_dict, options=options)
        unread = options.broadcast_from_rank0 and dist.get_rank() != 0  # such as tensors on meta
        values = {} if unread else model_state_dict
        set_full_state_dict(model, values, rank0_only=options.broadcast_from_rank0, strict=options.strict)
        if options.strict:  # names that differ have raised
            return IncompatibleKeys([], [])
        own, loaded = model.state_dict().keys(), list(values)
        if options.broadcast_from_rank0:
            loaded = gather_from_ranks(loaded)[0]
        missing, unexpected = own - set(loaded), set(loaded) - own
        return IncompatibleKeys([n for n in own if n in missing], [n for n in loaded if n in unexpected])

    def set_optimizer(model: Any, optimizers: Any, optim_state_dict: Any, *, options: Any = None) -> None:
        if not _full(model, options):
            return of_optimizer(model, optimizers, optim_state_dict, options=options)
        state, from_rank0 = optim_state_dict or {}, options.broadcast_from_rank0
        return set_full_optimizer_state_dict(model, optimizers, state, rank0_only=from_rank0)

    with replaced(torch_state_dict, set_model_state_dict=set_model, set_optimizer_state_dict=set_optimizer):
        yield


def _full(model: nn.Module, options: Any) -> bool:
    return isinstance(model, FSDPModule) and options is not None and options.full_state_dict
