"""Adapters between the training loop and the systems that shard the model.

An adapter turns a model on the meta device (or a built one) into one that trains; backward and the optimizer's step
are its methods, because DeepSpeed has its own.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_runtime import QuantizationPolicy, fully_shard
from fsdp_runtime.quantization import BlockFP8, BlockInt8
from ragged_shard import distribute_like
from ragged_shard.device import is_cpu

from .config import RunConfig
from .errors import TrainError
from .model import losses_of
from .optimizers import declared_blocks, optimizer_spec, parse_block_option

Initialise = Callable[[str, Tensor], None]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Built = tuple[nn.Module, torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]  # a microbatch: tokens and next tokens, (rows, positions)


def make_mesh(copies: int, device_type: str, timeout: timedelta | None = None) -> DeviceMesh | None:
    """The mesh of all ranks: ("shard",), or with several copies ("replicate", "shard"); None in one process.

    Collective: makes process groups with this timeout; the group of all ranks keeps its timeout.
    """
    if not dist.is_initialized():
        return None
    shape, names = (copies, dist.get_world_size() // copies), ("replicate", "shard")
    if copies == 1:
        return init_device_mesh(device_type, shape[1:], mesh_dim_names=names[1:])
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    if timeout is not None:
        for group in mesh.get_all_groups():
            group.set_timeout(timeout)
    return mesh


class System:
    """One process, no sharding; base of the other adapters."""

    casts = False  # if the system casts parameters and inputs

    def __init__(self, config: RunConfig, device: torch.device, mesh: DeviceMesh | None) -> None:
        self.config, self.device, self.mesh = config, device, mesh

    def build(self, model: nn.Module, initialise: Initialise | None, make_optimizer: MakeOptimizer) -> Built:
        """The sharded, initialised model and its optimizer. `initialise` is None if the model has values."""
        model = self.materialise(model, initialise)
        return model, make_optimizer(model)

    def materialise(self, model: nn.Module, initialise: Initialise | None) -> nn.Module:
        """Move the model to the device and write its initial values, one whole parameter at a time."""
        if initialise is None:
            return model.to(self.device)
        model.to_empty(device=self.device)
        if not isinstance(self, FSDP2):
            model.tie_weights()  # type: ignore[operator]
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            initialise(name, whole)
            with torch.no_grad():
                parameter.copy_(distribute_like(whole.to(self.device), parameter, src_data_rank=None))
        return model

    def autocast(self) -> Any:
        """A context for forward, which casts unless the system does."""
        enabled = self.config.precision == "bf16" and not self.casts
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def begin_step(self, model: nn.Module, step: int) -> None:
        """Prepare step number `step`."""

    def accumulate(self, model: nn.Module, batches: list[Batch], aux_weight: float) -> Tensor:
        """Forward and backward over this rank's microbatches; the mean of their cross-entropies, 0-d."""
        total, parts = torch.zeros((), device=self.device), len(batches)
        for tokens, targets in batches:
            with self.autocast():
                cross_entropy, aux = losses_of(model, tokens, targets)
            total += cross_entropy.detach() / parts
            self.backward(cross_entropy / parts + aux_weight / parts * aux)
        return total

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        loss.backward()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        """Clip, let the optimizer step, and clear. Returns the gradients' norm, 0-d."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        limit = self.config.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        step: Callable[..., Any] = optimizer.step
        step() if optimizer_spec(self.config.optimizer).is_torch else step(grad_norm=norm)
        optimizer.zero_grad(set_to_none=True)
        return norm


class FSDP2(System):
    """torch.distributed.fsdp.fully_shard."""

    casts = True

    def materialise(self, model: nn.Module, initialise: Initialise | None) -> nn.Module:
        """Shard, on the meta device so that no rank ever holds the whole model; then allocate and initialize."""
        self.shard(model)
        return model if initialise is None else super().materialise(model, initialise)

    def shard(self, model: nn.Module) -> None:
        """`fully_shard` on each layer, then on the root."""
        layers = list(model.get_submodule("blocks").children())
        fully_shard = self.fully_shard(model, layers)
        bf16 = self.config.precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for module in layers:
            fully_shard(module, mesh=self.mesh, reshard_after_forward=self.config.reshard, mp_policy=policy)
        fully_shard(model, mesh=self.mesh, mp_policy=policy)

    def fully_shard(self, model: nn.Module, layers: list[nn.Module]) -> Callable[..., Any]:
        """The system's function, with the arguments that only it has."""
        return torch_fully_shard


