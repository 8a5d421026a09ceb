"""The one seam between the training loop and what shards the model: an adapter for each system.

A system gets a model on the meta device (or a built one) and gives back one that trains; backward and the
optimizer's step go through it, because DeepSpeed wants them to itself.
"""

import importlib.util
import json
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime.memory.activations import OffloadActivations
from ragged_shard import distribute_like
from ragged_shard.device import is_cpu

from .config import RunConfig
from .errors import TrainError
from .model import losses_of
from .optimizers import declared_blocks, parse_block_option

Initialise = Callable[[str, Tensor], None]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]  # a microbatch: tokens and those that follow, (rows, positions)


def make_mesh(copies: int, device_type: str, timeout: timedelta | None = None) -> DeviceMesh | None:
    """The mesh of all ranks: ("shard",), or with several copies ("replicate", "shard"); None in one process.

    Collective: makes process groups, with this timeout; that of all ranks keeps its own.
    """
    if not dist.is_initialized():
        return None
    ranks = dist.get_world_size()
    if copies == 1:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device_type, (copies, ranks // copies), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in mesh.get_all_groups():
            group.set_timeout(timeout)
    return mesh


def wrap_order(model: nn.Module) -> list[nn.Module]:
    """The modules that become units: each layer. The root, with what is left, comes after."""
    names = set(getattr(model, "_no_split_modules", None) or ("Block",))
    return [module for module in model.modules() if type(module).__name__ in names]


class System:
    """One process, no sharding; what the others share."""

    name = "one"

    def __init__(self, config: RunConfig, device: torch.device, mesh: DeviceMesh | None) -> None:
        self.config, self.device, self.mesh = config, device, mesh
        self.ranks = 1 if mesh is None else mesh.size()

    def build(
        self, model: nn.Module, initialise: Initialise | None, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Shard the model, give it its values and its optimizer. `initialise` is None where it has values."""
        model = self.wrap(self.materialise(model, initialise))
        return model, make_optimizer(model)

    def materialise(self, model: nn.Module, initialise: Initialise | None) -> nn.Module:
        """Move the model to the device and write its initial values, one whole parameter at a time."""
        if initialise is None:
            return model.to(self.device)
        model.to_empty(device=self.device)
        tie = getattr(model, "tie_weights", None)
        if tie is not None and not isinstance(self, FullyShard):
            tie()
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            initialise(name, whole)
            with torch.no_grad():
                local = distribute_like(whole.to(self.device), parameter, src_data_rank=None)
                parameter.copy_(local)
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make a materialised model train on all ranks."""
        return model

    def autocast(self) -> Any:
        """Around forward, where the system does not cast parameters itself."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16", cache_enabled=False
        )

    def begin_step(self, model: nn.Module, step: int) -> None:
        """Say which step comes."""

    def accumulate(self, model: nn.Module, batches: list[Batch], aux_weight: float) -> Tensor:
        """Forward and backward over this rank's microbatches; the mean of their cross-entropies, 0-d."""
        total, parts = torch.zeros((), device=self.device), len(batches)
        for tokens, targets in batches:
            with self.autocast():
                cross_entropy, aux = losses_of(model, tokens, targets)
            total += cross_entropy.detach() / parts
            self.backward(cross_entropy / parts + aux_weight / parts * aux)
        return total

    def evaluate(self, model: nn.Module, batches: list[Batch]) -> Tensor:
        """The sum of the microbatches' cross-entropies, 0-d."""
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        for tokens, targets in batches:
            with self.autocast():
                loss += losses_of(model, tokens, targets)[0].double()
        return loss

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        loss.backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[Tensor], None]
    ) -> Tensor:
        """Clip, call `step` with the gradients' norm, and clear. Returns the norm, 0-d."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        limit = self.config.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        step(norm)
        optimizer.zero_grad(set_to_none=True)
        return norm


class FullyShard(System):
    """fsdp_runtime or FSDP2: the same calls, another import."""

    def materialise(self, model: nn.Module, initialise: Initialise | None) -> nn.Module:
        """Shard, on the meta device so that no rank ever holds the whole model; then allocate and initialize."""
        self.shard(model)
        return model if initialise is None else super().materialise(model, initialise)

    def shard(self, model: nn.Module) -> None:
        """`fully_shard` on each layer, then on the root."""
        layers = wrap_order(model)
        fully_shard, more = self.fully_shard(model, layers)
        bf16 = self.config.precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for module in layers:
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=self.config.reshard,
                mp_policy=policy,
                **more,
            )
        fully_shard(model, mesh=self.mesh, mp_policy=policy, **more)

    def fully_shard(
        self, model: nn.Module, layers: list[nn.Module]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function, and the arguments that only it has."""
        raise NotImplementedError

    def autocast(self) -> Any:
        """Parameters and inputs are cast by the policy."""
        return torch.autocast(self.device.type, enabled=False)


