"""Time that the host takes: a runtime's in a step, in clipping and in wrapping; each package's without the runtime.

python -m bench host          writes results/host.json
python -m bench host --tiny   only prints the cost of units of tiny parameters and of one gradient
python -m bench clip          clipping 512 parameters of 1024 elements in 8 units, on rank 0 of 4
python -m bench wrap          `fully_shard` of Llama 405B by layers on meta, on rank 0 of 1024
python -m bench planner       layout-planner: time to plan all layers of real models on 1024 ranks, and their padding
python -m bench placement     ragged-shard: an optimizer step and clipping on ragged tensors and on torch's DTensor
python -m bench buffer        dbuffer: moving a group without the collective, ours and FSDP2's
python -m bench exchange      dbuffer: large gathers and reductions by each transport, on 2 to 16 real ranks

One process stands for one rank of torch's fake process group, and all systems take turns. Time is the main thread's
CPU time, which a busy machine disturbs less than it does a clock. Of whole models few tokens are taken, so that the
added time shows. 64 units are so small that everything is added; the difference of units of 2 and 32 tiny parameters is
the way of single gradients into the buffer and to `.grad`.
"""

import contextlib
import gc
import importlib
import resource
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from . import measure
from .calls import PACKAGES, Calls
from .compare import PARTS, build_all, parts_of
from .measure import fake_ranks, interleave, launch, medians_ms, options_of, record, table, table_of
from .models import WORKLOADS, batch_of, groups_of, sum_units
from .systems import SYSTEMS, Job, left_out, shard

SIMULATED = (8, 64, 1024)
COMPARED = ("ours", "fsdp2")
WHOLE = [*COMPARED, "deepspeed"]  # whole models of these are measured
UNITS, WIDTH = 64, 8
UNITS_GOAL = 0.6  # of FSDP2's, at most
FEW, MANY, STACK = 2, 32, 8  # parameters of a unit; units
CLIP_GOALS = {"torch's function": 1.3, "model.clip_grad_norm_": 0.3}
WRAP_RANKS, LAYERS, IN_LAYER = 1024, 126, 9


def measure_models(request: dict[str, Any]) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """In a new process: thread CPU seconds of each part, round by round; missing systems and why."""
    with fake_ranks(request["simulated"]) as mesh:
        job = Job(WORKLOADS[request["workload"]], mesh)
        plain = {"plain": SYSTEMS["plain"].build("plain", job)}
        others, skipped = build_all(WHOLE, job)
        batch = batch_of(job.workload, 0, 0)
        steps = {
            name: partial(parts_of, trainer, batch, time.thread_time)
            for name, trainer in {**plain, **others}.items()
        }

        def parts_and_faults(step: Callable[[], list[float]]) -> dict[str, float]:
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            seconds = dict(zip(PARTS, step(), strict=True))
            return {**seconds, "faults": resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults}

        return interleave(steps, request["rounds"], warm_up=2, timer=parts_and_faults), skipped


def _sharded(system: str, model: Any, mesh: Any) -> Any:
    """The model with each child and the root as a unit; unchanged for "plain"."""
    return model if system == "plain" else shard(system, model, model, mesh=mesh)


def forward_backward(model: Any) -> tuple[float, float]:
    """Thread CPU seconds of both of a small model, which then has no gradients."""
    began = time.thread_time()
    loss = model(torch.ones(2, WIDTH)).sum()
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    model.zero_grad()
    return middle - began, end - middle


def measure_units(rounds: int) -> dict[str, list[float]]:
    """Thread CPU seconds of forward and backward of 64 linear units of 8 x 8 on four fake ranks, round by round."""
    with fake_ranks(4) as mesh:
        models = {
            name: _sharded(name, nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))), mesh)
            for name in COMPARED
        }
        return interleave(models, rounds, timer=lambda model: sum(forward_backward(model)))


