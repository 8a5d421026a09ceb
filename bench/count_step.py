"""One system's exact counts in one step, in a simulated world or a real one."""

from collections.abc import Iterable
from typing import Any

from .systems import Job, Trainer, build
from .workloads import batch_of

WARM_UP = 3  # steps; the first records the order of units and builds the optimizer's state


def count(name: str, job: Job) -> dict[str, Any]:
    """Counts of one step of a system after some steps of warm-up.

    Returns:
        {"parts": {"forward" | "backward" | "update": {...}}, "peak": ..., "at_peak": {kind: bytes}, "each": ...}
    """
    import torch.distributed as dist

    from .tally import Tally

    trainer = build(name, job)
    tally = Tally(job.mesh.size(), lambda: parked_bytes(trainer.module))
    watch = GatheredParameters(tally, sharded=name not in ("plain", "ddp"))
    batches = [batch_of(job.workload, step, dist.get_rank(), job.device) for step in range(WARM_UP + 1)]
    with watch, tally:
        with tally.part("warm-up"):
            for batch in batches[:-1]:
                trainer.step(batch)
        tally.parts.clear()
        mark_persistent(tally, trainer)
        tally.memory.restart()
        with tally.part("forward"):
            loss = trainer.forward(batches[-1])
        with tally.part("backward"):
            trainer.backward(loss)
        tally.mark("gradients", (p.grad for p in trainer.module.parameters()))
        tally.mark_shards(p.grad for p in trainer.module.parameters())
        with tally.part("update"):
            trainer.update()
    tally.sort_writes()
    peak, at_peak, each = tally.memory.peak()
    return {
        "ranks": tally.ranks,
        "parameter_bytes": nbytes_of(trainer.module.parameters()),
        "parts": {part: _plain(tally.parts[part]) for part in ("forward", "backward", "update")},
        "peak": peak,
        "floor": tally.memory.floor(largest_unit(trainer.module)),
        "at_peak": at_peak,
        "each": each,
    }


def largest_unit(module: Any) -> int:
    """Bytes of the largest of a model's layers and of what it has around them, in the parameters' dtype."""
    parts = [*module.blocks, *(child for name, child in module.named_children() if name != "blocks")]
    return max(nbytes_of(part.parameters()) for part in parts)


def nbytes_of(parameters: Iterable[Any]) -> int:
    """Bytes of whole parameters; DeepSpeed's own are empty and remember their size."""
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in parameters)


def parked_bytes(module: Any) -> int:
    """Bytes that our runtime keeps for the next gathered buffer; 0 for other systems."""
    from fsdp_runtime import FSDPModule
    from fsdp_runtime.memory import gathered_memory

    sharded: bool = isinstance(module, FSDPModule)
    return gathered_memory(module).parked_bytes if sharded else 0


def mark_persistent(tally: Any, trainer: Trainer) -> None:
    """Say which memory is parameters (this rank's part) and which the optimizer's state."""
    tally.mark("sharded", (getattr(p, "ds_tensor", p) for p in trainer.module.parameters()), force=True)
    for optimizer in trainer.optimizers:
        # DeepSpeed's optimizers have copies of their own in fp32; all others the module's parameters.
        tally.mark("sharded", (p for group in optimizer.param_groups for p in group["params"]), force=True)
        for state in optimizer.state.values():
            tally.mark("state", (value for value in state.values() if hasattr(value, "untyped_storage")))


class GatheredParameters:
    """Marks the memory of plain parameters that a sharded module has during its forward, and of their gradients."""

    def __init__(self, tally: Any, *, sharded: bool) -> None:
        self._tally, self._sharded = tally, sharded
        self._seen: set[int] = set()
        self._handle: Any = None

    def __enter__(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._look)

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()

    def _look(self, module: Any, inputs: Any) -> None:
        import torch

        for parameter in module._parameters.values():
            if type(parameter) is not torch.nn.Parameter:
                continue
            if self._sharded:
                self._tally.mark("gathered", [parameter])
            if id(parameter) not in self._seen and parameter.is_leaf and parameter.requires_grad:
                self._seen.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def _has_gradient(self, parameter: Any) -> None:
        if parameter.grad is not None:
            self._tally.mark("gradients", [parameter.grad])


def _plain(part: Any) -> dict[str, Any]:
    return {
        "calls": sum(part.calls.values()),
        "ops": dict(sorted(part.calls.items())),
        "collectives": dict(sorted(part.collectives.items())),
        "wire_bytes": round(part.wire_bytes),
        "copied": dict(sorted(part.copied.items())),
        "written": dict(sorted(part.written.items())),
    }


def outside(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What a system does beyond the same model's own step with no sharding, from two results of `count`.

    Bytes of the update are left out: an optimizer's own writes are as large as its shard.
    """
    out: dict[str, Any] = {
        "collectives": {},
        "wire_bytes": 0,
        "calls": {},
        "copied": {},
        "written": {},
        "ops": {},
    }
    for part, figures in found["parts"].items():
        base = plain["parts"][part]
        out["wire_bytes"] += figures["wire_bytes"]
        for kind, number in figures["collectives"].items():
            out["collectives"][kind] = out["collectives"].get(kind, 0) + number
        out["calls"][part] = figures["calls"] - base["calls"]
        out["ops"][part] = _difference(figures["ops"], base["ops"])
        if part != "update":
            for key in ("copied", "written"):
                out[key][part] = sum(figures[key].values()) - sum(base[key].values())
    gathered = found["parts"]["forward"]["wire_bytes"] * found["ranks"] / max(found["ranks"] - 1, 1)
    out["padding"] = gathered / plain["parameter_bytes"] - 1 if found["ranks"] > 1 else 0.0
    return {
        **out,
        "peak": found["peak"],
        "floor": found["floor"],
        "at_peak": found["at_peak"],
        "each": found["each"],
    }


def _difference(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    changed = {key: a.get(key, 0) - b.get(key, 0) for key in sorted({*a, *b})}
    return {key: value for key, value in changed.items() if value}
