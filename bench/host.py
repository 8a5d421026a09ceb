"""CPU time that a runtime adds to the model's own step, with nothing on the wire: copies, hooks, launches.

python -m bench host          writes results/host.json
python -m bench host --tiny   only prints what units of tiny parameters and one gradient cost

One process stands for rank 0 of 8, 64 and 1024 (torch's fake process group); the model without sharding, ours, FSDP2
and DeepSpeed ZeRO-3 take turns. Time is the main thread's CPU time, so that a busy machine disturbs it less than it
does a clock; few tokens, so that what is added shows. Then for ours and FSDP2 the same for 64 units so small that all
of it is added, and for units of 2 and 32 tiny parameters: what differs between the two is the way of single gradients
into the buffer and to `.grad`.
"""

import resource
import statistics
import time
from typing import Any

from . import machine, store
from .clock import build_all
from .ranks import fake_ranks, launch
from .systems import SYSTEMS, Job, Trainer, build_plain
from .workloads import WORKLOADS, batch_of

SIMULATED = (8, 64, 1024)
COMPARED = ("ours", "fsdp2")
WHOLE = [*COMPARED, "deepspeed"]  # of which whole models are measured
PARTS = ("forward", "backward", "update")
UNITS, WIDTH = 64, 8
UNITS_GOAL = 0.6  # of FSDP2's, at most
FEW, MANY, STACK = 2, 32, 8  # parameters of a unit; units


def measure(request: dict[str, Any]) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """In a new process: thread CPU seconds of each part, round by round; who is not there, and why."""
    import torch.distributed as dist

    dist.destroy_process_group()
    rounds = request["rounds"]
    with fake_ranks(request["simulated"]) as mesh:
        job = Job(WORKLOADS[request["workload"]], mesh)
        plain = build_plain(job)
        trainers, skipped = build_all(WHOLE, job)
        trainers = {"plain": plain, **trainers}
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        for turn in range(rounds + 2):
            batch = batch_of(job.workload, turn, 0)
            for name, trainer in trainers.items():
                result = _step(trainer, batch)
                if turn >= 2:
                    samples[name].append(result)
    return samples, skipped


def _step(trainer: Trainer, batch: Any) -> dict[str, float]:
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    marks = [time.thread_time()]
    loss = trainer.forward(batch)
    marks.append(time.thread_time())
    trainer.backward(loss)
    marks.append(time.thread_time())
    trainer.update()
    marks.append(time.thread_time())
    seconds = {part: end - begin for part, begin, end in zip(PARTS, marks, marks[1:], strict=False)}
    return {**seconds, "faults": resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults}


def measure_units(rounds: int) -> dict[str, list[float]]:
    """Thread CPU seconds of forward and backward of 64 linear units of 8 x 8 on four fake ranks, round by round."""
    import torch

    x = torch.ones(2, WIDTH)
    with fake_ranks(4) as mesh:
        models = {name: _tiny_units(name, mesh) for name in COMPARED}
        samples: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(rounds + 3):
            for name, model in models.items():
                began = time.thread_time()
                model(x).sum().backward()
                if turn >= 3:
                    samples[name].append(time.thread_time() - began)
                model.zero_grad()
    return samples


def _tiny_units(system: str, mesh: Any) -> Any:
    from torch import nn

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    for module in (*model, model):
        _fully_shard_of(system)(module, mesh=mesh)
    return model


def _fully_shard_of(system: str) -> Any:
    import torch.distributed.fsdp as fsdp2

    import fsdp_runtime

    return {"ours": fsdp_runtime, "fsdp2": fsdp2}[system].fully_shard


def measure_params(rounds: int) -> dict[str, dict[str, float]]:
    """Thread CPU ms that units of few and many tiny parameters add, each: `{system: {"forward 2": ...}}`.

    The least of all rounds: work that is the same in each of them takes longer only where others disturb it.
    """
    import torch

    x = torch.ones(2, WIDTH)
    with fake_ranks(4) as mesh:
        models = {
            (name, size): _stack(name, size, mesh) for name in ("plain", *COMPARED) for size in (FEW, MANY)
        }
        least: dict[tuple[str, int, str], float] = {}
        for _ in range(rounds + 3):
            for which, model in models.items():
                marks = [time.thread_time()]
                loss = model(x).sum()
                marks.append(time.thread_time())
                loss.backward()
                marks.append(time.thread_time())
                model.zero_grad()
                for part, begin, end in zip(PARTS[:2], marks, marks[1:], strict=False):
                    key = (*which, part)
                    least[key] = min(least.get(key, end - begin), end - begin)
    each = 1e3 / STACK
    return {
        name: {
            f"{part} {size}": each * (least[name, size, part] - least["plain", size, part])
            for part in PARTS[:2]
            for size in (FEW, MANY)
        }
        for name in COMPARED
    }


def per_gradient(added: dict[str, float]) -> float:
    """Microseconds that one more parameter adds to a backward."""
    return 1e3 * (added[f"backward {MANY}"] - added[f"backward {FEW}"]) / (MANY - FEW)


