"""Benchmarks whose history asv keeps: what is compared from commit to commit. Run by asv alone.

asv takes any rise for a regression, so it tracks seconds, bytes and shares, never tokens/s. Times of a busy machine are
NaN, which asv does not show. A commit whose packages cannot run a benchmark has no figure. The modules imported here
import most of the packages inside functions, so that a name which an old commit lacks costs one benchmark.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

from . import compare, counts, host
from .measure import launch


def recorded_as(module: str, **figures: tuple[str, Callable[..., float]]) -> Callable[[type], type]:
    """A class decorator that makes asv's benchmarks; their names begin with `module`, in any file.

    Recorded figures go by name, so a class can move to another file without losing its past.

    Args:
        module: first part of the name.
        figures: by the second part of the name, the unit, and a function of what `setup_cache` returned, where the
            class has one, and of a value for each of `params`.
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
    return systems["ours"][figure] / systems[peer].get(figure, math.nan)


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
        request = {"workload": "counts", "systems": ("ours", "fsdp2", "deepspeed"), "base": base}
        worlds = {ranks: {**request, "simulated": ranks} for ranks in self.params[0]}
        return {ranks: launch(counts.compare_on_ranks, 1, world) for ranks, world in worlds.items()}


def _time(key: str, of: Callable[[float], float] = float) -> tuple[str, Callable[..., float]]:
    def figure(results: Any, workload: str, system: str) -> float:
        figures = results[workload]
        if figures["noise"] or system not in figures["times"]:
            return math.nan
        return of(figures["times"][system][key])

    return "seconds" if of is float else "ratio", figure


@recorded_as(
    "runtime",
    step_seconds=_time("wall"),
    cpu_seconds=_time("cpu"),
    forward_seconds=_time("forward"),
    backward_seconds=_time("backward"),
    optimizer_seconds=_time("update"),
    step_of_ddp=_time("wall_ratio_ddp", lambda ratio: 1 / ratio),
    peak_rss_bytes=(
        "bytes",
        lambda results, work, system: results[work]["memory"].get(system, {}).get("start", math.nan),
    ),
)
class Speed:
    """Two gloo ranks of one thread each, systems alternating: seconds a step, and peak memory of new processes."""

    params = (["dense", "moe"], ["ddp", "fsdp2", "deepspeed", "ours"])
    param_names = ("workload", "system")
    timeout = 900

    def setup_cache(self) -> dict[str, Any]:
        figures = {}
        for workload in self.params[0]:
            results, noise = compare.speed(workload, 2, systems=self.params[1], rounds=4, steps=1)
            for reason in noise:
                print(f"{workload}: times are not kept, the machine is too busy: {reason}", file=sys.stderr)
            figures[workload] = {**results, "noise": noise}
        return figures


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
