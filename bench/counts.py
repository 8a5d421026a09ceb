"""Exact counts of one step, the same on any machine: collectives, bytes, dispatcher calls, live memory.

python -m bench counts                     8, 64, 1024 simulated and 2, 4 real ranks; writes results/counts-counts.json
python -m bench counts --write-expected    instead: the committed expectations that the tests hold our own counts to
python -m bench zero                       bytes of ZeRO's stages, and their formulas; writes results/zero.json

A simulated world is torch's fake process group: this process stands for rank 0, collectives send nothing, and all
else is as it would be, up to the last byte. Every figure is what a system does beyond the same model's own step with
no sharding at all. On real ranks our runtime uses collectives too, which is what it does on other backends than gloo.

The peak's floor is the most that is live at once of own shards, states, reduced gradients, activations, one gathered
unit and one unit's gradients; of the systems in one world the least.

ZeRO's stages are options of the same `fully_shard` (docs/guides/memory.md has the code). Counted are the bytes that a
rank receives in a step, in nodes and between them, by the process groups of its collectives.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from . import calls
from .measure import ROOT, fake_ranks, launch, mib, options_of, save, save_tables, table, table_of
from .models import WORKLOADS, batch_of
from .systems import SYSTEMS, Job, Trainer, build, why_not
from .tally import Tally

WARM_UP = 3  # steps; the first records the order of units and builds the optimizer's state
SIMULATED, REAL = (8, 64, 1024), (2, 4)
COUNTED = ("ours", "ours-lean", "fsdp2", "deepspeed")
# May fail without costing the others their figures, and set no floor: not all kinds of their memory are known.
PEERS = ("deepspeed",)
KINDS = ("sharded", "state", "gathered", "gradients", "parked", "temporaries")
EXPECTED = ROOT / "bench" / "expected_counts.json"
# What the tests compare: small models, so that it takes seconds. (workload, ranks)
GATE = (("gate", 8), ("gate", 64), ("gate", 1024), ("gate-stacked", 8), ("gate-prime", 7))


def count(name: str, job: Job) -> dict[str, Any]:
    """Counts of one step of a system after some steps of warm-up.

    Returns:
        {"parts": {"forward" | "backward" | "update": {...}}, "peak": ..., "at_peak": {kind: bytes}, "each": ...}
    """
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
    """A system's costs beyond the same model's own step with no sharding, from two results of `count`.

    Bytes of the update are left out: an optimizer's own writes are as large as its shard.
    """
    out: dict[str, Any] = {key: {} for key in ("collectives", "calls", "copied", "written", "ops")}
    out["wire_bytes"] = 0
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
    return {**out, **{key: found[key] for key in ("peak", "floor", "at_peak", "each")}}


def _difference(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    changed = {key: a.get(key, 0) - b.get(key, 0) for key in sorted({*a, *b})}
    return {key: value for key, value in changed.items() if value}


# -- systems in one world ----------------------------------------------------------------------------------------------


def plain(workload: str) -> dict[str, Any]:
    """The same model's own step: what is subtracted."""
    with fake_ranks(1) as mesh:
        return count("plain", Job(WORKLOADS[workload], mesh))


def compare(workload: str, ranks: int, systems: tuple[str, ...], base: dict[str, Any]) -> dict[str, Any]:
    """`outside` of each system that can run, in one simulated world; of the others the reason."""
    with fake_ranks(ranks) as mesh:
        return _compare(Job(WORKLOADS[workload], mesh), systems, base)


def compare_simulated(request: dict[str, Any]) -> dict[str, Any]:
    """The same in a new process, since DeepSpeed remembers the groups of the first world."""
    return compare(request["workload"], request["simulated"], request["systems"], request["base"])


def compare_here(request: dict[str, Any]) -> dict[str, Any]:
    """The same on the ranks that this is called on; the request brings the plain model's counts."""
    return _compare(Job.of(request), request["systems"], request["base"])


