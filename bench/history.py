"""Benchmarks whose history asv keeps: what is compared from commit to commit. Run by asv alone.

asv takes any rise for a regression, so it tracks seconds, bytes and shares, never tokens/s. Times of a busy machine are
NaN, which asv does not show. A commit whose packages cannot run a benchmark has no figure. The modules imported here
import most of the packages inside functions, so that a name which an old commit lacks costs one benchmark.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from . import compare, counts, host, measure
from .measure import launch
from .models import WORKLOADS
from .systems import OPTIMIZERS, Job, make_optimizer


def recorded_as(module: str, **figures: tuple[str, Callable[..., float]]) -> Callable[[type], type]:
    """A class decorator that makes asv's benchmarks; their names begin with `module`, in any file.

    Recorded figures go by name, so a class can move to another file without losing its past. A figure is its unit, and
    a function of what `setup_cache` returned, where the class has one, and of a value for each of `params`.
    """

    def make(cls: type) -> type:
        for name, (unit, figure) in figures.items():
            setattr(cls, f"track_{name}", _method(figure, unit))
        for name, function in list(vars(cls).items()):
            if name.startswith(("track_", "time_")):
                function.benchmark_name = f"{module}.{cls.__name__}.{name}"
        return cls

    return make


def _method(figure: Callable[..., float], unit: str) -> Any:
    def track(self: Any, *args: Any) -> float:
        return figure(*args)

    track.unit, track.version = unit, "1"  # type: ignore[attr-defined]
    return track


# -- fsdp-runtime ------------------------------------------------------------------------------------------------------


def _ratio(systems: dict[str, Any], peer: str, figure: str) -> float:
    """Our figure over a peer's; NaN where the peer could not run."""
    return systems["ours"][figure] / systems.get(peer, {}).get(figure, math.nan)


@recorded_as(
    "runtime",
    collectives=("calls", lambda results, ranks: sum(results[ranks]["ours"]["collectives"].values())),
    calls=("calls", lambda results, ranks: sum(results[ranks]["ours"]["calls"].values())),
    wire_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["wire_bytes"]),
    copied_forward_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["copied"]["forward"]),
    copied_backward_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["copied"]["backward"]),
    peak_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["peak"]),
    peak_of_fsdp2=("ratio", lambda results, ranks: _ratio(results[ranks], "fsdp2", "peak")),
    wire_of_deepspeed=("ratio", lambda results, ranks: _ratio(results[ranks], "deepspeed", "wire_bytes")),
)
class Counts:
    """One step of a 31.6M-parameter Llama on simulated ranks, beyond the same model's own step. Exact.

    Each world is in a new process: DeepSpeed, which is left out where it is not installed, remembers the first one's.
    """

    params = ([8, 64, 1024],)
    param_names = ("ranks",)
    timeout = 600

    def setup_cache(self) -> dict[int, dict[str, Any]]:
        base = counts.plain("counts")
        results = {}
        for ranks in self.params[0]:
            systems = ("ours", "fsdp2", *(["deepspeed"] if ranks < 1024 else []))  # which takes minutes there
            world = {"workload": "counts", "systems": systems, "base": base, "simulated": ranks}
            results[ranks] = launch(counts.compare_on_ranks, 1, world)
        return results


def _time(key: str, of: Callable[[float], float] = float) -> tuple[str, Callable[..., float]]:
    def figure(results: Any, workload: str, system: str) -> float:
        figures = results[workload]
        if figures["noise"] or system not in figures["times"]:
            return math.nan
        return of(figures["times"][system][key])

    return "seconds" if of is float else "% of the median" if key == "spread" else "ratio", figure


def _peak(figures: dict[str, Any], system: str) -> float:
    return float(figures["memory"].get(system, {}).get("start", math.nan))


