"""Exact counts of one step, the same on any machine: collectives, bytes, dispatcher calls, live memory.

python -m bench counts                     8, 64, 1024 simulated and 2, 4 real ranks; writes results/counts-counts.json
python -m bench counts --write-expected    instead: the committed expectations that the tests hold our own counts to

A simulated world is torch's fake process group: this process stands for rank 0, collectives send nothing, and all
else is as it would be, up to the last byte. Every figure is what a system does beyond the same model's own step with
no sharding at all. On real ranks our runtime uses collectives too, which is what it does on other backends than gloo.

What is counted of an op is generic: every tensor that its schema says it writes, and every result with memory of its
own, counts with its bytes as *written*; if the op does nothing but copy, cast or join, as *copied* too. Ops that a
kernel calls inside itself are part of that op. Collectives count apart, with what this rank receives by the usual ring
formulas. The size of every storage that was seen is looked at before each op and when it dies: what storages gain,
lose or exchange is counted once somebody computes with it.

The peak's floor is the most that is live at once of own shards, states, reduced gradients, activations, one gathered
unit and one unit's gradients; of the systems in one world the least.
"""

import itertools
import json
import weakref
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard import RaggedDTensor

from .measure import ROOT, fake_ranks, launch, mib, options_of, record, table_of
from .models import WORKLOADS, batch_of
from .systems import SYSTEMS, CannotRunError, Job, Trainer, build, reason_of

WARM_UP = 3  # steps; the first records the order of units and builds the optimizer's state
SIMULATED, REAL = (8, 64, 1024), (2, 4)
COUNTED = ("ours", "ours-apart", "ours-lean", "fsdp2", "fsdp2-apart", "deepspeed")
# May fail without costing the others their figures, and set no floor: not all kinds of their memory are known.
PEERS = ("deepspeed",)
KINDS = ("sharded", "state", "gathered", "gradients", "parked", "temporaries")
EXPECTED = ROOT / "bench" / "expected_counts.json"
# What the tests compare: small models, so that it takes seconds. (workload, ranks)
GATE = (("gate", 8), ("gate", 64), ("gate", 1024), ("gate-stacked", 8), ("gate-prime", 7))


def count(name: str, job: Job) -> dict[str, Any]:
    """Counts of one step of a system after some steps of warm-up, by its parts, and its memory at the peak."""
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
        tally.mark("gradients", (p.grad for p in trainer.module.parameters()), shards=True)
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
    # DeepSpeed's optimizer has copies of its own in fp32; all others the module's parameters.
    groups, states = trainer.optimizer.param_groups, trainer.optimizer.state.values()
    tally.mark("sharded", (p for group in groups for p in group["params"]), force=True)
    tally.mark("state", (v for state in states for v in state.values() if hasattr(v, "untyped_storage")))


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


