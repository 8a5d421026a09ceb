"""The systems under comparison behind one interface: same model, same batches, same optimizer.

    build("fsdp2", job) -> Trainer      forward(batch) -> loss, backward(loss), update()
                                        CannotRunError where it cannot run here, with the reason

How a model is wrapped is `fsdp_runtime.train.systems`, as in `fsdp-train compare`. Here are the systems that only
benchmarks know, and our own runtime with one of its ideas taken away, through public arguments of `fully_shard`: a
transport that copies through staging buffers, as a runtime without one flat buffer has to; the planner's baselines.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .models import WORKLOADS, Workload

LEARNING_RATE = 1e-3
OPTIMIZERS = {  # here: in `fsdp-train`
    "adamw": "torch-adamw", "block-adamw": "adamw", "adamw8bit": "adamw8bit", "muon": "muon", "shampoo": "shampoo",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One piece of work for any system."""

    workload: Workload
    mesh: Any  # of one axis, over all ranks
    device: str = "cpu"
    optimizer: str = "adamw"
    precision: str = "float32"  # or "bfloat16": computed in bf16; weights, reductions and optimizer in fp32
    # of our own `fully_shard`; `block_policy` may be text, such as "rows:32"
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: dict[str, Any]) -> "Job":
        """The job that a request describes, on a mesh over all ranks."""
        device = request.get("device", "cpu")
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
        options = {key: request[key] for key in ("optimizer", "precision", "options") if key in request}
        return cls(WORKLOADS[request["workload"]], mesh, device, **options)


@dataclass
class Trainer:
    """A wrapped model and its optimizer. `forward`, `backward`, `update` are the three parts of a step."""

    name: str
    module: Any
    optimizer: Any
    forward: Callable[[Any], Any]
    backward: Callable[[Any], None]
    update: Callable[[], None]

    def train(self, batch: Any) -> Any:
        """One whole step; the loss on this rank as a tensor."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss.detach()

    def step(self, batch: Any) -> float:
        """`train`, and wait for the loss."""
        return float(self.train(batch))


class CannotRunError(RuntimeError):
    """A system cannot do a job on this machine; says why."""


def reason_of(error: Exception) -> str:
    """Why a system is missing, from what building or running it raised."""
    return str(error) if isinstance(error, CannotRunError) else f"{type(error).__name__}: {error}"


def build(name: str, job: Job) -> Trainer:
    """Wrap a new model and build its optimizer; raises CannotRunError, with the reason, where it cannot run here."""
    if reason := SYSTEMS[name].why_not(job):
        raise CannotRunError(reason)
    return SYSTEMS[name].build(name, job)


def fully_shard_of(system: str) -> Any:
    """Our `fully_shard`, or torch's for "fsdp2"."""
    package = "torch.distributed.fsdp" if system == "fsdp2" else "fsdp_runtime"
    return importlib.import_module(package).fully_shard


def shard(system: str, model: Any, units: Iterable[Any], **options: Any) -> Any:
    """The model, on whose units and then on itself a system's `fully_shard` was called."""
    for module in (*units, model):
        fully_shard_of(system)(module, **options)
    return model


def left_out(skipped: dict[str, str]) -> str:
    """A sentence, after a space, for each system that could not run; "" if there is none."""
    named = ((SYSTEMS[name].label, why) for name, why in skipped.items() if name in SYSTEMS)
    return "".join(f" {label} is not in the table: {why}." for label, why in named)


# -- how each is built -------------------------------------------------------------------------------------------------


def _as_compared(system: str, name: str, job: Job) -> Trainer:
    """As `fsdp-train compare` builds it."""
    from fsdp_runtime.train.systems import make_system

    return _finish(name, job, make_system(_config(job, system), torch.device(job.device), job.mesh))


def _ours(name: str, job: Job, *, apart: bool = False, **options: Any) -> Trainer:
    """Our runtime, with the ends `apart` or not; `options` are further arguments of its `fully_shard`."""
    from fsdp_runtime.train.systems import Runtime

    arguments = {**job.options, **_block_policy(job), **options}
    system = Runtime(_config(job, "fsdp_runtime"), torch.device(job.device), job.mesh, **arguments)
    wrap = partial(_ends_apart, "ours", job) if apart else lambda model: model
    return _finish(name, job, system, wrap=wrap)


