"""Hugging Face Accelerate: `shard` before `prepare`, and `load_state` for both kinds of checkpoints.

    accelerator = Accelerator(fsdp_plugin=plugin)                 plugin.fsdp_version == 2
    shard(model, plugin, mesh)                                    in place of what prepare would do with the model
    optimizer = AdamW(model.parameters())                         after it
    model, optimizer = prepare(accelerator, model, optimizer)     accelerator.prepare, which leaves the model as it is
    ...                                                           train, accumulate, clip, save_state, get_state_dict
    load_state(accelerator, folder)                               accelerator.load_state

Tried with accelerate 1.15.
"""

import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as AnyFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType

from fsdp_runtime import FSDPModule, fully_shard, set_full_state_dict
from fsdp_runtime.checkpoint import set_full_optimizer_state_dict
from ragged_shard import CPU, RaggedDTensor, raise_on_all_ranks

from ._replaced import replaced


def shard(model: nn.Module, plugin: Any, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard a model as a `FullyShardedDataParallelPlugin` of FSDP2 says. In place; call it before making the optimizer.

    Units are those that accelerate makes: the modules of the plugin's wrap policy, the input embedding, the final norm
    with the output embedding, and the rest. With mixed precision trained parameters become fp32 first. With
    `cpu_ram_efficient_loading` only rank 0's values count: the others give their memory back before the model is
    sharded, and every rank gets its slices from rank 0, a tensor at a time.

    Args:
        model: not sharded; after activation checkpointing was applied to it.
        plugin: its wrap policy, precision, offload, `reshard_after_forward`, `ignored_modules`.
        mesh: as for `fully_shard`; `accelerator.torch_device_mesh`'s data-parallel axes. None: all ranks.
        options: of `fully_shard` that the plugin does not know, such as `block_policy` and `quantization_policy`.

    Raises:
        ValueError: a plugin of FSDP1, or one with activation checkpointing; a model that is sharded already.
    """
    _check(model, plugin)
    plugin.set_auto_wrap_policy(model)
    options = {
        "mesh": mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload,
        **options,
    }
    if plugin.mixed_precision_policy is not None:
        for param in model.parameters():
            if param.requires_grad and param.is_floating_point():
                param.data = param.data.float()
    if not plugin.cpu_ram_efficient_loading:
        _shard_units(model, plugin, options)
        return model
    values = model.state_dict() if dist.get_rank() == 0 else {}
    buffers = _to_meta(model)
    _shard_units(model, plugin, options)
    kinds = {
        param.device_mesh.device_type for param in model.parameters() if isinstance(param, RaggedDTensor)
    }
    device = torch.device(kinds.pop())
    model.to_empty(device=device)
    set_full_state_dict(model, values, rank0_only=True)
    for owner, name, buffer in buffers:
        owner.register_buffer(name, buffer.to(device), persistent=False)
    return model


def _check(model: nn.Module, plugin: Any) -> None:
    if plugin.fsdp_version != 2:
        raise ValueError(f"shard: the plugin has fsdp_version={plugin.fsdp_version}; expected 2")
    if plugin.activation_checkpointing:
        raise ValueError(
            "shard: the plugin has activation_checkpointing=True, which accelerate would apply to the sharded model; "
            "leave it out and apply torch's checkpoint_wrapper, or model.gradient_checkpointing_enable(), before shard"
        )
    if isinstance(model, AnyFSDPModule):
        raise ValueError(f"shard: this {type(model).__name__} is sharded already")


def _shard_units(model: nn.Module, plugin: Any, options: dict[str, Any]) -> None:
    from accelerate.utils.fsdp_utils import (
        fsdp2_prepare_auto_wrap_policy,
        get_module_children_bottom_up,
        get_parameters_from_modules,
    )

    if plugin.ignored_modules is not None:
        device = next(iter(model.parameters())).device
        ignored = get_parameters_from_modules(plugin.ignored_modules, model, device)
        options = {**options, "ignored_params": ignored}
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if policy is not None:
        for module in get_module_children_bottom_up(model)[:-1]:
            if policy(module) and not isinstance(module, AnyFSDPModule):
                fully_shard(module, **options)
    first, last = (_embedding(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    if first is not None and not isinstance(first, AnyFSDPModule):
        fully_shard(first, **options)
    tail = [_final_norm(model), last]
    unsharded = [module for module in tail if module is not None and not isinstance(module, AnyFSDPModule)]
    if unsharded:
        fully_shard(unsharded, **{**options, "reshard_after_forward": False})
    if not isinstance(model, AnyFSDPModule):
        fully_shard(model, **{**options, "reshard_after_forward": None})


def _embedding(model: nn.Module, getter: str) -> Any:
    module = getattr(model, getter, lambda: None)()
    return module if isinstance(getattr(module, "weight", None), torch.Tensor) else None


def _final_norm(model: nn.Module) -> nn.Module | None:
    """The last norm among the direct children of a transformers model's body."""
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, None) if prefix else model
    norms = [m for m in body.children() if "Norm" in type(m).__name__] if isinstance(body, nn.Module) else []
    return norms[-1] if norms else None


