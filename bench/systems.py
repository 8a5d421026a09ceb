"""The systems under comparison behind one interface: same model, same batches, same optimizer.

    build("fsdp2", job) -> Trainer      forward(batch) -> loss, backward(loss), update()
    why_not("megatron-fsdp", job)       None, or the reason why it cannot run here

An adapter is the few lines that a user of that system would write.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .workloads import Workload, loss_of


@dataclass(frozen=True)
class Job:
    """One piece of work for any system.

    Attributes:
        mesh: of one dimension, over all ranks.
        precision: "float32", or "bfloat16": computed in bf16, weights, reductions and optimizer in fp32.
        options: further keyword arguments for our own `fully_shard`; `block_policy` may be text, such as "rows:32".
    """

    workload: Workload
    mesh: Any
    device: str = "cpu"
    optimizer: str = "adamw"
    precision: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trainer:
    """A wrapped model and its optimizers. `forward`, `backward`, `update` are the three parts of a step."""

    name: str
    module: Any
    optimizers: list[Any]
    forward: Callable[[Any], Any]
    backward: Callable[[Any], None]
    update: Callable[[], None]

    def step(self, batch: Any) -> float:
        """One whole step; the loss on this rank."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return float(loss.detach())


def build(name: str, job: Job, model: Any = None) -> Trainer:
    """Wrap a model (None: the workload's, new) and build its optimizer.

    Raises:
        RuntimeError: the system cannot run here; the reason.
    """
    if reason := why_not(name, job):
        raise RuntimeError(f"{name} cannot run: {reason}")
    model = job.workload.model(job.device) if model is None else model
    return SYSTEMS[name].build(name, model, job)


def why_not(name: str, job: Job) -> str | None:
    """Why a system cannot do this job on this machine; None where it can."""
    return SYSTEMS[name].why_not(job)


# -- adapters ---------------------------------------------------------------------------------------------------


def _plain(name: str, model: Any, job: Job) -> Trainer:
    return _trainer(name, model, job, _autocast(job))


def _ours(name: str, model: Any, job: Job) -> Trainer:
    from fsdp_runtime import MixedPrecisionPolicy, fully_shard

    options = {"mp_policy": _mixed(MixedPrecisionPolicy, job), **job.options}
    if isinstance(options.get("block_policy"), str):
        options["block_policy"] = _block_policy(options["block_policy"])
    elif job.optimizer in ("adamw8bit", "shampoo"):
        options.setdefault("block_policy", _declared(job.optimizer))
    for block in model.blocks:
        fully_shard(block, mesh=job.mesh, **options)
    return _trainer(name, fully_shard(model, mesh=job.mesh, **options), job)


def _fsdp2(name: str, model: Any, job: Job) -> Trainer:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = _mixed(MixedPrecisionPolicy, job)
    for block in model.blocks:
        fully_shard(block, mesh=job.mesh, mp_policy=policy)
    return _trainer(name, fully_shard(model, mesh=job.mesh, mp_policy=policy), job)


def _fsdp1(name: str, model: Any, job: Job) -> Trainer:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=job.mesh,
        device_id=torch.device("cuda", _cuda_index()) if job.device == "cuda" else torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=_mixed(MixedPrecision, job) if job.precision != "float32" else None,
        use_orig_params=True,
    )
    return _trainer(name, wrapped, job)


def _ddp(name: str, model: Any, job: Job) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, process_group=job.mesh.get_group(), gradient_as_bucket_view=True)
    return _trainer(name, wrapped, job, _autocast(job))


def _deepspeed(name: str, model: Any, job: Job) -> Trainer:
    os.environ.setdefault("DS_ACCELERATOR", job.device)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": job.workload.batch,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": job.device != "cpu",
        },
        "bf16": {"enabled": job.precision == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    optimizers = make_optimizers(model, job)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizers[0], config=config, dist_init_required=False
    )
    return Trainer(
        name,
        engine,
        optimizers,
        lambda b: loss_of(engine, b),
        engine.backward,
        lambda: engine.step() and None,
    )


def _megatron(name: str, model: Any, job: Job) -> Trainer:
    from megatron_fsdp import fully_shard

    optimizers = make_optimizers(model, job)
    wrapped, optimizer = fully_shard(
        module=model,
        optimizer=optimizers[0],
        device_mesh=job.mesh,
        dp_shard_dim=job.mesh.mesh_dim_names[0],
        fsdp_unit_modules=[type(model.blocks[0])],
        zero_dp_strategy=3,
    )
    return _trainer(name, wrapped, job, _autocast(job), [optimizer])


def _trainer(name: str, module: Any, job: Job, context: Any = None, optimizers: Any = None) -> Trainer:
    optimizers = optimizers or make_optimizers(module, job)

    def forward(batch: Any) -> Any:
        if context is None:
            return loss_of(module, batch)
        with context():
            return loss_of(module, batch)

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Trainer(name, module, optimizers, forward, lambda loss: loss.backward(), update)


def _cuda_index() -> int:
    import torch

    return torch.cuda.current_device()


