"""``fsdp-train plan``: the bytes of one rank of a run by kind, before anything is allocated.

`fully_shard` shards the model on the meta device, in one process that stands for one rank of many: weights, gradients,
optimizer state and gathered buffers follow from the layout. Activations are counted on fake tensors.
"""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_runtime.memory import UnitMemory, fake_tensors, unit_memory
from ragged_shard.device import DeviceLayer, use_device_layer
from ragged_shard.testing import simulated_ranks

from .._torch.tree import local_tensor, tensors_in
from .config import RunConfig
from .errors import TrainError
from .hardware import pick_device
from .launch import pick_ranks
from .model import ModelConfig, Transformer, losses_of
from .optimizers import make_optimizer, optimizer_spec
from .systems import Runtime, make_mesh
from .trainer import data_of


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank."""

    weights: int  # parameter shards, and codes that are kept in addition
    states: int  # of the optimizer
    scratch: int  # buffers that the optimizer keeps
    gradients: int  # shards, after the last reduction
    buffers: int  # gathered parameters and unreduced gradients, at most
    activations: int  # activations and temporaries, at most
    pass_peak: int  # the most bytes of activations, buffers and gradients together

    @property
    def at_rest(self) -> int:
        """Bytes between steps, when gradients are cleared."""
        return self.weights + self.states + self.scratch

    @property
    def peak(self) -> int:
        """The most live bytes of forward and backward, from the second step on."""
        return self.at_rest + self.pass_peak


def make_plan(config: RunConfig, vocab_size: int, world_size: int) -> MemoryPlan:
    """Plan a run on rank 0; raises `TrainError` for another system than fsdp_runtime."""
    if config.system != "fsdp_runtime":
        raise TrainError(f"plan counts fsdp_runtime, not {config.system}")
    device, spec, live = pick_device(config.device), optimizer_spec(config.optimizer), LiveBytes()
    sizes = replace(config.model, vocab_size=vocab_size)
    with simulated_ranks(world_size, collectives="skip"):
        system = Runtime(config, device, make_mesh(config.hsdp, device.type))
        with torch.device("meta"):
            model = Transformer(sizes, checkpointing=config.checkpointing)
        modules = [model, *model.blocks]
        system.shard(model)
        with use_device_layer(DeviceLayer(torch.device("meta"))):  # nothing moves there, and nothing waits
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            with live:
                optimizer: Any = make_optimizer(config.optimizer, model, lr=config.lr, weight_decay=0.1)
                with contextlib.suppress(RuntimeError, NotImplementedError):  # an exchange between ranks
                    optimizer.step() if spec.is_torch else optimizer.step(grad_norm=1.0)
        units = [unit_memory(module) for module in modules]
        states = sum(local_tensor(value).nbytes for value in tensors_in(optimizer.state))
    rows = config.batch // (world_size * config.accumulate)
    activations, with_gradients = _pass_bytes(config, sizes, rows, device, units)
    gradients, buffers = sum(unit.gradients for unit in units), _buffers(units)
    earlier = gradients if config.accumulate > 1 else 0  # of earlier microbatches
    return MemoryPlan(
        weights=sum(unit.weights + unit.codes for unit in units),
        states=states,
        # Muon's exchange is the same on all devices; scratch of elementwise kernels is small on real ones.
        scratch=live.now - states if spec.routed else 0,
        gradients=gradients,
        buffers=buffers,
        activations=activations,
        pass_peak=buffers + max(with_gradients, activations + earlier),
    )


def _pass_bytes(
    config: RunConfig, sizes: ModelConfig, rows: int, device: torch.device, units: list[UnitMemory]
) -> tuple[int, int]:
    """The most bytes of one microbatch's activations and temporaries; the most with gradient shards reduced so far."""
    reduced = [0] * len(units)
    alone, with_gradients = LiveBytes(), LiveBytes(lambda: sum(reduced))

    def reduce(unit: int, parameter: torch.Tensor) -> None:
        reduced[unit], parameter.grad = units[unit].gradients, None

    before = torch.get_default_dtype()
    with fake_tensors():
        try:
            torch.set_default_dtype(torch.bfloat16 if config.precision == "bf16" else torch.float32)
            with torch.device(device):
                model = Transformer(sizes, checkpointing=config.checkpointing)
                tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64)
        finally:
            torch.set_default_dtype(before)
        owners = {p: unit for unit, module in enumerate([model, *model.blocks]) for p in module.parameters()}
        for parameter, unit in owners.items():
            parameter.register_post_accumulate_grad_hook(partial(reduce, unit))
        with alone, with_gradients:
            loss, aux = losses_of(model, tokens, torch.zeros_like(tokens))
            (loss + config.model.aux_weight * aux).backward()
    return alone.peak, with_gradients.peak


def _buffers(units: list[UnitMemory]) -> int:
    """The most bytes of buffers: of the root, of units kept for backward, and of two units, one gathered ahead."""
    root, *layers = units
    kept = sum(sum(unit.gathered) for unit in layers if unit.kept_after_forward)

    def moving(unit: UnitMemory) -> int:
        gathered = 0 if unit.kept_after_forward else sum(unit.gathered)
        return gathered + sum(unit.decoding) + sum(unit.reducing)

    two = max((moving(a) + moving(b) for a, b in pairwise(layers)), default=sum(map(moving, layers)))
    return sum(root.gathered) + sum(root.reducing) + kept + two + max(unit.scratch for unit in units)


def print_plan(config: RunConfig, asked_ranks: int | None) -> int:
    """Print the bytes of a run by kind; returns 0. Raises `TrainError` if options do not fit together."""
    ranks = pick_ranks(config, None) if asked_ranks is None else asked_ranks
    config.check(ranks)
    plan = make_plan(config, data_of(config).vocab_size, ranks)
    rows = [
        ("weights and their codes", plan.weights),
        ("optimizer state", plan.states),
        ("buffers that the optimizer keeps", plan.scratch),
        ("gradients", plan.gradients),
        ("gathered buffers, at most", plan.buffers),
        ("activations and temporaries, at most", plan.activations),
        ("gradients, buffers, activations together, at most", plan.pass_peak),
        ("peak", plan.peak),
    ]
    print(f"rank 0 of {ranks}; MB are 10^6 bytes")
    for text, nbytes in rows:
        print(f"{text + ':':<52}{nbytes / 1e6:>12,.2f} MB")
    return 0


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages, of fake and meta tensors too, that operations inside it allocate until they end."""

    def __init__(self, pool: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.pool = pool
        self.peak = 0  # the most bytes after an operation, with the bytes of `pool`
        self._sizes: dict[int, int] = {}  # of live storages, by identity

    @property
    def now(self) -> int:
        """Bytes now."""
        return sum(self._sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {local_tensor(value).untyped_storage()._cdata for value in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for value in tensors_in(out):
            storage = local_tensor(value).untyped_storage()
            if storage._cdata not in arguments:  # else a view, or written in place
                self._count(storage)
        self.peak = max(self.peak, self.now + self.pool())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes and storage.nbytes():
            self._sizes[key] = storage.nbytes()
            # Python keeps a finalizer's referents until it has run: so no method of this object, whose `pool` may refer
            # to the model.
            weakref.finalize(storage, self._sizes.pop, key, 0).atexit = False