def _to_meta(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Give a model's memory back, shared parameters still shared. Returns the buffers that no state dict has."""
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    ]
    made: dict[torch.Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in made:
                    made[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                    made[param].__dict__.update(param.__dict__)
                module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    return kept


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """`accelerator.prepare` of a sharded model, its optimizer, loaders and schedulers. Communicates nothing more.

    Accelerate tells parameters by their memory's address, which those have in common that this rank holds nothing of.
    So optimizers are given their own parameters back.
    """
    before = [
        (optimizer, [list(group["params"]) for group in optimizer.param_groups])
        for optimizer in objects
        if isinstance(optimizer, torch.optim.Optimizer)
    ]
    prepared = accelerator.prepare(*objects, **options)
    for optimizer, groups in before:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
    return prepared


def load_state(accelerator: Any, input_dir: str | Path | None = None, **options: Any) -> None:
    """`accelerator.load_state`, also of full state dicts, which torch cannot slice; one rank's error is every rank's.

    Sharded ones are read by each rank; of full ones rank 0 gives every rank its slices, a tensor at a time. Ranks
    compare what they find before anything is loaded, and again at the end. In addition to what loading communicates:
    two all-gathers of pickled objects, under 100 bytes a rank each, or as many as the longest error message takes.

    A rank beyond those that saved has no file of random states. It takes the step that accumulation counts from the
    others, and keeps its generators.

    Args:
        accelerator: with models that `shard` has sharded, prepared.
        input_dir: the folder. None: the newest, with `automatic_checkpoint_naming`.
        options: of `accelerator.load_state`.

    Raises:
        OSError, RuntimeError, ValueError: on every rank, with the name of the rank: a folder or file that is missing or
            cannot be read; newest checkpoints or steps that differ; whatever schedulers, samplers, hooks and registered
            objects raise. Errors of models and optimizers are those of torch's distributed checkpoint, or of
            `set_full_state_dict`, on every rank too.
    """
    folder, step, problem, steps = Path(), None, None, set[int]()
    try:
        folder = _folder(accelerator, input_dir)
        step = _check_files(accelerator, folder, options.get("load_kwargs") or {})
    except Exception as error:  # the other ranks must not wait for this one
        problem = error
    answers = raise_on_all_ranks(problem, "load_state", (folder.name if input_dir is None else "", step))
    for rank, (name, other) in enumerate(answers):
        if name != answers[0][0]:
            raise ValueError(
                f"load_state: the newest checkpoint is {answers[0][0]} on rank 0 and {name} on rank {rank}; pass "
                "input_dir"
            )
        steps |= set() if other is None else {other}
        if len(steps) > 1:
            raise ValueError(
                f"load_state: rank {rank} saved its random states at another step than the ranks before it: {steps}"
            )
    began: list[Any] = []  # reading what each rank reads by itself, after which nothing communicates
    hook = accelerator.register_load_state_pre_hook(lambda *_: began.append(True))
    hook.hooks_dict_ref().move_to_end(hook.id, last=False)
    try:
        with full_state_dicts():
            accelerator.load_state(str(folder), **options)
    except Exception as error:
        if not began:
            raise
        problem = error
    finally:
        hook.remove()
    raise_on_all_ranks(problem, f"load_state of {folder}")
    if step is None and steps:
        accelerator.step = steps.pop()


def _folder(accelerator: Any, input_dir: str | Path | None) -> Path:
    """The folder that `accelerator.load_state` reads."""
    if input_dir is not None:
        folder = Path(input_dir).expanduser()
    elif accelerator.project_configuration.automatic_checkpoint_naming:
        folders = Path(accelerator.project_dir, "checkpoints").iterdir()
        folder = max(folders, key=lambda folder: int(re.findall("[0-9]+", folder.name)[0]))
    else:
        raise ValueError("no input_dir is given, and automatic_checkpoint_naming is off")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    return folder


def _check_files(accelerator: Any, folder: Path, load_kwargs: dict[str, Any]) -> int | None:
    """Read the files of this rank as Accelerate will, but mapped, so that none fails while other ranks wait.

    Returns:
        The step in the file of random states; None where the checkpoint was saved with fewer ranks.
    """
    from accelerate.utils import constants, load

    plugin, rank = getattr(accelerator.state, "fsdp_plugin", None), accelerator.process_index
    if accelerator.scaler is not None:
        read_mapped(folder / constants.SCALER_NAME, torch.load)
    if plugin is not None and plugin.state_dict_type == StateDictType.FULL_STATE_DICT and rank == 0:
        for path in [
            *_numbered(folder / constants.FSDP_MODEL_NAME, accelerator._models),
            *_numbered(folder / constants.OPTIMIZER_NAME, accelerator._optimizers),
        ]:
            read_mapped(path, torch.load)
    for path in _numbered(folder / constants.SCHEDULER_NAME, accelerator._schedulers):
        read_mapped(path, load, **load_kwargs)
    for index in range(len(accelerator._custom_objects)):
        read_mapped(folder / f"custom_checkpoint_{index}.pkl", load, weights_only=False)
    name = constants.RNG_STATE_NAME
    saved_by = [int(other.stem.rpartition("_")[2]) for other in folder.glob(f"{name}_[0-9]*.pkl")]
    if rank > max(saved_by, default=-1):
        return None
    step: int | None = read_mapped(folder / f"{name}_{rank}.pkl", load).get("step")
    return step


def _numbered(path: Path, objects: list[Any]) -> list[Path]:
    return [path.with_name(f"{path.name}_{i}.bin" if i else f"{path.name}.bin") for i in range(len(objects))]


def read_mapped(path: Path, load: Callable[..., Any], **options: Any) -> Any:
    """What `load`, such as `torch.load`, finds in a file, mapped where it can be.

    Raises:
        OSError, RuntimeError: it cannot be read; the message names it.
    """
    try:
        return load(path, **{"map_location": CPU, "mmap": zipfile.is_zipfile(path), **options})
    except Exception as error:
        if getattr(error, "filename", None):
            raise
        raise RuntimeError(f"{path} cannot be read: {error}") from error


@contextmanager
def full_state_dicts() -> Iterator[None]:
    """Inside, torch's setters of state dicts load full ones into models of fsdp_runtime; all else is as ever.

    Replaces `set_model_state_dict` and `set_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict`.
    """
    of_model, of_optimizer = torch_state_dict.set_model_state_dict, torch_state_dict.set_optimizer_state_dict

    def set_model(model: nn.Module, state: Any, *, options: Any = None) -> Any:
        if not _full(model, options):
            return of_model(model, state, options=options)
        unread = options.broadcast_from_rank0 and dist.get_rank() != 0  # such as tensors on meta
        set_full_state_dict(
            model, {} if unread else state, rank0_only=options.broadcast_from_rank0, strict=options.strict
        )
        return nn.modules.module._IncompatibleKeys([], [])

    def set_optimizer(model: nn.Module, optimizers: Any, state: Any, *, options: Any = None) -> None:
        if not _full(model, options):
            return of_optimizer(model, optimizers, state, options=options)
        return set_full_optimizer_state_dict(
            model, optimizers, state or {}, rank0_only=options.broadcast_from_rank0
        )

    with replaced(torch_state_dict, set_model_state_dict=set_model, set_optimizer_state_dict=set_optimizer):
        yield


def _full(model: nn.Module, options: Any) -> bool:
    return isinstance(model, FSDPModule) and options is not None and options.full_state_dict
