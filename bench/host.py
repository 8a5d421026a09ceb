"""Time that the host takes: a runtime's in a step; each package's without the runtime.

python -m bench host          writes results/host.json
python -m bench planner       layout-planner: time to plan all layers of real models on 1024 ranks, and their padding
python -m bench placement     ragged-shard: an optimizer step and clipping on ragged tensors and on torch's DTensor

`set_up` is for the history: wrapping, and a checkpoint.

One process stands for one rank of torch's fake process group, and all systems take turns. Time is the main thread's
CPU time, which a busy machine disturbs less than it does a clock. Few tokens are taken, so that the added time shows.
"""

import resource
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from . import measure
from .compare import PARTS, build_all, parts_of
from .measure import fake_ranks, interleave, launch, medians_ms, options_of, record, table, table_of
from .models import WORKLOADS, batch_of
from .systems import SYSTEMS, Job, left_out, shard

SIMULATED = (8, 64, 1024)
COMPARED = ["ours", "fsdp2", "deepspeed"]


def measure_models(request: dict[str, Any]) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """In a new process: thread CPU seconds of each part, round by round; missing systems and why."""
    with fake_ranks(request["simulated"]) as mesh:
        job = Job(WORKLOADS[request["workload"]], mesh)
        plain = {"plain": SYSTEMS["plain"].build("plain", job)}
        others, skipped = build_all(COMPARED, job)
        batch = batch_of(job.workload, 0, 0)
        trainers = {**plain, **others}.items()
        steps = {name: partial(parts_of, trainer, batch, time.thread_time) for name, trainer in trainers}

        def parts_and_faults(step: Callable[[], list[float]]) -> dict[str, float]:
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            seconds = dict(zip(PARTS, step(), strict=True))
            return {**seconds, "faults": resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults}

        return interleave(steps, request["rounds"], warm_up=2, timer=parts_and_faults), skipped


def tables(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's table: medians, and the time added to the plain model within a round."""
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
    return [table_of("Host time with nothing on the wire", text, header, rows)]


def main_host(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    o = options_of(parser, arguments, workload="counts", rounds=9, keep_noisy=False)
    noise = measure.noise_now()
    figures: dict[str, Any] = {"workload": o.workload, "samples": {}, "skipped": {}}
    for ranks in SIMULATED:  # each in a new process: DeepSpeed remembers the groups of the first world
        request = {"workload": o.workload, "rounds": o.rounds, "simulated": ranks}
        figures["samples"][str(ranks)], missing = launch(measure_models, 1, request)
        figures["skipped"] |= missing
    return record("host", tables(figures), noise + measure.noise_now(), keep_noisy=o.keep_noisy, **figures)


# -- before the first step ---------------------------------------------------------------------------------------------

SET_UP = ("wrap", "save", "load")


def set_up(request: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """On a rank: by system, seconds of `fully_shard`, `dcp.save` and `dcp.load` of the model, round by round."""
    import torch.distributed.checkpoint as dcp

    job = Job.of(request)

    def seconds(system: str) -> dict[str, float]:
        model, folder = job.workload.model(job.device), f"{request['folder']}/{system}"
        steps = {
            "wrap": lambda: shard(system, model, model.blocks.children(), mesh=job.mesh),
            "save": lambda: dcp.save(model.state_dict(), checkpoint_id=folder),
            "load": lambda: dcp.load(model.state_dict(), checkpoint_id=folder),
        }
        dist.barrier()
        return {name: measure.seconds_of(steps[name], time.perf_counter) for name in SET_UP}

    calls = {name: partial(seconds, name) for name in request["systems"]}
    return interleave(calls, request["rounds"], warm_up=1, timer=lambda call: call())


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
