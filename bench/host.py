"""CPU time that a runtime adds to the model's own step, with nothing on the wire: copies, hooks, launches.

python -m bench host          writes results/host.json
python -m bench host --tiny   only prints the cost of units of tiny parameters and of one gradient
python -m bench clip          clipping 512 parameters of 1024 elements in 8 units, on rank 0 of 4
python -m bench wrap          `fully_shard` of Llama 405B by layers on meta, on rank 0 of 1024

One process stands for rank 0 of 8, 64 and 1024 (torch's fake process group); the model without sharding, ours, FSDP2
and DeepSpeed ZeRO-3 take turns. Time is the main thread's CPU time, which a busy machine disturbs less than it does a
clock; few tokens, so that what is added shows. Then ours and FSDP2 with 64 units so small that everything is added,
and with units of 2 and 32 tiny parameters: their difference is the way of single gradients into the buffer and to
`.grad`.
"""

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
from torch import nn

from . import calls, measure
from .compare import PARTS, build_all, parts_of
from .measure import (
    add_keep_noisy,
    fake_ranks,
    interleave,
    launch,
    options_of,
    print_tables,
    record,
    spread,
    table,
    table_of,
)
from .models import WORKLOADS, batch_of, sum_units
from .systems import SYSTEMS, Job, Trainer, fully_shard_of, left_out

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
        trainers = {**plain, **others}
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        for turn in range(request["rounds"] + 2):
            batch = batch_of(job.workload, turn, 0)
            for name, trainer in trainers.items():
                result = _step(trainer, batch)
                if turn >= 2:
                    samples[name].append(result)
    return samples, skipped


def _step(trainer: Trainer, batch: Any) -> dict[str, float]:
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    seconds = dict(zip(PARTS, parts_of(trainer, batch, time.thread_time), strict=True))
    return {**seconds, "faults": resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults}


def _sharded(system: str, model: Any, mesh: Any) -> Any:
    """The model with each child and the root as a unit; unchanged for "plain"."""
    if system != "plain":
        for module in (*model, model):
            fully_shard_of(system)(module, mesh=mesh)
    return model


def measure_units(rounds: int) -> dict[str, list[float]]:
    """Thread CPU seconds of forward and backward of 64 linear units of 8 x 8 on four fake ranks, round by round."""
    x = torch.ones(2, WIDTH)
    with fake_ranks(4) as mesh:
        models = {
            name: _sharded(name, nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))), mesh)
            for name in COMPARED
        }

        def step(model: Any) -> None:
            model(x).sum().backward()

        steps = {name: partial(step, model) for name, model in models.items()}
        return interleave(steps, rounds, before={name: model.zero_grad for name, model in models.items()})


