"""Lightning Fabric: a `parallelize_fn`, and a strategy that loads full checkpoints into sharded models.

    shard = parallelize(Block, block_policy=...)
    fabric = Fabric(strategy=strategy(shard, data_parallel_size=8, tensor_parallel_size=1))
    fabric.launch()
    model = fabric.setup_module(model)                            sharded here
    optimizer = fabric.setup_optimizers(AdamW(model.parameters()))
    ...                                                           train, no_backward_sync, clip_gradients, save, load

Tried with lightning-fabric 2.6.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from fsdp_runtime import clip_grad_norm_, fully_shard, set_full_state_dict
from fsdp_runtime.checkpoint import set_full_optimizer_state_dict
from ragged_shard import RaggedDTensor
from ragged_shard.device import CPU

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


def parallelize(
    *classes: type[nn.Module],
    tensor_parallel: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    **options: Any,
) -> Parallelize:
    """A `parallelize_fn` for Fabric's `ModelParallelStrategy`. It shards in place and returns the model.

    Args:
        classes: each module of one of these classes becomes a unit, inner ones first; then the model with the rest.
        tensor_parallel: called first, with the model and the `tensor_parallel` axis of Fabric's mesh, where that has
            more than one rank.
        options: of `fully_shard`; its mesh is the `data_parallel` axis.

    Raises:
        ValueError: (by the function) a `tensor_parallel` axis of several ranks without the argument of that name.
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

    Args:
        parallelize_fn: as `parallelize` makes it, or any other that calls `fully_shard` of fsdp_runtime.
        options: of `ModelParallelStrategy`. Without `data_parallel_size` Fabric takes the number of nodes.
    """
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    made = type("RaggedModelParallelStrategy", (RaggedStrategy, ModelParallelStrategy), {})
    return made(parallelize_fn, **options)


class RaggedStrategy:
    """What a `ModelParallelStrategy` needs for models of fsdp_runtime. Mix it in before that class, or call `strategy`.

    Sharded checkpoints, `no_backward_sync` and clipping by value are Fabric's own.
    """

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """`fsdp_runtime.clip_grad_norm_` for `Fabric.clip_gradients(max_norm=...)`; parameters on several meshes too.

        Returns:
            The norm before, a plain 0-d tensor, the same on every rank. Fabric's own returns a DTensor.
        """
        precision: Any = self.precision  # type: ignore[attr-defined]
        precision.unscale_gradients(optimizer)
        parameters = precision.main_params(optimizer)
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Fabric's, for `Fabric.load` and `Fabric.load_raw`; full checkpoints too, which torch cannot slice.

        Of a file each rank maps the bytes and copies its own ranges; nothing is sent but the path.

        Args:
            path: a folder (sharded) or a file (full), seen by all ranks; rank 0's counts.
            state: the model (of a raw file, a state dict by itself), or a dict of the model, optimizers and the rest.
            strict: names must be exactly the model's, and all that `state` asks for must be in the file.
            weights_only: of `torch.load`.

        Returns:
            What else the file has.

        Raises:
            ValueError, TypeError: names, shapes or kinds that differ.
            KeyError: something that `state` asks for is not in the file.
            OSError, RuntimeError: a file that cannot be read.
        """
        inherited: Any = super()
        path = Path(inherited.broadcast(path))
        models = (
            {key: value for key, value in state.items() if _is_ragged(value)}
            if isinstance(state, dict)
            else {}
        )
        if not path.is_file() or not (_is_ragged(state) or len(models) == 1):
            remainder: dict[str, Any] = inherited.load_checkpoint(
                path=path, state=state, strict=strict, weights_only=weights_only
            )
            return remainder
        file = torch.load(path, mmap=True, map_location=CPU, weights_only=weights_only)
        if not models:
            set_full_state_dict(state, file, strict=strict)
            return {}
        ((key, model),) = models.items()
        return _load(path, file, key, model, state, strict)


def _is_ragged(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(
        isinstance(param, RaggedDTensor) for param in value.parameters()
    )


def _load(
    path: Path, file: dict[str, Any], key: str, model: nn.Module, state: dict[str, Any], strict: bool
) -> dict[str, Any]:
    for name in state:
        if name not in file and (strict or name == key):
            raise KeyError(
                f"load_checkpoint: {path} has no {name!r}, which the state asks for (strict={strict})"
            )
    set_full_state_dict(model, file.pop(key), strict=strict)
    for name in [name for name in state if name in file]:
        value = file.pop(name)
        if isinstance(state[name], torch.optim.Optimizer):
            set_full_optimizer_state_dict(model, state[name], _by_name(value, model))
        elif hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(value)
        else:
            state[name] = value
    return file


def _by_name(states: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """An optimizer's own state dict counts parameters; a checkpoint of Fabric names them."""
    if not any(isinstance(key, int) for key in states["state"]):
        return states
    return FullyShardedDataParallel.rekey_optim_state_dict(dict(states), OptimStateKeyType.PARAM_NAME, model)