def _ends_apart(system: str, job: Job, model: Any) -> Any:
    """The model; its head is a unit, and its embedding one which backward does not need."""
    options = {**job.options, **_block_policy(job)} if system == "ours" else {}
    shard = partial(fully_shard_of(system), mesh=job.mesh, **options)
    shard(model.embed, reshard_after_forward=True).set_unshard_in_backward(False)
    shard(model.head, reshard_after_forward=False)
    return model


def _lean(name: str, job: Job) -> Trainer:
    """No gathers ahead, and the ends apart."""
    trainer = _ours(name, job, apart=True)
    trainer.module.set_prefetch_depth(0)
    return trainer


def _fsdp2_apart(name: str, job: Job) -> Trainer:
    """FSDP2 as compared, and the ends apart."""
    from fsdp_runtime.train.systems import make_system

    system = make_system(_config(job, "fsdp2"), torch.device(job.device), job.mesh)
    return _finish(name, job, system, wrap=partial(_ends_apart, "fsdp2", job))


def _given_order(name: str, job: Job, *, lcm: bool = False) -> Trainer:
    from layout_planner.baselines import in_given_order

    return _ours(name, job, planner=partial(in_given_order, lcm=lcm))


def _quantized(name: str, job: Job) -> Trainer:
    from fsdp_runtime.train.systems import quantization

    return _ours(name, job, quantization_policy=quantization("fp8", "int8"))


def _fsdp1(name: str, job: Job) -> Trainer:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from fsdp_runtime.train.systems import make_system

    def wrap(model: Any) -> Any:
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return FullyShardedDataParallel(
            model,
            device_mesh=job.mesh,
            device_id=torch.cuda.current_device() if job.device == "cuda" else torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
            mixed_precision=half if job.precision == "bfloat16" else None,
            use_orig_params=True,
        )

    system = make_system(_config(job, "one"), torch.device(job.device), job.mesh)
    return _finish(name, job, system, wrap=wrap, casts=True)


