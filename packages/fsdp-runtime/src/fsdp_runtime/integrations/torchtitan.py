"""torchtitan: the `parallelize_fn` of a `ModelSpec`, with units of fsdp_runtime on torchtitan's meshes.

    spec = model_registry("8B")                                   any model of torchtitan
    spec.parallelize_fn = parallelize_fn(spec.parallelize_fn, block_policy=rows(8))
    Trainer.Config(model_spec=spec, ...)                          everything else stays as it is

torchtitan's own function still decides which modules are units, their meshes (`fsdp`, `efsdp`, `dp_replicate`), mixed
precision, resharding, offload, prefetching, and that gradients are summed, not divided. Before, it applies tensor and
expert parallelism, activation checkpointing and compilation. Pipelines and context parallelism are refused.

Tried with torchtitan 0.3.0: `spmd_backend` "partial_dtensor", and "spmd_types" without tensor and expert parallelism.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from fsdp_runtime import FSDPModule, fully_shard

from .accelerate import replaced


def parallelize_fn(theirs: Callable[..., nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """A replacement for a `ModelSpec.parallelize_fn`: the same function, with `fully_shard` of fsdp_runtime in it.

    torchtitan has no option for this, so during a call, and only then, the name `fully_shard` is replaced in
    `torchtitan.distributed.fsdp` and the module of `theirs`. The call communicates what `fully_shard` does.

    Args:
        theirs: the spec's own, such as `torchtitan.models.llama3.parallelize_llama`.
        options: arguments of `fully_shard` that torchtitan does not pass, such as `block_policy`; for every unit.

    Raises:
        ValueError: (when called) pipelines, context parallelism or an `spmd_backend` that are not supported, before
            anything is changed; or `theirs` did not shard the model with `fully_shard`.
        TypeError: (when called) an option that torchtitan passes itself.
    """
    import torchtitan.distributed.fsdp as shared

    def ours(module: Any, **passed: Any) -> Any:
        return fully_shard(module, **passed, **options)

    @functools.wraps(theirs)
    def parallelized(model: nn.Module, **named: Any) -> nn.Module:
        _check_dims(named["parallel_dims"])
        with ExitStack() as stack:
            for module in {shared, sys.modules[theirs.__module__]}:
                if hasattr(module, "fully_shard"):
                    stack.enter_context(replaced(module, fully_shard=ours))
            sharded = theirs(model, **named)
        if not isinstance(sharded, FSDPModule):
            raise ValueError(
                f"parallelize_fn: {theirs.__qualname__} returned a {type(sharded).__name__} without sharding it; "
                "expected a function of torchtitan that calls fully_shard on the whole model"
            )
        return sharded

    return parallelized


def _check_dims(parallel_dims: Any) -> None:
    """Refuse untested combinations, and backends whose parameters and activations `fully_shard` would misread."""
    backend = parallel_dims.spmd_backend
    split = parallel_dims.tp_enabled or parallel_dims.ep_enabled
    refused = {
        "pipeline_parallel_degree is more than 1": parallel_dims.pp_enabled,
        "context_parallel_degree is more than 1": parallel_dims.cp_enabled,
        'spmd_backend is "full_dtensor"': backend == "full_dtensor",
        'spmd_backend is "spmd_types" with tensor or expert parallelism': backend == "spmd_types" and split,
    }
    for name, chosen in refused.items():
        if chosen:
            raise ValueError(
                f"parallelize_fn: parallelism.{name}, which fsdp_runtime does not support in torchtitan; use 1 and "
                '"partial_dtensor", or keep torchtitan\'s own parallelize_fn'
            )