def _block_policy(text: str) -> Any:
    """`rows:32`, `tile:32x32` or `whole` for every tensor of two dimensions and more."""
    from layout_planner import parse_block

    block = parse_block(text)
    return lambda name, parameter: block if parameter.ndim > 1 else None


def _declared(optimizer: str) -> Any:
    """What an optimizer declares that it needs whole."""
    import block_optim
    from layout_planner import Tile

    if optimizer == "adamw8bit":
        return block_optim.AdamW8bit.block_policy(block=Tile(*TILE))
    return block_optim.Shampoo.block_policy()


def _variant(which: str) -> Callable[[str, Any, Job], Trainer]:
    """Our runtime with one idea taken away."""

    def build(name: str, model: Any, job: Job) -> Trainer:
        from . import variants

        trainer: Trainer = getattr(variants, which)(name, model, job)
        return trainer

    return build


def _mixed(policy: Any, job: Job) -> Any:
    import torch

    if job.precision == "float32":
        return policy()
    return policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _autocast(job: Job) -> Any:
    """For systems that have no policy of their own."""
    import torch

    if job.precision == "float32":
        return None
    return lambda: torch.autocast(job.device, torch.bfloat16)


# -- optimizers -------------------------------------------------------------------------------------------------


def make_optimizers(module: Any, job: Job) -> list[Any]:
    """The job's optimizer over a module's parameters; for Muon a second one takes what is no matrix of a block."""
    import torch

    parameters = list(module.parameters())
    if job.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)]
    import block_optim

    if job.optimizer == "block-adamw":
        return [block_optim.AdamW(parameters, lr=LEARNING_RATE)]
    if job.optimizer == "adamw8bit":
        from layout_planner import Tile

        return [block_optim.AdamW8bit(parameters, lr=LEARNING_RATE, block=Tile(*TILE))]
    if job.optimizer == "shampoo":
        return [block_optim.Shampoo(parameters, lr=LEARNING_RATE)]
    if job.optimizer == "muon":
        matrices = [p for n, p in module.named_parameters() if p.ndim == 2 and "blocks" in n]
        chosen = {id(p) for p in matrices}
        rest = [p for p in parameters if id(p) not in chosen]
        return [
            block_optim.Muon(matrices, lr=20 * LEARNING_RATE),
            torch.optim.AdamW(rest, lr=LEARNING_RATE, fused=True),
        ]
    raise ValueError(f"optimizer {job.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")


LEARNING_RATE = 1e-3
TILE = (32, 32)  # of 8-bit AdamW's states
OPTIMIZERS = ("adamw", "block-adamw", "adamw8bit", "muon", "shampoo")


# -- who can run ------------------------------------------------------------------------------------------------


def _always(job: Job) -> str | None:
    return None


def _one_rank(job: Job) -> str | None:
    import torch.distributed as dist

    if dist.get_backend().startswith("simulated"):  # one process anyhow, and losses are not compared
        return None
    return (
        None if job.mesh.size() == 1 else "not distributed: its losses would be those of one rank's batches"
    )


def _runtime_is_there(job: Job) -> str | None:
    return _module_has("fsdp_runtime", "fully_shard")


def _plain_parameters(job: Job) -> str | None:
    if job.optimizer == "adamw":
        return None
    return f"it hands flat pieces of parameters to {job.optimizer}, which needs whole tensors or DTensors"


def _deepspeed_can(job: Job) -> str | None:
    return _missing("deepspeed") or _plain_parameters(job)


def _megatron_can(job: Job) -> str | None:
    if job.device == "cpu":
        return "needs CUDA: its buffers and streams are CUDA's"
    return _missing("megatron_fsdp") or _plain_parameters(job)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"the package {module} is not installed"


def _module_has(module: str, name: str) -> str | None:
    if reason := _missing(module):
        return reason
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
    return None if hasattr(found, name) else f"{module} of this commit has no {name}"


@dataclass(frozen=True)
class System:
    """How a system is built, when it can be, and what it is called in tables."""

    label: str
    build: Callable[[str, Any, Job], Trainer]
    why_not: Callable[[Job], str | None] = _always


SYSTEMS = {
    "plain": System("no sharding, one rank", _plain, _one_rank),
    "ddp": System("DDP (not sharded)", _ddp),
    "ours": System("fsdp_runtime", _ours, _runtime_is_there),
    "ours-staged": System("without zero-copy", _variant("staged"), _runtime_is_there),
    "ours-held": System("gradients not fused", _variant("held"), _runtime_is_there),
    "ours-given-order": System("planner off: given order", _variant("given_order"), _runtime_is_there),
    "ours-lcm": System("planner off: lcm rule", _variant("lcm"), _runtime_is_there),
    "ours-gathering": System("blocks ignored", _variant("gathering"), _runtime_is_there),
    "fsdp2": System("FSDP2", _fsdp2),
    "fsdp1": System("FSDP1", _fsdp1, _plain_parameters),
    "deepspeed": System("DeepSpeed ZeRO-3", _deepspeed, _deepspeed_can),
    "megatron-fsdp": System("Megatron-FSDP", _megatron, _megatron_can),
}