def _deepspeed(name: str, job: Job) -> Trainer:
    """As compared; also in a process without a launcher, which stands for rank 0."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed refuses to start without
    return _as_compared("deepspeed", name, job)


def _config(job: Job, system: Any) -> Any:
    """The job as a `fsdp_runtime.train` config, without clipping and checkpoints."""
    from fsdp_runtime.train import RunConfig

    return RunConfig(
        system=system,
        batch=job.workload.batch * job.mesh.size(),
        precision="bf16" if job.precision == "bfloat16" else "fp32",
        clip=0.0,
        optimizer=OPTIMIZERS[job.optimizer],
    )


def _finish(
    name: str, job: Job, system: Any, *, wrap: Callable[[Any], Any] = lambda model: model, casts: bool = False
) -> Trainer:
    """A trainer of the model after `wrap`, which may cast it (`casts`), by a system of `fsdp_runtime.train.systems`."""
    from fsdp_runtime.train.model import losses_of

    made: list[Any] = []

    def make(module: Any) -> Any:
        made.append(make_optimizer(module, job))
        return made[0]

    module, _ = system.build(wrap(job.workload.model(job.device)), None, make)
    autocast = contextlib.nullcontext if casts else system.autocast

    def forward(batch: Any) -> Any:
        with autocast():
            return losses_of(module, *batch)[0]

    def update() -> None:
        if engine := getattr(system, "engine", None):  # DeepSpeed's
            engine.step()
        else:
            made[0].step()
            made[0].zero_grad(set_to_none=True)

    return Trainer(name, module, made[0], forward, system.backward, update)


def _block_policy(job: Job) -> dict[str, Any]:
    """The job's policy as an argument, text such as `rows:32` for every matrix; else the optimizer's own."""
    from layout_planner import parse_block

    policy = job.options.get("block_policy")
    if not isinstance(policy, str):
        return {"block_policy": policy} if policy else {}
    block = parse_block(policy)
    return {"block_policy": lambda name, parameter: block if parameter.ndim > 1 else None}


def make_optimizer(module: Any, job: Job) -> Any:
    """The job's optimizer over a module's parameters: torch's fused AdamW, or one of `fsdp-train`'s."""
    if job.optimizer == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    from fsdp_runtime.train import optimizers

    name = OPTIMIZERS[job.optimizer]
    return optimizers.make_optimizer(name, module, lr=LEARNING_RATE, weight_decay=0.01)


# -- one idea taken away -----------------------------------------------------------------------------------------------


class After:
    """A work, None where it was queued on the current stream, with something to do once it has completed."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        """Wait, then act; not again when it is called again."""
        if self._work is not None:
            self._work.wait()
        then, self._then = self._then, lambda: None
        then()

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._work is None or bool(self._work.is_completed())


class Staged:
    """A `dbuffer.Transport` around another: what is sent and received lies in memory of its own, and is copied."""

    def __init__(self, rank: int, inner: Any) -> None:
        self.name = f"staged {inner.name}"
        self._rank, self._inner = rank, inner

    def all_gather(self, pairs: Any, label: str) -> After:
        """Copy in, gather, copy out."""
        staging = []
        for receive, send in pairs:
            whole = receive.new_empty(receive.shape)
            own = whole.narrow(0, self._rank * send.numel(), send.numel())
            staging.append((whole, own.copy_(send)))
        work = self._inner.all_gather(staging, label)

        def copy_out() -> None:
            for (receive, _), (whole, _) in zip(pairs, staging, strict=True):
                receive.copy_(whole)

        return After(work, copy_out)

    def reduce_scatter(self, pairs: Any, op: Any, label: str) -> After:
        """Copy in, reduce."""
        staging = [(receive, send.clone()) for receive, send in pairs]
        return After(self._inner.reduce_scatter(staging, op, label), staging.clear)

    def all_reduce(self, tensors: Any, op: Any, label: str) -> Any:
        """As the other; the ablation exchanges nothing else."""
        return self._inner.all_reduce(tensors, op, label)


def staged(group: Any) -> Staged:
    """For `fully_shard(transport=staged)`: what the group would have had, with staging buffers."""
    from dbuffer.transport import transport_of

    return Staged(group.rank(), transport_of(group, "auto"))


# -- which can run -----------------------------------------------------------------------------------------------------


def _one_rank(job: Job) -> str | None:
    # In a simulated world there is one process anyhow, and losses are not compared.
    if job.mesh.size() == 1 or dist.get_backend() == "simulated":
        return None
    return "not distributed: its losses would be those of one rank's batches"


def _plain_parameters(job: Job) -> str | None:
    if job.optimizer == "adamw":
        return None
    return f"it hands flat pieces of parameters to {job.optimizer}, which needs whole tensors or DTensors"


def _deepspeed_can(job: Job) -> str | None:
    missing = importlib.util.find_spec("deepspeed") is None
    return "the package deepspeed is not installed" if missing else _plain_parameters(job)


@dataclass(frozen=True)
class System:
    """How a system is built, when it can be, and what it is called in tables."""

    label: str
    build: Callable[[str, Job], Trainer]
    why_not: Callable[[Job], str | None] = lambda job: None
    communicates: bool = True  # else each rank trains by itself, and its losses are nobody else's


SYSTEMS = {
    "plain": System("no sharding, one rank", partial(_as_compared, "one"), _one_rank),
    "alone": System("alone: no communication at all", partial(_as_compared, "one"), communicates=False),
    "ddp": System("DDP (not sharded)", partial(_as_compared, "ddp")),
    "ours": System("fsdp_runtime", _ours),
    "ours-collectives": System(
        "fsdp_runtime, gloo's collectives only", partial(_ours, transport="collectives")
    ),
    "ours-peer-memory": System("fsdp_runtime, peer memory only", partial(_ours, transport="peer_memory")),
    "ours-quantized": System("fsdp_runtime, fp8 gathers, int8 reductions", _quantized),
    "ours-apart": System("fsdp_runtime, ends apart", partial(_ours, apart=True)),
    "ours-lean": System("fsdp_runtime, ends apart, no prefetch", _lean),
    "ours-staged": System("without zero-copy", partial(_ours, transport=staged)),
    "ours-given-order": System("planner off: given order", _given_order),
    "ours-lcm": System("planner off: lcm rule", partial(_given_order, lcm=True)),
    "fsdp2": System("FSDP2", partial(_as_compared, "fsdp2")),
    "fsdp2-apart": System("FSDP2, ends apart", _fsdp2_apart),
    "fsdp1": System("FSDP1", _fsdp1, _plain_parameters),
    "deepspeed": System("DeepSpeed ZeRO-3", _deepspeed, _deepspeed_can),
}