class Runtime(FSDP2):
    """fsdp_runtime.fully_shard, with `--block` as its block policy."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """`options` are further arguments of `fully_shard`; they replace arguments from the config."""
        super().__init__(*args)
        self.options = options

    def fully_shard(self, model: nn.Module, layers: list[nn.Module]) -> Callable[..., Any]:
        """Our function."""
        if self.config.block == "auto":
            ranks = 1 if self.mesh is None else self.mesh.size(self.mesh.ndim - 1)
            policy = declared_blocks(self.config.optimizer, model, [*layers, model], ranks)
        else:
            policy = parse_block_option(self.config.block)
        quantized = quantization(self.config.quantize, self.config.reduce)
        options = {"block_policy": policy, "quantization_policy": quantized, **self.options}
        return partial(fully_shard, **options)

    def begin_step(self, model: nn.Module, step: int) -> None:
        """Seed the rounding of gradients by the step, so that a resumed run rounds equally."""
        model.set_reduction_step(step)  # type: ignore[operator]


class DDP(System):
    """torch's DistributedDataParallel: not sharded."""

    def materialise(self, model: nn.Module, initialise: Initialise | None) -> nn.Module:
        """Gradients are all-reduced in buckets."""
        return DistributedDataParallel(super().materialise(model, initialise), gradient_as_bucket_view=True)


class DeepSpeed(System):
    """DeepSpeed ZeRO-3 with the same optimizer; backward, clipping and step are the engine's."""

    casts = True

    def build(self, model: nn.Module, initialise: Initialise | None, make_optimizer: MakeOptimizer) -> Built:
        """The engine shards a materialised model."""
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        import deepspeed  # type: ignore[import-untyped,import-not-found,unused-ignore]

        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about collectives that it calls
        model = self.materialise(model, initialise)
        settings = {
            "train_batch_size": self.config.batch,
            "gradient_accumulation_steps": self.config.accumulate,
            "gradient_clipping": self.config.clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.config.precision == "bf16"},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "overlap_comm": not is_cpu(self.device),
            },
            "steps_per_print": 10**9,
        }
        self.engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model), config=settings, dist_init_required=False
        )
        return self.engine, optimizer

    def backward(self, loss: Tensor) -> None:
        """Accumulate; the engine divides by the microbatches, and the loop has done so already."""
        self.engine.backward(loss * self.config.accumulate)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        """The engine's step."""
        self.engine.step()
        return torch.as_tensor(float(self.engine.get_global_grad_norm() or 0.0), device=self.device)


def make_system(config: RunConfig, device: torch.device, mesh: DeviceMesh | None) -> System:
    """The adapter of ``config.system``; raises `TrainError` if the system is not installed."""
    if reason := not_installed(config.system):
        raise TrainError(f"--system {config.system}: {reason}")
    adapters = {"fsdp_runtime": Runtime, "fsdp2": FSDP2, "ddp": DDP, "deepspeed": DeepSpeed, "one": System}
    return adapters[config.system](config, device, mesh)


def not_installed(system: str) -> str | None:
    """The reason if a system is not installed, else None."""
    if system == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "not installed (pip install deepspeed)"
    return None


def quantization(weights: str, gradients: str) -> Any:
    """The policy of `--quantize` and `--reduce`; None if nothing is quantized."""
    if weights == gradients == "none":
        return None
    codes: Any = {"none": None, "bf16": "bf16", "int8": BlockInt8(256, rounding="stochastic")}
    blocks: Any = {"none": None, "fp8": BlockFP8((128, 128)), "int8": BlockInt8(256)}
    return QuantizationPolicy(weights=blocks[weights], gradients=codes[gradients])