def measure_params(rounds: int) -> dict[str, dict[str, float]]:
    """Thread CPU ms that units of few and many tiny parameters add, each: `{system: {"forward 2": ...}}`.

    The least of all rounds: work that is the same in each of them takes longer only where others disturb it.
    """
    with fake_ranks(4) as mesh:
        models = {
            (name, size): _sharded(name, sum_units(STACK, size, WIDTH), mesh)
            for name in ("plain", *COMPARED)
            for size in (FEW, MANY)
        }
        times = interleave(models, rounds, timer=forward_backward)
    least = {which: list(map(min, zip(*taken, strict=True))) for which, taken in times.items()}
    return {
        name: {
            f"{part} {size}": 1e3 / STACK * (least[name, size][number] - least["plain", size][number])
            for number, part in enumerate(PARTS[:2])
            for size in (FEW, MANY)
        }
        for name in COMPARED
    }


def units_ratio(samples: dict[str, list[float]]) -> float:
    """Ours as a share of FSDP2's: the median over rounds."""
    return statistics.median(a / b for a, b in zip(samples["ours"], samples["fsdp2"], strict=True))


def tables(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's tables: medians, and the time added to the plain model within a round; tiny units."""
    rows = []
    for ranks, samples in figures["samples"].items():
        for name, times in samples.items():
            pairs = zip(times, samples["plain"], strict=True)
            added = statistics.median(
                a["forward"] + a["backward"] - b["forward"] - b["backward"] for a, b in pairs
            )
            cells = (1e3 * statistics.median(s[part] for s in times) for part in PARTS)
            faults = f"{statistics.median(s['faults'] for s in times):,.0f}"
            varied = measure.spread([s["forward"] + s["backward"] for s in times])
            cells = (f"{value:.1f}" for value in (*cells, 1e3 * added))
            rows.append([ranks, SYSTEMS[name].label, *cells, faults, f"{varied:.0%}"])
    header = "simulated ranks; system; forward ms; backward ms; optimizer ms; added ms; page faults; spread"
    text = (
        f"Workload {figures['workload']}; thread CPU milliseconds of one step. *Added* is forward and backward beyond"
        " the same model's without sharding, in the same round. Page faults are memory that torch's CPU allocator took"
        " from the kernel again; on a GPU there are none."
    )
    text += left_out(figures["skipped"])
    out = [table_of("Host time with nothing on the wire", text, header, rows)]
    units = figures["units"]
    rows = [
        [SYSTEMS[name].label, f"{1e3 * statistics.median(times):.2f}", f"{measure.spread(times):.0%}"]
        for name, times in units.items()
    ]
    text = f"Forward and backward of {UNITS} linear units of {WIDTH} x {WIDTH}, thread CPU milliseconds: ours is "
    text += f"{units_ratio(units):.2f} of FSDP2's (goal: at most {UNITS_GOAL})."
    out.append(table_of("Host time of tiny units", text, "system; step ms; spread", rows))
    return [*out, _params_table(figures["params"])]


def _params_table(params: dict[str, dict[str, float]]) -> dict[str, Any]:
    columns = "; ".join(f"{part} of {size}, ms" for part in PARTS[:2] for size in (FEW, MANY))
    rows = []
    for name, added in params.items():
        each = 1e3 * (added[f"backward {MANY}"] - added[f"backward {FEW}"]) / (MANY - FEW)
        rows.append([SYSTEMS[name].label, *(f"{value:.3f}" for value in added.values()), f"{each:.1f}"])
    text = (
        f"Time that units of {FEW} and of {MANY} parameters of {WIDTH} elements add to the plain model, thread CPU time"
        " of one unit, the least of all rounds. One gradient: the time that one more parameter adds to backward."
    )
    return table_of("Host time of tiny parameters", text, f"system; {columns}; one gradient, us", rows)


def main_host(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    parser.add_argument("--tiny", action="store_true", help="only print the last table, tiny parameters")
    o = options_of(parser, arguments, workload="counts", rounds=9, keep_noisy=False)
    if o.tiny:
        measure.print_tables([_params_table(measure_params(5 * o.rounds))])
        return 0
    noise = measure.noise_now()
    figures: dict[str, Any] = {"workload": o.workload, "samples": {}, "skipped": {}}
    for ranks in SIMULATED:  # each in a new process: DeepSpeed remembers the groups of the first world
        request = {"workload": o.workload, "rounds": o.rounds, "simulated": ranks}
        figures["samples"][str(ranks)], missing = launch(measure_models, 1, request)
        figures["skipped"] |= missing
    figures |= {"units": measure_units(5 * o.rounds), "params": measure_params(5 * o.rounds)}
    return record("host", tables(figures), noise + measure.noise_now(), keep_noisy=o.keep_noisy, **figures)


# -- clipping ----------------------------------------------------------------------------------------------------------


def measure_clip(elements: int, rounds: int) -> dict[str, float]:
    """Microseconds of each way to clip, the least of all rounds; plain tensors are this rank's slices alone."""
    import fsdp_runtime

    with fake_ranks(4) as mesh:

        def trained(system: str) -> Any:
            model = _sharded(system, sum_units(8, 64, elements), mesh)
            model(torch.ones(2, elements)).sum().backward()
            return model

        model = trained("ours")
        params, fsdp2 = list(model.parameters()), list(trained("fsdp2").parameters())
        plain = [nn.Parameter(param.to_local().detach().clone()) for param in params]
        for slice_, param in zip(plain, params, strict=True):
            slice_.grad = param.grad.to_local().clone()
        clip = nn.utils.clip_grad_norm_
        ways: dict[str, Callable[[], Any]] = {
            "plain tensors": partial(clip, plain, 1e9),
            "torch's function": partial(clip, params, 1e9),
            "torch's function, FSDP2": partial(clip, fsdp2, 1e9),
            "fsdp_runtime.clip_grad_norm_": partial(fsdp_runtime.clip_grad_norm_, params, 1e9),
            "model.clip_grad_norm_": partial(model.clip_grad_norm_, 1e9),
        }
        return {name: 1e6 * min(times) for name, times in interleave(ways, rounds, warm_up=0).items()}


def main_clip(parser: ArgumentParser, arguments: list[str]) -> None:
    """Measure and print."""
    parser.add_argument("--elements", type=int, default=1024, help="of each parameter")
    options = options_of(parser, arguments, rounds=60)
    times = measure_clip(options.elements, options.rounds)
    plain = times["plain tensors"]
    rows = [[n, f"{took:.0f}", f"{took / plain:.2f}", CLIP_GOALS.get(n, "")] for n, took in times.items()]
    print(table(["512 parameters", "us", "of plain tensors'", "goal, at most"], rows))


# -- wrapping ----------------------------------------------------------------------------------------------------------


def llama(layers: int) -> Any:
    """The tensors of Llama-3.1-405B, on meta, in some number of layers."""
    width, hidden, keys, words = 16384, 53248, 1024, 128256
    shapes = [(width, width), (width, keys), (width, keys), (width, width)]
    shapes += [(width, hidden), (width, hidden), (hidden, width)]

    def layer() -> Any:
        linears = (nn.Linear(*shape, bias=False) for shape in shapes)
        return nn.Sequential(*linears, nn.RMSNorm(width), nn.RMSNorm(width))

    with torch.device("meta"):
        ends = (nn.Embedding(words, width), nn.RMSNorm(width), nn.Linear(width, words, bias=False))
        return nn.Sequential(*ends, nn.Sequential(*(layer() for _ in range(layers))))


def wrap(system: str, layers: int, *, count: bool = False) -> tuple[float, int]:
    """Thread CPU seconds of all `fully_shard` calls, and our own Python calls if they are counted, which is slower."""
    folders = [Path(str(importlib.import_module(name).__file__)).parent for name in PACKAGES]
    gc.collect()  # layouts of earlier models, which equal ones would share
    with fake_ranks(WRAP_RANKS) as mesh:
        model, spy = llama(layers), Calls(folders)
        began = time.thread_time()
        with spy if count else contextlib.nullcontext():
            shard(system, model, model[-1], mesh=mesh)
        return time.thread_time() - began, sum(spy.functions.values())


def main_wrap(parser: ArgumentParser, arguments: list[str]) -> None:
    """Measure and print."""
    parser.add_argument("--tensors", type=int, default=0, help="also ours with as many layers as make these")
    options = parser.parse_args(arguments)
    for system in COMPARED:
        wrap(system, 2)  # imports and look-ups that happen once
    sizes = [("fsdp2", LAYERS), ("ours", LAYERS), ("ours", 2 * LAYERS)]
    if options.tensors:
        sizes.append(("ours", options.tensors // IN_LAYER))
    rows = []
    for system, layers in sizes:
        seconds, tensors = wrap(system, layers)[0], layers * IN_LAYER + 3
        number = f"{wrap(system, layers, count=True)[1]:,}" if system == "ours" else ""
        each = f"{1e6 * seconds / tensors:.0f}"
        rows.append([SYSTEMS[system].label, layers + 1, tensors, f"{seconds:.2f}", each, number])
    print(table(["system", "units", "tensors", "CPU s", "us a tensor", "own Python calls"], rows))


# -- layout-planner ----------------------------------------------------------------------------------------------------

MODELS = ["deepseek-v3", "deepseek-v3 separate", "gpt-oss-120b", "llama-3-70b"]
BLOCKS = ["rows:1", "rows:16", "rows:32", "rows:128"]
PLANNED_RANKS = 1024


def plan_model(name: str, block: str) -> list[tuple[int, Any]]:
    """Layouts of the model's groups, groups of the same shape once, and how often each occurs."""
    from layout_planner import parse_block, plan
    from layout_planner.models import load_model, separate_experts

    base, _, experts = name.partition(" ")
    model = separate_experts(load_model(base)) if experts else load_model(base)
    chosen = parse_block(block)
    return [(group.count, plan(group.specs(chosen), PLANNED_RANKS)) for group in model.groups]


def padding_percent(layouts: list[tuple[int, Any]]) -> float:
    """Padding of all groups, in per cent of the model."""
    padding = sum(count * layout.padding for count, layout in layouts)
    return 100 * padding / sum(count * layout.numel for count, layout in layouts)


def main_planner(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the table."""
    parser.parse_args(arguments)
    rows = []
    for name in MODELS:
        for block in BLOCKS:
            times = interleave({"it": partial(plan_model, name, block)}, 5, warm_up=0)
            padding = padding_percent(plan_model(name, block))
            rows.append([name, block, f"{medians_ms(times)['it']:.0f} ms", f"{padding:.2f} %"])
    print(table(["model", "block", f"plan all layers, {PLANNED_RANKS} ranks", "padding"], rows))


# -- ragged-shard ------------------------------------------------------------------------------------------------------

PLACED = ("ragged", "dtensor", "plain")
CASES: dict[str, dict[str, Any]] = {  # options of AdamW
    "adamw_foreach": {"foreach": True}, "adamw_fused": {"fused": True}, "adamw_forloop": {"foreach": False},
    "clip_grad_norm": {},
}  # fmt: skip
WORLD_SIZE, RANK, WIDE = 64, 1, 512


def parameters(system: str, mesh: Any) -> list[Any]:
    """This rank's parameters with gradients, in one system's form; the same number of local elements in each."""
    from ragged_shard import RaggedDTensor, RaggedShard

    torch.manual_seed(0)

    def make(shape: Any) -> Any:
        local = torch.randn(-(-shape[0] // WORLD_SIZE), *shape[1:])
        whole: dict[str, Any] = {"shape": torch.Size([len(local) * WORLD_SIZE, *shape[1:]])}
        whole["stride"] = local.stride()
        if system == "ragged":
            return RaggedDTensor.from_local(local, mesh, [RaggedShard((0,), (1,) * WORLD_SIZE)], **whole)
        return DTensor.from_local(local, mesh, [Shard(0)], **whole) if system == "dtensor" else local

    tensors = []
    for whole in WORKLOADS["counts"].model("meta").parameters():
        tensors.append(nn.Parameter(make(whole.shape)))
        tensors[-1].grad = make(whole.shape)
    return tensors


def compare_placements(case: str, systems: tuple[str, ...], rounds: int) -> dict[str, float]:
    """Median milliseconds of each system in one of the cases."""
    calls: dict[str, Callable[[], Any]] = {}
    with fake_ranks(WORLD_SIZE, rank=RANK) as mesh:
        for system in systems:
            params = parameters(system, mesh)
            clip = partial(nn.utils.clip_grad_norm_, params, 1.0)
            step = torch.optim.AdamW(params, lr=1e-4, **CASES[case]).step
            calls[system] = clip if case == "clip_grad_norm" else step
        return medians_ms(interleave(calls, rounds))


def construction() -> dict[str, float]:
    """Microseconds of one `from_local` with a layout that is cached, ours and torch's."""
    from ragged_shard import RaggedDTensor, RaggedShard

    whole: dict[str, Any] = {"shape": torch.Size([8 * WORLD_SIZE, WIDE]), "stride": (WIDE, 1)}
    local, ours = torch.zeros(8, WIDE), [RaggedShard((0,), (1,) * WORLD_SIZE)]
    with fake_ranks(WORLD_SIZE, rank=RANK) as mesh:
        calls: dict[str, Callable[[], Any]] = {
            "ragged": lambda: [RaggedDTensor.from_local(local, mesh, ours, **whole) for _ in range(200)],
            "dtensor": lambda: [DTensor.from_local(local, mesh, [Shard(0)], **whole) for _ in range(200)],
        }
        return {name: 1e3 * ms / 200 for name, ms in medians_ms(interleave(calls, 10)).items()}


def main_placement(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the table."""
    parser.parse_args(arguments)
    rows = []
    for case in CASES:
        ms = compare_placements(case, PLACED, rounds=40)
        rows.append([case, *(f"{ms[s]:.2f}" for s in PLACED), f"{ms['ragged'] / ms['dtensor']:.2f}"])
    us = construction()
    cells = (f"{us['ragged']:.2f}", f"{us['dtensor']:.2f}", "", f"{us['ragged'] / us['dtensor']:.2f}")
    header = ["", "ragged ms", "DTensor ms", "plain ms", "ragged / DTensor"]
    print(table(header, [*rows, ["from_local, us", *cells]]))


# -- dbuffer -----------------------------------------------------------------------------------------------------------

WORLD_SIZES = [8, 64, 1024]
DTYPES = ["float32", "bfloat16"]
# FSDP2's reduce also writes the gradients; `write` is their way in ours.
PHASES = ("gather", "reduce", "write")
RANKS = (2, 3, 4, 8, 16)
TRANSPORTS = ("collectives", "peer_memory")
ALONE = "copies alone"
MEASURED = (*TRANSPORTS, ALONE)
REPEATS = 4  # of one move between barriers, which take time themselves


class Nothing:
    """A `dbuffer.Transport` and work in one: everything has completed at once, and nothing is moved."""

    name = "nothing"

    def all_gather(self, *args: Any) -> "Nothing":
        return self

    reduce_scatter = all_gather

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Ours:
    """Every group as one buffer of parameters and one of gradients; each phase over all groups."""

    def __init__(self, model: Any, mesh: Any, dtype: str) -> None:
        from dbuffer import DBuffer, Gather, Recycler, ReduceScatter
        from layout_planner import TensorSpec, plan

        compute = getattr(torch, dtype)
        options: dict[str, Any] = {
            "dtype": torch.float32, "full_dtype": compute, "recycler": Recycler("cpu"), "check_ranks": False,
            "transport": lambda group: Nothing(),
        }  # fmt: skip
        self.groups = []
        for tensors in groups_of(model):
            layout = plan([TensorSpec(name, tuple(p.shape)) for name, p in tensors.items()], mesh.size())
            params, grads = (DBuffer(layout, mesh, **options) for _ in range(2))
            for name, view in params.local_views.items():
                view.copy_(params.geometry.cut(name, tensors[name].detach()))
            values = {name: torch.ones(p.shape, dtype=compute) for name, p in tensors.items()}
            moves = Gather([params]), ReduceScatter([grads], op="avg")
            self.groups.append((params, grads, values, *moves))

    def gather(self) -> None:
        for params, _, _, all_gather, _ in self.groups:
            all_gather.start().wait()
            params.release()

    def reduce(self) -> None:
        for _, grads, _, _, reduce_scatter in self.groups:
            grads.materialize()
            reduce_scatter.start().wait()
            grads.release()

    def before_write(self) -> None:
        for _, grads, *_ in self.groups:
            grads.materialize()

    def write(self) -> None:
        for _, grads, values, *_ in self.groups:
            views = grads.views
            for name, value in values.items():
                views[name].copy_(value)


class FSDP2:
    """The same groups by torch's `fully_shard`, its collectives replaced through its own hooks."""

    def __init__(self, model: Any, mesh: Any, dtype: str) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        def nothing_of(name: str) -> Any:
            base = getattr(_fsdp_collectives, name)
            return type("Nothing", (base,), {"__call__": lambda *args, **kwargs: None})()

        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=getattr(torch, dtype))
        self.modules = [*model.blocks, model]
        for module in self.modules:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        model(torch.zeros(1, 2, dtype=torch.long))  # sets the whole tree up
        model.reshard()
        for module in self.modules:
            module.set_custom_all_gather(nothing_of("DefaultAllGather"))
            module.set_custom_reduce_scatter(nothing_of("DefaultReduceScatter"))
        self.groups = [
            group for module in self.modules for group in module._get_fsdp_state()._fsdp_param_groups
        ]

    def before_gather(self) -> None:
        for module in self.modules:
            module.reshard()

    def gather(self) -> None:
        for module in self.modules:
            module.unshard()
            module.reshard()

    def before_reduce(self) -> None:
        for module, group in zip(self.modules, self.groups, strict=True):
            module.unshard()
            for parameter in group.fsdp_params:
                unsharded = parameter.unsharded_param
                unsharded.grad = torch.ones_like(unsharded)
                parameter.sharded_param.grad = None
            group.comm_ctx.reduce_scatter_states.clear()

    def reduce(self) -> None:
        for group in self.groups:
            group.post_backward()


def measure_buffer(world_size: int, dtype: str, rounds: int) -> dict[tuple[str, str], float]:
    """`{(system, phase): ms}`, medians over rounds of the mean over groups."""
    with fake_ranks(world_size) as mesh:
        build = WORKLOADS["counts"].model
        systems: dict[str, Any] = {
            "dbuffer": Ours(build(), mesh, dtype),
            "FSDP2": FSDP2(build(), mesh, dtype),
        }
        calls, before = (
            {
                (name, phase): getattr(system, prefix + phase)
                for name, system in systems.items()
                for phase in PHASES
                if hasattr(system, prefix + phase)
            }
            for prefix in ("", "before_")
        )
        times = medians_ms(interleave(calls, rounds, before=before))
    return {key: ms / len(systems["dbuffer"].groups) for key, ms in times.items()}


def main_buffer(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the table."""
    rounds, rows = options_of(parser, arguments, rounds=15).rounds, []
    for world_size in WORLD_SIZES:
        for dtype in DTYPES:
            times = measure_buffer(world_size, dtype, rounds)
            for name in ("dbuffer", "FSDP2"):
                cells = [times.get((name, phase), 0.0) for phase in PHASES]
                rows.append([world_size, dtype, name, *(f"{value:.3f}" for value in (*cells, sum(cells)))])
    print(table(["ranks", "dtype", "", *(f"{phase} ms" for phase in PHASES), "all"], rows))


def copies_alone(
    shard: torch.Tensor, full: torch.Tensor, other: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """The copies of a gather and the sums of a reduction, each within this rank's memory. Communicate nothing."""
    from dbuffer.transport.peer.peer_memory import Sum

    ranks = dist.get_world_size()
    (own, *_), (_, *others) = full.chunk(ranks), other.chunk(ranks)
    total = Sum([(shard, own)], range(1, ranks), "sum")

    def gather() -> None:
        for receive, send in zip(full.chunk(ranks), (shard, *others), strict=True):
            receive.copy_(send)

    return {"gather": gather, "reduce": lambda: total.add({peer: [others[peer - 1]] for peer in total.peers})}


def exchange(request: dict[str, Any]) -> dict[str, dict[str, tuple[float, float] | None]]:
    """On a rank: `{kind: {transport: (wall, CPU) milliseconds}}`; None if this machine does not allow it."""
    from dbuffer import DBuffer, Gather, ReduceScatter
    from layout_planner import TensorSpec, plan

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    layout = plan([TensorSpec("full", (request["nbytes"] // 4 // ranks * ranks,))], ranks)
    moves: dict[tuple[str, str], Callable[[], None]] = {}
    buffers = {name: DBuffer(layout, mesh, dtype=torch.float32, transport=name) for name in TRANSPORTS}
    for buffer in buffers.values():
        buffer.materialize()
        for flat in (*buffer.shard, *buffer.full):
            flat.normal_()

    def repeat(move: Callable[[], None]) -> None:
        for _ in range(REPEATS):
            move()

    def wait_for(start: Callable[[], Any]) -> None:
        start().wait()

    for name, buffer in buffers.items():
        gather, reduce = Gather([buffer]).start, ReduceScatter([buffer], op="sum").start
        try:
            gather().wait()
        except ValueError as error:  # the same on all ranks
            print(error, flush=True)
            continue
        for kind, start in (("gather", gather), ("reduce", reduce)):
            moves[kind, name] = partial(repeat, partial(wait_for, start))
    first, second = buffers.values()
    for kind, copies in copies_alone(first.shard[0], first.full[0], second.full[0]).items():
        moves[kind, ALONE] = partial(repeat, copies)
    times = interleave(moves, request["rounds"], timer=measure.wall_and_cpu)

    def medians(key: tuple[str, str]) -> tuple[float, float] | None:
        if key not in times:
            return None
        walls, cpus = zip(*times[key], strict=True)
        of_all = torch.tensor(cpus, dtype=torch.float64)
        dist.all_reduce(of_all)
        return statistics.median(walls) / REPEATS, float(of_all.quantile(0.5)) / REPEATS

    return {kind: {name: medians((kind, name)) for name in MEASURED} for kind in ("gather", "reduce")}


def main_exchange(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the table: wall of rank 0, CPU of all ranks together."""
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="separated by commas")
    parser.add_argument("--mib", default="12", help="gathered; several are separated by commas")
    options = options_of(parser, arguments, rounds=27)
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        for size in map(float, options.mib.split(",")):
            results = launch(exchange, ranks, {"rounds": options.rounds, "nbytes": int(size * 2**20)})
            for kind, times in results.items():
                cells = ["-" if both is None else f"{both[i]:.2f}" for i in (0, 1) for both in times.values()]
                rows.append([ranks, f"{size:g}", kind, *cells])
    header = [f"{clock}: {name}, ms" for clock in ("wall", "CPU") for name in MEASURED]
    print(table(["ranks", "MiB", "", *header], rows))