def outside(whole: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A system's costs beyond the same model's own step with no sharding, from two results of `count`.

    Bytes of the update are left out: an optimizer's own writes are as large as its shard.
    """
    out: dict[str, Any] = {key: {} for key in ("collectives", "calls", "copied", "written", "ops")}
    out["wire_bytes"] = 0
    for part, figures in whole["parts"].items():
        base = plain["parts"][part]
        out["wire_bytes"] += figures["wire_bytes"]
        for kind, number in figures["collectives"].items():
            out["collectives"][kind] = out["collectives"].get(kind, 0) + number
        out["calls"][part] = figures["calls"] - base["calls"]
        out["ops"][part] = _difference(figures["ops"], base["ops"])
        if part != "update":
            for key in ("copied", "written"):
                out[key][part] = sum(figures[key].values()) - sum(base[key].values())
    gathered = whole["parts"]["forward"]["wire_bytes"] * whole["ranks"] / max(whole["ranks"] - 1, 1)
    out["padding"] = gathered / plain["parameter_bytes"] - 1 if whole["ranks"] > 1 else 0.0
    return {**out, **{key: whole[key] for key in ("peak", "floor", "at_peak", "each")}}


def _difference(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    changed = {key: a.get(key, 0) - b.get(key, 0) for key in sorted({*a, *b})}
    return {key: value for key, value in changed.items() if value}


# -- systems in one world ----------------------------------------------------------------------------------------------


def plain(workload: str) -> dict[str, Any]:
    """The same model's own step: what is subtracted."""
    with fake_ranks(1) as mesh:
        return count("plain", Job(WORKLOADS[workload], mesh))


def compare(workload: str, ranks: int, systems: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    """`outside` of each system that can run, in one simulated world; of the others the reason."""
    with fake_ranks(ranks) as mesh:
        return _compare(Job(WORKLOADS[workload], mesh), systems, base)


def compare_on_ranks(request: dict[str, Any]) -> dict[str, Any]:
    """`compare` in new processes, since DeepSpeed remembers the first world's groups; simulated, or on these ranks."""
    if ranks := request.get("simulated"):
        return compare(request["workload"], ranks, request["systems"], request["base"])
    return _compare(Job.of(request), request["systems"], request["base"])


def _compare(job: Job, systems: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    costs: dict[str, Any] = {}
    for name in systems:
        try:
            costs[name] = outside(count(name, job), base)
        except Exception as error:
            if name not in PEERS and not isinstance(error, CannotRunError):
                raise
            costs[name] = {"skipped": reason_of(error)}
    return costs


def gate() -> dict[str, Any]:
    """Our own counts for the regression gate."""
    bases = {workload: plain(workload) for workload, _ in GATE}
    figures = {}
    for workload, ranks in GATE:
        own = compare(workload, ranks, ("ours",), bases[workload])["ours"]
        figures[f"{workload} on {ranks} ranks"] = own
    return figures


def tables(workload: str, figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each world and system: the counts, and the live bytes at the peak by kind."""
    rows, memory, missing = [], [], set()
    for world, systems in figures.items():
        peak = systems.get("fsdp2", {}).get("peak")
        floors = (costs["floor"] for name, costs in systems.items() if "floor" in costs and name not in PEERS)
        floor = min(floors, default=None)
        for name, costs in systems.items():
            label = SYSTEMS[name].label
            if "skipped" in costs:
                missing.add(f" {label} on {world} ranks is not in the table: {costs['skipped']}.")
                continue
            launches = dict(costs["collectives"])
            gathers, reductions = (launches.pop(kind, 0) for kind in ("all_gather", "reduce_scatter"))
            rows.append(
                [world, label, gathers, reductions, sum(launches.values()), mib(costs["wire_bytes"]),
                 f"{costs['padding']:.2%}", *(mib(costs["copied"][part]) for part in ("forward", "backward")),
                 sum(costs["calls"].values()), mib(costs["peak"]),
                 f"{costs['peak'] / peak:.1%}" if peak else "",
                 f"{costs['peak'] / floor - 1:.1%}" if floor else ""]
            )  # fmt: skip
            memory.append([world, label, *(mib(costs["at_peak"].get(kind, 0)) for kind in KINDS)])
    text = (
        "Beyond the same model's own step with no sharding. *Copied* are bytes written by ops that only move or cast"
        " values, the gradients themselves included; *calls* are dispatcher calls."
    )
    header = "ranks; system; gathers; reductions; others; wire MiB; padding; copied forward MiB; copied backward MiB; "
    header += "calls; peak MiB; of FSDP2's; above the floor"
    text += "".join(sorted(missing))
    title, kinds = "Live memory at the peak of the step", "; ".join(f"{kind} MiB" for kind in KINDS)
    return [
        table_of(f"Exact counts of one step, workload {workload}", text, header, rows, exact=True),
        table_of(title, "In the same steps, by kind.", f"ranks; system; {kinds}", memory, exact=True),
    ]


def main_counts(parser: ArgumentParser, arguments: list[str]) -> int:
    """Count, print, write."""
    parser.add_argument("--simulated-only", action="store_true", help="leave the real ranks out")
    parser.add_argument("--write-expected", action="store_true", help=f"only write {EXPECTED.name} again")
    options = options_of(parser, arguments, workload="counts")
    if options.write_expected:
        write_expected(figures=gate(), torch=torch.__version__.split("+")[0])
        return 0
    request = {"workload": options.workload, "systems": COUNTED, "base": plain(options.workload)}
    worlds: list[Any] = [(f"{ranks} simulated", 1, {"simulated": ranks}) for ranks in SIMULATED]
    if not options.simulated_only:
        by_collectives = {"options": {"transport": "collectives"}}
        worlds += [(f"{ranks} real", ranks, by_collectives) for ranks in REAL]
    figures = {world: launch(compare_on_ranks, ranks, {**request, **more}) for world, ranks, more in worlds}
    return record(f"counts-{options.workload}", tables(options.workload, figures), **figures)


def write_expected(**parts: Any) -> None:
    """Commit to today's figures: replace these parts of the file."""
    content = json.loads(EXPECTED.read_text()) | parts
    EXPECTED.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"written to {EXPECTED}")


# -- counting ----------------------------------------------------------------------------------------------------------

# Ops that only move values: copies, casts, joins.
COPIES = {
    "aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::stack",
    "aten::constant_pad_nd", "aten::_chunk_cat", "aten::split_with_sizes_copy", "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy", "fsdp::chunk_cat",
}  # fmt: skip
# Memory without values, or labels: neither calls of interest nor writes.
SILENT = {"profiler::_record_function_enter_new", "profiler::_record_function_exit"}
EMPTY = {f"aten::{op}" for op in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")}
# What this rank receives: (argument that counts, factor as a function of the number of ranks).
WIRE = {
    "all_gather": lambda sent, received, ranks: sent * (ranks - 1),
    "reduce_scatter": lambda sent, received, ranks: sent * (ranks - 1) / ranks,
    "all_reduce": lambda sent, received, ranks: 2 * sent * (ranks - 1) / ranks,
    "all_to_all": lambda sent, received, ranks: received * (ranks - 1) / ranks,
    "broadcast": lambda sent, received, ranks: sent,
    "other": lambda sent, received, ranks: sent,
}


@dataclass
class Part:
    """Counts of one part of a step."""

    # dispatcher calls by op; views and allocations included, collectives and profiler labels not
    calls: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)  # launches by kind
    wire_bytes: float = 0.0  # received by this rank
    # copied, written: bytes by kind of the memory they went to
    copied: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    _writes: list[tuple["Block", int, bool]] = field(default_factory=list)

    def sort_writes(self) -> None:
        """Count the writes under the kinds that their memory turned out to be."""
        for block, nbytes, copy in self._writes:
            self.written[block.kind] += nbytes
            if copy:
                self.copied[block.kind] += nbytes
        self._writes.clear()


@dataclass(eq=False)
class Block:
    """One storage: what it is for, and its bytes now."""

    kind: str = "temporaries"
    nbytes: int = 0
    is_shard: bool = False  # of gradients: what a reduction leaves


class Memory:
    """Live bytes of every storage that was seen, by kind. Kinds may be told late; the peak is taken by replay."""

    def __init__(self, parked: Callable[[], int]) -> None:
        self._blocks: weakref.WeakKeyDictionary[torch.UntypedStorage, Block] = weakref.WeakKeyDictionary()
        self._events: list[tuple[Block, int]] = []
        self._parked, self._parked_bytes = Block("parked"), parked

    def block(self, storage: torch.UntypedStorage, kind: str = "temporaries") -> Block:
        """The record of a storage; a new one is entered as of this kind."""
        block = self._blocks.get(storage)
        if block is None:
            block = self._blocks[storage] = Block(kind)
            weakref.finalize(storage, self._change, block, 0).atexit = False
            self._change(block, storage.nbytes())
        return block

    def look(self) -> None:
        """Note what storages have gained and lost since the last look, losses first, and what is parked."""
        blocks = [(block, storage.nbytes()) for storage, block in self._blocks.items()]
        blocks.append((self._parked, self._parked_bytes()))
        changed = [(now - block.nbytes, block, now) for block, now in blocks if now != block.nbytes]
        for _, block, nbytes in sorted(changed, key=lambda change: change[0]):
            self._change(block, nbytes)

    def _change(self, block: Block, nbytes: int) -> None:
        if block.nbytes != nbytes:
            self._events.append((block, nbytes - block.nbytes))
            block.nbytes = nbytes

    def restart(self) -> None:
        """Forget the past: the peak is taken from here on, beginning with what is live."""
        self.look()
        live = [block for block in (*self._blocks.values(), self._parked) if block.nbytes]
        self._events = [(block, block.nbytes) for block in live]

    def peak(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """Most bytes at once; what they were; and the most of each kind by itself, at whatever time."""
        now: Counter[str] = Counter()
        each: Counter[str] = Counter()
        at_peak: dict[str, int] = {}
        most = total = 0
        for block, change in self._events:
            now[block.kind] += change
            total += change
            each[block.kind] = max(each[block.kind], now[block.kind])
            if total > most:
                most, at_peak = total, dict(now)
        kinds = {kind: nbytes for kind, nbytes in sorted(at_peak.items()) if nbytes}
        return most, kinds, {kind: nbytes for kind, nbytes in sorted(each.items()) if nbytes}

    def floor(self, unit: int) -> int:
        """Most bytes at once of what no runtime can do without.

        That is all but parked memory, what of gathered parameters is more than `unit` bytes, and the same of gradients
        apart from their shards. A runtime's own temporaries count with the activations.
        """
        now: Counter[str] = Counter()
        most = 0
        for block, change in self._events:
            now["shards" if block.is_shard else block.kind] += change
            spared = now["parked"] + sum(max(now[kind] - unit, 0) for kind in ("gathered", "gradients"))
            most = max(most, sum(now.values()) - spared)
        return most


class Tally(TorchDispatchMode):
    """Counts while entered; see the module's docstring."""

    def __init__(self, ranks: int, parked: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.ranks = ranks
        self.memory = Memory(parked)
        self.parts: dict[str, Part] = {}
        self._part = Part()

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """Count under this name."""
        before, self._part = self._part, self.parts.setdefault(name, Part())
        try:
            yield self._part
        finally:
            self._part = before

    def mark(self, kind: str, tensors: Iterable[Any], *, force: bool = False, shards: bool = False) -> None:
        """Say what the memory of tensors is for. The first word counts, unless forced. `shards`: of gradients."""
        for tensor in tensors:
            local = _local(tensor)
            if local is not None:
                block = self.memory.block(local.untyped_storage())
                block.is_shard = block.is_shard or shards
                if force or block.kind == "temporaries":
                    block.kind = kind

    def sort_writes(self) -> None:
        """Call when all kinds are known."""
        for part in self.parts.values():
            part.sort_writes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, RaggedDTensor)) for t in types):
            return NotImplemented  # its own dispatch first: what it then does on local tensors comes here
        kwargs = kwargs or {}
        self.memory.look()
        result = func(*args, **kwargs)
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._collective(name, args, result)
        elif name not in SILENT:
            self._part.calls[name] += 1
            self._writes(name, func._schema, args, kwargs, result)
        return result

    def _writes(self, name: str, schema: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {self.memory.block(t.untyped_storage()) for t in tensors}
        targets = []
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                targets += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        written = [(self.memory.block(t.untyped_storage()), t.nbytes) for t in targets]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                block = self.memory.block(tensor.untyped_storage())
                if block not in known:
                    written.append((block, tensor.nbytes))
        if name == "fsdp::all_gather_copy_in":  # its schema does not say which part of the output it writes
            written = [(self.memory.block(result[0].untyped_storage()), result[0].nbytes)]
        if name not in EMPTY:
            self._part._writes += [(block, nbytes, name in COPIES) for block, nbytes in written if nbytes]

    def _collective(self, name: str, args: Any, result: Any) -> None:
        short = name.split("::")[1].strip("_")
        kind = collective_of(short)
        if kind is None:
            return
        tensors = [[t for t in tree_leaves(a) if isinstance(t, torch.Tensor)] for a in args[:2]]
        received = sum(t.nbytes for t in tensors[0])
        sent = sum(t.nbytes for t in tensors[1]) if len(tensors) > 1 and tensors[1] else received
        self._part.collectives[kind] += 1
        self._part.wire_bytes += WIRE[kind](sent, received, self.ranks)
        if kind == "all_gather":
            self.mark("gathered", tensors[0])
        if kind == "reduce_scatter":
            self.mark("gradients", itertools.chain(*tensors))


def collective_of(op: str) -> str | None:
    """`allgather_base`, `reduce_scatter_tensor_coalesced`, `allreduce`, ... as one of the keys of WIRE."""
    flat = op.replace("_", "")
    for kind in WIRE:
        if flat.startswith(kind.replace("_", "")):
            return kind
    return None if flat.startswith(("wait", "barrier", "monitoredbarrier")) else "other"


def _local(tensor: Any) -> torch.Tensor | None:
    if isinstance(tensor, (DTensor, RaggedDTensor)):
        return tensor.to_local()
    return tensor if isinstance(tensor, torch.Tensor) else None