def _compare(job: Job, systems: tuple[str, ...], base: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in systems:
        reason = why_not(name, job)
        try:
            found[name] = {"skipped": reason} if reason else outside(count(name, job), base)
        except Exception as error:
            if name not in PEERS:
                raise
            found[name] = {"skipped": f"{type(error).__name__}: {error}"}
    return found


def gate() -> dict[str, Any]:
    """Our own counts for the regression gate."""
    bases = {workload: plain(workload) for workload, _ in GATE}
    figures = {}
    for workload, ranks in GATE:
        own = compare(workload, ranks, ("ours",), bases[workload])["ours"]
        figures[f"{workload} on {ranks} ranks"] = own
    return figures


def as_table(figures: dict[str, dict[str, Any]]) -> str:
    """Markdown: one row a world and system."""
    header = "ranks; system; gathers; reductions; others; wire MiB; padding; copied forward MiB; copied backward MiB; "
    header += "calls; peak MiB; of FSDP2's; above the floor"
    rows = []
    for world, systems in figures.items():
        peak = systems.get("fsdp2", {}).get("peak")
        floors = (found["floor"] for name, found in systems.items() if "floor" in found and name not in PEERS)
        floor = min(floors, default=None)
        for name, found in systems.items():
            if "skipped" in found:
                continue
            launches = dict(found["collectives"])
            gathers, reductions = (launches.pop(kind, 0) for kind in ("all_gather", "reduce_scatter"))
            rows.append(
                [world, SYSTEMS[name].label, gathers, reductions, sum(launches.values()), mib(found["wire_bytes"]),
                 f"{found['padding']:.2%}", *(mib(found["copied"][part]) for part in ("forward", "backward")),
                 sum(found["calls"].values()), mib(found["peak"]),
                 f"{found['peak'] / peak:.1%}" if peak else "",
                 f"{found['peak'] / floor - 1:.1%}" if floor else ""]
            )  # fmt: skip
    missing = {
        f"\n{SYSTEMS[name].label} on {world} ranks is not in the table: {found['skipped']}."
        for world, systems in figures.items()
        for name, found in systems.items()
        if "skipped" in found
    }
    return "\n".join([table(header.split("; "), rows), *sorted(missing)])


def memory_table(figures: dict[str, dict[str, Any]]) -> str:
    """Markdown: live bytes at the peak, by kind."""
    rows = [
        [world, SYSTEMS[name].label, *(mib(found["at_peak"].get(kind, 0)) for kind in KINDS)]
        for world, systems in figures.items()
        for name, found in systems.items()
        if "skipped" not in found
    ]
    return table(["ranks", "system", *(f"{kind} MiB" for kind in KINDS)], rows)


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Count, print, write."""
    parser.add_argument("--simulated-only", action="store_true", help="leave the real ranks out")
    parser.add_argument("--write-expected", action="store_true", help=f"only write {EXPECTED.name} again")
    options = options_of(parser, arguments, workload="counts")
    if options.write_expected:
        write_expected()
        return 0
    base = plain(options.workload)
    request = {"workload": options.workload, "systems": COUNTED, "base": base}
    figures = {
        f"{ranks} simulated": launch(compare_simulated, 1, {**request, "simulated": ranks})
        for ranks in SIMULATED
    }
    if not options.simulated_only:
        request["options"] = {"transport": "collectives"}
        figures |= {f"{ranks} real": launch(compare_here, ranks, request) for ranks in REAL}
    print(as_table(figures), memory_table(figures), sep="\n\n")
    print(f"\nwritten to {save(f'counts-{options.workload}', figures)}")
    return 0


def write_expected() -> None:
    """Commit to today's counts."""
    content = {
        "torch": torch.__version__.split("+")[0],
        "figures": gate(),
        "python_calls": {"at_most": calls.at_most(), "goal": calls.GOAL},
    }
    EXPECTED.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"written to {EXPECTED}")


# -- ZeRO's stages -----------------------------------------------------------------------------------------------------

RECIPES = {  # name: reshard_after_forward (None: ranks of a node), keeps parameters until they change, reduces once
    "ZeRO-1": (False, True, True),
    "ZeRO-2": (False, True, False),
    "ZeRO-3": (True, False, False),
    "ZeRO-3 with hpZ": (None, False, False),
}


def zero_bytes(name: str, workload: Any, ranks: int, node: int, microbatches: int) -> tuple[float, float]:
    """Bytes that a rank receives in a step: over all ranks, and inside its node."""
    from fsdp_runtime import fully_shard
    from fsdp_runtime.train.model import losses_of
    from ragged_shard.testing import simulated_ranks

    from .models import build as build_model

    reshard, keeps, reduces_once = RECIPES[name]
    with simulated_ranks(ranks) as world:
        model: Any = build_model(workload.shape)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=node if reshard is None else reshard)
        fully_shard(model)
        model.set_reshard_after_backward(not keeps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            world.calls.clear()
            for number in range(microbatches):
                model.set_requires_gradient_sync(not reduces_once or number + 1 == microbatches)
                losses_of(model, *batch_of(workload, step, number))[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = world.calls[0][0]  # the first gather is over all ranks
        return (
            sum(received for group, received in world.calls if group == whole),
            sum(received for group, received in world.calls if group != whole),
        )


def zero_formula(
    name: str, blocks: int, root: int, ranks: int, node: int, microbatches: int
) -> tuple[float, float]:
    """The same by formula, from the bytes of parameters in blocks and around them; gradients have as many."""
    reshard, keeps, reduces_once = RECIPES[name]
    times = 1 if keeps else microbatches
    gathers = times * (root + blocks * (2 if reshard else 1))
    reductions = (1 if reduces_once else microbatches) * (root + blocks)
    inside = times * blocks * (node - 1) / node if reshard is None else 0.0
    return (gathers + reductions) * (ranks - 1) / ranks, inside


def main_zero(parser: ArgumentParser, arguments: list[str]) -> int:
    """Count, compare with the formulas, print and save."""
    from .models import build as build_model

    parser.add_argument("--node", type=int, default=8, help="ranks of a node")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    options = options_of(parser, arguments, workload="counts", ranks=64)
    workload, rows = WORKLOADS[options.workload], []
    model = build_model(workload.shape)
    total, blocks = nbytes_of(model.parameters()), nbytes_of(model.blocks.parameters())
    for microbatches in options.microbatches:
        for name in RECIPES:
            sizes = (options.ranks, options.node, microbatches)
            counted = zero_bytes(name, workload, *sizes)
            formula = zero_formula(name, blocks, total - blocks, *sizes)
            share = f"{sum(counted) / sum(formula) - 1:+.2%}"
            rows.append([name, microbatches, *map(mib, counted), *map(mib, formula), share])
    text = (
        f"{mib(total)} MiB of parameters in fp32, {options.ranks} simulated ranks in nodes of {options.node}. MiB that "
        "a rank receives in a step over all ranks and inside its node; padding is above the formula."
    )
    header = "recipe; microbatches; all ranks; in the node; by formula; in the node, by formula; difference"
    return save_tables("zero", [table_of("Bytes of ZeRO's stages", text, header, rows, exact=True)])