@recorded_as(
    "runtime",
    step_seconds=_time("wall"),
    cpu_seconds=_time("cpu"),
    forward_seconds=_time("forward"),
    backward_seconds=_time("backward"),
    optimizer_seconds=_time("update"),
    step_of_fsdp2=_time("wall_ratio_fsdp2", lambda ratio: 1 / ratio),
    step_of_ddp=_time("wall_ratio_ddp", lambda ratio: 1 / ratio),
    cpu_of_fsdp2=_time("cpu_ratio_fsdp2", lambda ratio: 1 / ratio),
    spread_percent=_time("spread", lambda share: 100 * share),
    peak_rss_bytes=("bytes", lambda results, work, system: _peak(results[work], system)),
    peak_rss_of_fsdp2=(
        "ratio",
        lambda results, work, system: _peak(results[work], system) / _peak(results[work], "fsdp2"),
    ),
    noise_percent=(
        "% that a fixed loop varied",
        lambda results, work, system: 100 * measure.spread(results[work]["calibration"]),
    ),
)
class Speed:
    """Two gloo ranks of one thread each, systems alternating in one process group: seconds a step, and ratios within
    a round; peak memory of new processes."""

    params = (["dense"], ["ddp", "fsdp2", "deepspeed", "ours"])
    param_names = ("workload", "system")
    timeout = 900

    def setup_cache(self) -> dict[str, Any]:
        figures = {}
        for workload in self.params[0]:
            results, noise = compare.speed(workload, 2, systems=self.params[1], rounds=5, steps=1)
            for reason in noise:
                print(f"{workload}: times are not kept, the machine is too busy: {reason}", file=sys.stderr)
            figures[workload] = {**results, "noise": noise}
        return figures


def _median(results: dict[str, list[dict[str, float]]], step: str, system: str) -> float:
    return statistics.median(times[step] for times in results[system])


@recorded_as(
    "runtime",
    seconds=("seconds", _median),
    of_fsdp2=(
        "ratio",
        lambda results, step, system: _median(results, step, system) / _median(results, step, "fsdp2"),
    ),
)
class BeforeSteps:
    """Two gloo ranks, systems alternating: `fully_shard`, and DCP out and in, of 29.9M parameters."""

    params = (host.SET_UP, ["fsdp2", "ours"])
    param_names = ("step", "system")
    timeout = 300

    def setup_cache(self) -> dict[str, list[dict[str, float]]]:
        with tempfile.TemporaryDirectory() as folder:
            request = {"workload": "dense", "systems": self.params[1], "rounds": 7, "folder": folder}
            return launch(host.set_up, 2, request)


# -- block-optim -------------------------------------------------------------------------------------------------------


class Optimizer:
    """A step on plain parameters of a small model with experts, in this process; torch's fused AdamW beside."""

    params = (list(OPTIMIZERS),)
    param_names = ("optimizer",)
    timeout, repeat = 300, (3, 5, 5.0)

    def setup(self, name: str) -> None:
        torch.set_num_threads(1)
        model = WORKLOADS["ablation"].model("cpu")
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        self.step = make_optimizer(model, Job(WORKLOADS["ablation"], None, optimizer=name)).step
        self.step()

    def time_step(self, name: str) -> None:
        self.step()


# -- layout-planner ----------------------------------------------------------------------------------------------------


def _gap_percent(model: str, block: str) -> float:
    layouts = host.plan_model(model, block)
    padded = sum(count * layout.padded_numel for count, layout in layouts)
    return 100 * (padded / sum(count * layout.lower_bound for count, layout in layouts) - 1)


@recorded_as(
    "planner",
    padding_percent=("%", lambda model, block: host.padding_percent(host.plan_model(model, block))),
    gap_percent=("% above the proven bound", _gap_percent),
)
class Plan:
    """All layers of a model at 1024 ranks. To stay under 0.3 s for each block size."""

    params = (host.MODELS, host.BLOCKS)
    param_names = ("model", "block")

    def time_plan(self, name: str, block: str) -> None:
        host.plan_model(name, block)
