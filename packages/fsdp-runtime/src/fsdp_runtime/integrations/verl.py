"""verl: engines for `strategy=fsdp2` with units of fsdp_runtime.

    # my_engines.py, imported in every worker by VERL_USE_EXTERNAL_MODULES=my_engines
    from fsdp_runtime.integrations.verl import register
    register(block_policy=rows(8))

    actor_rollout_ref.actor.strategy=fsdp2                        in verl's configuration, as ever

Tried with verl 0.9.1 on CPU ranks: building an engine, training, checkpoints, and the exports of weights. Written
against verl's interface and not tried: Ray, rollout engines, LoRA, and `offload_policy`, which needs a device.
"""

from functools import partial
from typing import Any

from torch import nn

from fsdp_runtime import fully_shard

from .accelerate import full_state_dicts, replaced


def register(**options: Any) -> None:
    """Register our engines with verl for `strategy=fsdp2`, for language models and value models.

    verl's engines stay registered: verl prefers a registration for a vendor, as these are, to one for a kind of device.
    Call it once in each process, with arguments of `fully_shard` that verl does not pass, such as `block_policy`; they
    are for every unit. Communicates nothing.
    """
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    where = {"backend": "fsdp2", "device": get_device_name(), "vendor": get_vendor()}
    for kind, theirs in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        EngineRegistry.register(model_type=kind, **where)(engine_class(theirs, **options))


def engine_class(theirs: type, **options: Any) -> type:
    """A subclass of one of verl's `FSDPEngine`s whose model is sharded by us.

    During `_build_fsdp_module`, and only then, `fully_shard` in `verl.utils.fsdp_utils` is ours, and full state dicts
    load into our models (`accelerate.full_state_dicts`): verl has no option for either.

    `theirs` is `FSDPEngineWithLMHead`, `FSDPEngineWithValueHead`, or your own subclass of one; `options` are as for
    `register`. Building a model raises ValueError for another `strategy` than "fsdp2", and TypeError for an option that
    verl passes itself.
    """
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

        def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
            """Not supported: verl's delta sync cannot place ragged shards."""
            raise NotImplementedError("verl's delta sync; export whole tensors (get_per_tensor_param)")

    RaggedEngine.__name__ = RaggedEngine.__qualname__ = f"Ragged{theirs.__name__}"
    return RaggedEngine


def _sharded(options: dict[str, Any], module: nn.Module, *, offload_policy: Any = None, **theirs: Any) -> Any:
    if offload_policy is not None:  # else fully_shard's default
        theirs["offload_policy"] = offload_policy
    return fully_shard(module, **theirs, **options)