def measure_params(rounds: int) -> dict[str, dict[str, float]]:
    """Thread CPU ms that units of few and many tiny parameters add, each: `{system: {"forward 2": ...}}`.

    The least of all rounds: work that is the same in each of them takes longer only where others disturb it.
    """
    x = torch.ones(2, WIDTH)
    losses: dict[Any, Any] = {}
    steps: dict[Any, Callable[[], Any]] = {}

    def forward(which: Any, model: Any) -> None:
        losses[which] = model(x).sum()

    def backward(which: Any) -> None:
        losses[which].backward()

    with fake_ranks(4) as mesh:
        for which in ((name, size) for name in ("plain", *COMPARED) for size in (FEW, MANY)):
            model = _sharded(which[0], sum_units(STACK, which[1], WIDTH), mesh)
            steps[*which, "forward"] = partial(forward, which, model)
            steps[*which, "backward"] = partial(backward, which)
            steps[*which, "end"] = model.zero_grad
        least = {key: min(times) for key, times in interleave(steps, rounds).items()}
    each = 1e3 / STACK
    return {
        name: {
            f"{part} {size}": each * (least[name, size, part] - least["plain", size, part])
            for part in PARTS[:2]
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
            varied = spread([s["forward"] + s["backward"] for s in times])
            cells = (f"{value:.1f}" for value in (*cells, 1e3 * added))
            rows.append([ranks, SYSTEMS[name].label, *cells, faults, f"{varied:.0%}"])
    header = "simulated ranks; system; forward ms; backward ms; optimizer ms; added ms; page faults; spread"
    text = (
        f"Workload {figures['workload']}; thread CPU milliseconds of one step. *Added* is forward and backward beyond"
        " the same model's without sharding, in the same round. Page faults are memory that torch's CPU allocator took"
        " from the kernel again; on a GPU there are none."
    )
    text += left_out(figures.get("skipped", {}))
    out = [table_of("Host time with nothing on the wire", text, header, rows)]
    if units := figures.get("units"):
        rows = [
            [SYSTEMS[name].label, f"{1e3 * statistics.median(times):.2f}", f"{spread(times):.0%}"]
            for name, times in units.items()
        ]
        text = f"Forward and backward of {UNITS} linear units of {WIDTH} x {WIDTH}, thread CPU milliseconds: ours is "
        text += f"{units_ratio(units):.2f} of FSDP2's (goal: at most {UNITS_GOAL})."
        out.append(table_of("Host time of tiny units", text, "system; step ms; spread", rows))
    if params := figures.get("params"):
        out.append(_params_table(params))
    return out


def _params_table(params: dict[str, dict[str, float]]) -> dict[str, Any]:
    columns = "; ".join(f"{part} of {size}, ms" for part in PARTS[:2] for size in (FEW, MANY))
    rows = []
    for name, added in params.items():
        one = 1e3 * (added[f"backward {MANY}"] - added[f"backward {FEW}"]) / (MANY - FEW)
        rows.append([SYSTEMS[name].label, *(f"{value:.3f}" for value in added.values()), f"{one:.1f}"])
    text = (
        f"Time that units of {FEW} and of {MANY} parameters of {WIDTH} elements add to the plain model, thread CPU time"
        " of one unit, the least of all rounds. One gradient: the time that one more parameter adds to backward."
    )
    return table_of("Host time of tiny parameters", text, f"system; {columns}; one gradient, us", rows)


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    add_keep_noisy(parser)
    parser.add_argument("--tiny", action="store_true", help="only print the last table, tiny parameters")
    options = options_of(parser, arguments, workload="counts", rounds=9)
    if options.tiny:
        print_tables([_params_table(measure_params(5 * options.rounds))])
        return 0
    before, calibration = measure.busy_share(), [measure.calibrate() for _ in range(8)]
    samples: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for ranks in SIMULATED:  # each in a new process: DeepSpeed remembers the groups of the first world
        request = {"workload": options.workload, "rounds": options.rounds, "simulated": ranks}
        samples[str(ranks)], missing = launch(measure_models, 1, request)
        skipped |= missing
    tiny = {"units": measure_units(5 * options.rounds), "params": measure_params(5 * options.rounds)}
    calibration += [measure.calibrate() for _ in range(8)]
    figures: dict[str, Any] = {"workload": options.workload, "samples": samples, "skipped": skipped, **tiny}
    figures["tables"] = print_tables(tables(figures))
    return record("host", figures, measure.verdict(before, calibration, []), options.keep_noisy)


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


def main_clip(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure and print."""
    parser.add_argument("--elements", type=int, default=1024, help="of each parameter")
    options = options_of(parser, arguments, rounds=60)
    times = measure_clip(options.elements, options.rounds)
    plain = times["plain tensors"]
    rows = [[n, f"{took:.0f}", f"{took / plain:.2f}", CLIP_GOALS.get(n, "")] for n, took in times.items()]
    print(table(["512 parameters", "us", "of plain tensors'", "goal, at most"], rows))
    return 0


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
    folders = [Path(str(importlib.import_module(name).__file__)).parent for name in calls.PACKAGES]
    gc.collect()  # layouts of earlier models, which equal ones would share
    with fake_ranks(WRAP_RANKS) as mesh:
        model, spy = llama(layers), calls.Calls(folders if count else [])

        def apply() -> None:
            for module in (*model[-1], model):
                fully_shard_of(system)(module, mesh=mesh)

        began = time.thread_time()
        if count:
            with spy:
                apply()
        else:
            apply()
        return time.thread_time() - began, sum(spy.functions.values())


def main_wrap(parser: ArgumentParser, arguments: list[str]) -> int:
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
    return 0