class FSDP2(FullyShard):
    """torch.distributed.fsdp.fully_shard."""

    name = "fsdp2"

    def fully_shard(
        self, model: nn.Module, layers: list[nn.Module]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Torch's."""
        from torch.distributed.fsdp import fully_shard

        return fully_shard, {}


class Runtime(FullyShard):
    """fsdp_runtime.fully_shard, with `--block` as its block policy."""

    name = "fsdp_runtime"

    def __init__(
        self, config: RunConfig, device: torch.device, mesh: DeviceMesh | None, **options: Any
    ) -> None:
        """`options` are further arguments of `fully_shard`, before those of the config."""
        super().__init__(config, device, mesh)
        self.options = options

    def fully_shard(
        self, model: nn.Module, layers: list[nn.Module]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Ours."""
        from fsdp_runtime import fully_shard

        if self.config.block == "auto":
            ranks = 1 if self.mesh is None else self.mesh.size(self.mesh.ndim - 1)
            policy = declared_blocks(self.config.optimizer, model, [*layers, model], ranks)
        else:
            policy = parse_block_option(self.config.block)
        return fully_shard, {
            "block_policy": policy,
            "quantization_policy": quantization(self.config.quantize, self.config.reduce),
            **self.options,
        }

    def build(
        self, model: nn.Module, initialise: Initialise | None, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """As `System.build`."""
        model, optimizer = super().build(model, initialise, make_optimizer)
        if self.config.offload_activations:
            self._offload = OffloadActivations(model)
        return model, optimizer

    def autocast(self) -> Any:
        """Around forward: activations go to CPU memory, where the option says so."""
        return self._offload if self.config.offload_activations else super().autocast()

    def begin_step(self, model: nn.Module, step: int) -> None:
        """Round gradients as any run does in this step, resumed or not."""
        model.set_reduction_step(step)  # type: ignore[operator]


class DDP(System):
    """torch's DistributedDataParallel: not sharded."""

    name = "ddp"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Gradients are all-reduced in buckets."""
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)


class DeepSpeed(System):
    """DeepSpeed ZeRO-3 with the same optimizer; backward, clipping and step are the engine's."""

    name = "deepspeed"

    def build(
        self, model: nn.Module, initialise: Initialise | None, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
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
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model), config=settings, dist_init_required=False
        )
        self.engine = engine
        return engine, optimizer

    def autocast(self) -> Any:
        """The engine casts."""
        return torch.autocast(self.device.type, enabled=False)

    def backward(self, loss: Tensor) -> None:
        """The engine divides by the microbatches itself; the loop has done so already."""
        self.engine.backward(loss * self.config.accumulate)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[Tensor], None]
    ) -> Tensor:
        """The engine's step."""
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(float(norm if norm is not None else 0.0), device=self.device)


_ADAPTERS: dict[str, type[System]] = {kind.name: kind for kind in (Runtime, FSDP2, DDP, DeepSpeed, System)}


def make_system(config: RunConfig, device: torch.device, mesh: DeviceMesh | None) -> System:
    """The adapter of ``config.system``.

    Raises:
        TrainError: the system is not installed.
    """
    reason = not_installed(config.system)
    if reason:
        raise TrainError(f"--system {config.system}: {reason}")
    return _ADAPTERS[config.system](config, device, mesh)


def not_installed(system: str) -> str | None:
    """Why a system cannot run here, or None."""
    if system == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "not installed (pip install deepspeed)"
    return None


def quantization(weights: str, gradients: str) -> Any:
    """The policy of `--quantize` and `--reduce`; None where nothing is quantized."""
    from fsdp_runtime import QuantizationPolicy
    from fsdp_runtime.quantization import BlockFP8, BlockInt8

    if weights == gradients == "none":
        return None
    codes: Any = {"none": None, "bf16": "bf16", "int8": BlockInt8(256, rounding="stochastic")}
    blocks: Any = {"none": None, "fp8": BlockFP8((128, 128)), "int8": BlockInt8(256)}
    return QuantizationPolicy(weights=blocks[weights], gradients=codes[gradients])


def build_hf_model(
    path: str, seed: int, vocab_size: int, checkpointing: bool, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The causal language model that a ``config.json`` describes, the same on every rank.

    Raises:
        TrainError: transformers is missing, the file is not such a configuration, or its vocabulary is too small.
    """
    if importlib.util.find_spec("transformers") is None:
        raise TrainError("--hf-config needs transformers: pip install 'fsdp-runtime[hf]'")
    import transformers

    try:
        settings = json.loads(Path(path).read_text())
        kind = settings.pop("model_type")
        config = transformers.AutoConfig.for_model(kind, **settings)
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except KeyError as error:
        raise TrainError(f"--hf-config {path}: no {error} in it") from error
    except Exception as error:  # transformers checks little: whatever a wrong value leads to
        raise TrainError(f"--hf-config {path}: {' '.join(str(error).split())[:300]}") from error
    if config.vocab_size < vocab_size:
        raise TrainError(
            f"--hf-config {path}: a vocabulary of {config.vocab_size}, the data has {vocab_size} tokens"
        )
    model.config.use_cache = False  # type: ignore[union-attr, unused-ignore]
    if checkpointing:
        old = getattr(model, "gradient_checkpointing_enable", None)  # deprecated in 5.24
        enable: Any = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})
    return model
