"""verl: engines for `strategy=fsdp2` with units of fsdp_runtime; all else of `FSDPEngine` is verl's own.

    # my_engines.py, imported in every worker by VERL_USE_EXTERNAL_MODULES=my_engines
    from fsdp_runtime.integrations.verl import register
    register(block_policy=rows(8))

    actor_rollout_ref.actor.strategy=fsdp2                        in verl's configuration, as ever

Tried with verl 0.9.1 on CPU ranks: building an engine, training, checkpoints, and the exports of weights. Written
against verl's interface and not tried: Ray, rollout engines, LoRA, and `offload_policy`, which needs a device.
"""

import dataclasses
import math
import operator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from fsdp_runtime import fully_shard
from ragged_shard import RaggedShard, held_boxes

from ._replaced import replaced
from .accelerate import full_state_dicts

# What verl passes to fully_shard, from its own configuration.
_OF_VERL = ("mesh", "mp_policy", "reshard_after_forward", "offload_policy")


def register(**options: Any) -> None:
    """Make verl take our engines for `strategy=fsdp2`, for language models and value models.

    verl's own stay registered: a registration for a vendor, as these are, comes before one for a kind of device. Call
    it once in each process. Communicates nothing.

    Args:
        options: of `fully_shard` that verl does not pass, such as `block_policy`; for every unit.

    Raises:
        ValueError: an option that verl passes itself; or registered already.
    """
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    where = {"backend": "fsdp2", "device": get_device_name(), "vendor": get_vendor()}
    for kind, theirs in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        made = engine_class(theirs, **options)
        try:
            EngineRegistry.register(model_type=kind, **where)(made)
        except AssertionError as error:
            raise ValueError(
                f"register: verl has an engine of {kind} for {where} already; call register once in each process"
            ) from error


def engine_class(theirs: type, **options: Any) -> type:
    """A subclass of one of verl's `FSDPEngine`s whose model is sharded by us.

    During `_build_fsdp_module`, and only then, `fully_shard` in `verl.utils.fsdp_utils` is ours, and full state dicts
    load into our models (`accelerate.full_state_dicts`): verl has no option for either.

    Args:
        theirs: `FSDPEngineWithLMHead`, `FSDPEngineWithValueHead`, or your own subclass of one.
        options: as for `register`.

    Raises:
        ValueError: an option that verl passes itself. When a model is built: another `strategy` than "fsdp2".
    """
    if taken := [name for name in _OF_VERL if name in options]:
        raise ValueError(
            f"engine_class got {taken[0]}, which verl passes to fully_shard itself; set it in verl's configuration "
            "(fsdp_config)"
        )
    from verl.utils import fsdp_utils

    base: Any = theirs

    class RaggedEngine(base):
        """verl's engine, sharded by fsdp_runtime."""

        def _build_fsdp_module(self, module: nn.Module) -> Any:
            strategy = self.engine_config.strategy
            if strategy != "fsdp2":
                raise ValueError(f'the engine of fsdp_runtime has strategy="{strategy}"; expected "fsdp2"')
            with replaced(fsdp_utils, fully_shard=partial(_sharded, options)), full_state_dicts():
                return super()._build_fsdp_module(module)

        def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Any, None]:
            """Each rank's part of every tensor, with its place in the whole: what verl's delta sync starts from."""
            exported, rest = super().get_per_tensor_param_shard(**kwargs)
            return map(_placed, exported), rest

    RaggedEngine.__name__ = RaggedEngine.__qualname__ = f"Ragged{theirs.__name__}"
    return RaggedEngine


def _sharded(options: dict[str, Any], module: nn.Module, *, offload_policy: Any = None, **theirs: Any) -> Any:
    if offload_policy is not None:  # verl says None for what fully_shard takes by default
        theirs["offload_policy"] = offload_policy
    return fully_shard(module, **theirs, **options)


def _placed(entry: tuple[str, torch.Tensor, Any]) -> tuple[str, torch.Tensor, Any]:
    """The entry, with the place of a ragged tensor's part: one run of the flattened tensor, from its first box on."""
    name, local, spec = entry
    placements = spec.placements or ()
    if not any(isinstance(placement, RaggedShard) for placement in placements):
        return entry
    mesh, shape = spec.mesh, spec.full_shape
    where = mesh.get_coordinate()
    cut, *others = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if others:
        raise NotImplementedError(
            f"{name} is cut over several axes ({placements} on {mesh}), which verl's delta sync cannot place; export "
            "whole tensors (get_per_tensor_param)"
        )
    boxes = held_boxes(shape, mesh.shape, placements, where)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(map(operator.mul, boxes[0][0], strides)) if boxes else 0
    first = all(where[axis] == 0 for axis in range(mesh.ndim) if axis != cut)
    placed = {"place": start, "gather_group": mesh.get_group(cut), "contributes": first}
    return name, local, dataclasses.replace(spec, mesh=None, placements=None, **placed)