def _stack(system: str, size: int, mesh: Any) -> Any:
    """Units of so many parameters, each added to what passes."""
    import torch
    from torch import nn

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.terms = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(size)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for term in self.terms:
                x = x + term
            return x

    model = nn.Sequential(*(Sum() for _ in range(STACK)))
    if system != "plain":
        for module in (*model, model):
            _fully_shard_of(system)(module, mesh=mesh)
    return model


def units_ratio(samples: dict[str, list[float]]) -> float:
    """Ours as a share of FSDP2's: the median over rounds."""
    return statistics.median(a / b for a, b in zip(samples["ours"], samples["fsdp2"], strict=True))


def tables(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's tables: medians, and what is added to the plain model within a round; tiny units."""
    rows = []
    for ranks, samples in figures["samples"].items():
        for name, times in samples.items():
            medians = {part: statistics.median(s[part] for s in times) for part in PARTS}
            pairs = zip(times, samples["plain"], strict=True)
            added = statistics.median(
                a["forward"] + a["backward"] - b["forward"] - b["backward"] for a, b in pairs
            )
            spread = machine.spread([s["forward"] + s["backward"] for s in times])
            cells = (f"{1e3 * medians[part]:.1f}" for part in PARTS)
            faults = f"{statistics.median(s['faults'] for s in times):,.0f}"
            rows.append([ranks, SYSTEMS[name].label, *cells, f"{1e3 * added:.1f}", faults, f"{spread:.0%}"])
    header = [
        "simulated ranks",
        "system",
        "forward ms",
        "backward ms",
        "optimizer ms",
        "added ms",
        "page faults",
    ]
    text = (
        f"Workload {figures['workload']}; thread CPU milliseconds of one step. *Added* is forward and backward beyond"
        " the same model's without sharding, in the same round. Page faults are memory"
        " that torch's CPU allocator took from the kernel again; on a GPU there are none."
    )
    header.append("spread")
    for name, reason in figures.get("skipped", {}).items():
        text += f" {SYSTEMS[name].label} is not in the table: {reason}."
    out = [{"title": "Host time with nothing on the wire", "text": text, "header": header, "rows": rows}]
    if units := figures.get("units"):
        rows = [
            [SYSTEMS[name].label, f"{1e3 * statistics.median(times):.2f}", f"{machine.spread(times):.0%}"]
            for name, times in units.items()
        ]
        text = (
            f"Forward and backward of {UNITS} linear units of {WIDTH} x {WIDTH}, thread CPU milliseconds: ours is "
            f"{units_ratio(units):.2f} of FSDP2's (goal: at most {UNITS_GOAL})."
        )
        header = ["system", "step ms", "spread"]
        out.append({"title": "Host time of tiny units", "text": text, "header": header, "rows": rows})
    if params := figures.get("params"):
        out.append(_params_table(params))
    return out


def _params_table(params: dict[str, dict[str, float]]) -> dict[str, Any]:
    header = ["system"]
    header += [f"{part} of {size}, ms" for part in PARTS[:2] for size in (FEW, MANY)]
    header.append("one gradient, us")
    rows = [
        [SYSTEMS[name].label, *(f"{value:.3f}" for value in added.values()), f"{per_gradient(added):.1f}"]
        for name, added in params.items()
    ]
    text = (
        f"What units of {FEW} and of {MANY} parameters of {WIDTH} elements add to the plain model, thread CPU time of "
        "one unit, the least of all rounds. One gradient: what one more parameter adds to backward."
    )
    return {"title": "Host time of tiny parameters", "text": text, "header": header, "rows": rows}


def main(arguments: list[str]) -> int:
    """Measure, print, record."""
    parser = store.parser_of("host", __doc__, timed=True)
    parser.add_argument("--workload", default="counts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--tiny", action="store_true", help="only print the last table, units of tiny parameters"
    )
    options = parser.parse_args(arguments)
    if options.tiny:
        store.print_tables([_params_table(measure_params(5 * options.rounds))])
        return 0
    before = machine.busy_share()
    calibration = [machine.calibrate() for _ in range(8)]
    request = {"workload": options.workload, "rounds": options.rounds}
    samples: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for ranks in SIMULATED:  # each in a process of its own: DeepSpeed remembers the groups of the first world
        samples[str(ranks)], missing = launch(measure, 1, {**request, "simulated": ranks})
        skipped |= missing
    units = measure_units(5 * options.rounds)
    params = measure_params(5 * options.rounds)
    calibration += [machine.calibrate() for _ in range(8)]
    figures: dict[str, Any] = {
        "workload": options.workload,
        "samples": samples,
        "skipped": skipped,
        "units": units,
        "params": params,
    }
    figures["tables"] = tables(figures)
    store.print_tables(figures["tables"])
    return store.record("host", figures, machine.verdict(before, calibration, []), options.keep_noisy)
