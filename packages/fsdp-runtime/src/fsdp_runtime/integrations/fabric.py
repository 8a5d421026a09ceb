"""Lightning Fabric: a `parallelize_fn`, and a strategy that loads full checkpoints into sharded models.

    shard = parallelize(Block, block_policy=...)
    fabric = Fabric(strategy=strategy(shard, data_parallel_size=8, tensor_parallel_size=1))
    fabric.launch()
    model = fabric.setup_module(model)                            sharded here
    optimizer = fabric.setup_optimizers(AdamW(model.parameters()))
    ...                                                           train, no_backward_sync, clip_gradients, save, load

Tried with lightning-fabric 2.6.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import FSDPModule, clip_grad_norm_, fully_shard, set_full_state_dict

from .accelerate import full_state_dicts, replaced

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


def parallelize(
    *classes: type[nn.Module],
    tensor_parallel: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    **options: Any,
) -> Parallelize:
    """A `parallelize_fn` for Fabric's `ModelParallelStrategy`. It shards in place and returns the model.

    Args:
        classes: each module of one of these classes becomes a unit, inner ones first; then the model with the rest.
        tensor_parallel: called first, with the model and the `tensor_parallel` axis of Fabric's mesh, if that has more
            than one rank. Without it the function raises ValueError for such an axis.
        options: of `fully_shard`; its mesh is the `data_parallel` axis.
    """

    def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if (size := mesh["tensor_parallel"].size()) > 1:
            if tensor_parallel is None:
                raise ValueError(
                    f"parallelize: Fabric's mesh has {size} ranks on its axis tensor_parallel, over which nothing is "
                    "sharded; give the strategy data_parallel_size=<all ranks> and tensor_parallel_size=1, or give "
                    "parallelize a function as tensor_parallel"
                )
            tensor_parallel(model, mesh["tensor_parallel"])
        inside = [module for module in model.modules() if module is not model and isinstance(module, classes)]
        for module in [*reversed(inside), model]:
            fully_shard(module, mesh=mesh["data_parallel"], **options)
        return model

    return apply


def strategy(parallelize_fn: Parallelize, **options: Any) -> Any:
    """Fabric's `ModelParallelStrategy` with `RaggedStrategy` before it.

    `parallelize_fn` is made by `parallelize`, or any that calls `fully_shard` of fsdp_runtime; `options` are of
    `ModelParallelStrategy`. Without `data_parallel_size` Fabric takes the number of nodes.
    """
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    made = type("RaggedModelParallelStrategy", (RaggedStrategy, ModelParallelStrategy), {})
    return made(parallelize_fn, **options)


_Strategy: Any = object  # the class after the mixin, whose attributes it uses


class RaggedStrategy(_Strategy):
    """Mixin for a `ModelParallelStrategy` with models of fsdp_runtime: norms, and full checkpoints."""

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """The norm before clipping, a plain 0-d tensor, also with parameters on several meshes."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The other entries of a checkpoint; loads the model and optimizers in `state`. Full checkpoints too.

        Each rank maps a full file and copies its ranges of the model; rank 0 sends optimizer states, a tensor at a
        time. During the call Fabric's `_load_raw_module_state` is replaced. Arguments and errors are Fabric's.
        """
        from lightning_fabric.strategies import model_parallel

        theirs = model_parallel._load_raw_module_state

        def load_raw(state_dict: Any, module: nn.Module, world_size: int = 1, strict: bool = True) -> None:
            if isinstance(module, FSDPModule):
                set_full_state_dict(module, state_dict, strict=strict)
            else:
                theirs(state_dict, module, world_size, strict)

        with replaced(model_parallel, _load_raw_module_state=load_raw), full_state_dicts():
            remainder: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        return remainder
