"""Benchmarks whose history asv keeps: what is compared from commit to commit. Run by asv alone.

asv takes any rise for a regression, so it tracks seconds, bytes and shares, never tokens/s. Times of a busy machine are
NaN, which asv does not show. A commit whose packages cannot run a benchmark has no figure. The modules imported here
import most of the packages inside functions, so that a name which an old commit lacks costs one benchmark.
"""

import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

from . import calls, compare, counts, host, optimizers


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


@recorded_as(
    "runtime",
    collectives=("calls", lambda results, ranks: sum(results[ranks]["ours"]["collectives"].values())),
    calls=("calls", lambda results, ranks: sum(results[ranks]["ours"]["calls"].values())),
    wire_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["wire_bytes"]),
    copied_forward_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["copied"]["forward"]),
    copied_backward_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["copied"]["backward"]),
    peak_bytes=("bytes", lambda results, ranks: results[ranks]["ours"]["peak"]),
    peak_of_fsdp2=(
        "ratio",
        lambda results, ranks: results[ranks]["ours"]["peak"] / results[ranks]["fsdp2"]["peak"],
    ),
)
class Counts:
    """One step of a 31.6M-parameter Llama on simulated ranks, beyond the same model's own step. Exact."""

    params = ([8, 64, 1024],)
    param_names = ("ranks",)
    timeout = 600

    def setup_cache(self) -> dict[int, dict[str, Any]]:
        base = counts.plain("counts")
        return {ranks: counts.compare("counts", ranks, ("ours", "fsdp2"), base) for ranks in self.params[0]}


@recorded_as(
    "runtime",
    own_calls=("calls", lambda results, part: results["ours"][part]["calls"]),
    own_calls_of_fsdp2=(
        "ratio", lambda results, part: results["ours"][part]["calls"] / results["fsdp2"][part]["calls"]
    ),
)  # fmt: skip
class PythonCalls:
    """Python calls of our own code for a small model, and as a share of FSDP2's. Exact for one Python release."""

    params = (list(calls.PARTS),)
    param_names = ("part",)
    timeout = 300

    def setup_cache(self) -> dict[str, Any]:
        return calls.measure()


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

    params = (["dense", "moe"], ["ddp", "fsdp2", "ours"])
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


@recorded_as(
    "runtime",
    step_ms=("ms", lambda samples: 1e3 * statistics.median(samples["ours"])),
    share_of_fsdp2=("ratio", host.units_ratio),
)
class TinyUnits:
    """Thread CPU time of a step with 64 tiny units on the fake process group. To stay below 0.6 of FSDP2's."""

    timeout = 300

    def setup_cache(self) -> dict[str, list[float]]:
        return host.measure_units(45)


# -- layout-planner, ragged-shard and dbuffer --------------------------------------------------------------------------


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


@recorded_as("planner")
class Fingerprint:
    """The cost for every rank, once, of checking that all agree."""

    def setup(self) -> None:
        self.layouts = [layout for _, layout in host.plan_model("deepseek-v3", "rows:16")]

    def time_fingerprint(self) -> None:
        for layout in self.layouts:
            layout.fingerprint()


def _of_dtensor(case: str) -> float:
    medians = host.compare_placements(case, ("ragged", "dtensor"), rounds=20)
    return medians["ragged"] / medians["dtensor"]


@recorded_as("placement", ratio=("ratio", _of_dtensor))
class HostRatio:
    """Cost over torch's DTensor, both alternating in one process: below 1 is cheaper than DTensor."""

    params = (tuple(host.CASES),)
    param_names = ("case",)
    timeout = 120


@recorded_as("placement", from_local=("us", lambda system: host.construction()[system]))
class Construction:
    """Microseconds of one from_local with a layout that is cached."""

    params = (("ragged", "dtensor"),)
    param_names = ("system",)


def _ms(times: Any, name: str, *phases: str) -> float:
    return sum(ms for (system, phase), ms in times.items() if system == name and phase in phases)


def _of_fsdp2(results: Any, world_size: int, dtype: str) -> float:
    times = results[world_size, dtype]
    return _ms(times, "dbuffer", *host.PHASES) / _ms(times, "FSDP2", *host.PHASES)


@recorded_as(
    "buffer",
    host_ms=("ms", lambda results, ranks, dtype: _ms(results[ranks, dtype], "dbuffer", "gather", "reduce")),
    share_of_fsdp2=("ratio", _of_fsdp2),
)
class Group:
    """Host time of a group without its collectives, also as a share of FSDP2's. To stay under 0.3 ms."""

    params = (host.WORLD_SIZES, host.DTYPES)
    param_names = ("world_size", "dtype")
    timeout = 600

    def setup_cache(self) -> dict[Any, Any]:
        return {(w, d): host.measure_buffer(w, d, 7) for w in self.params[0] for d in self.params[1]}


# -- block-optim -------------------------------------------------------------------------------------------------------


def _of_torch(results: Any) -> float:
    return results["ours, AdamW fused, ragged"] / results["torch, AdamW fused, DTensor"]


@recorded_as(
    "optimizer",
    adamw_fused_ms=("ms", lambda results: results["ours, AdamW fused, ragged"]),
    adamw_ms=("ms", lambda results: results["ours, AdamW, ragged"]),
    adamw8bit_elements_ms=("ms", lambda results: results["ours, AdamW8bit elements:256, ragged"]),
    adamw8bit_tile_ms=("ms", lambda results: results["ours, AdamW8bit tile:32x32, ragged"]),
    share_of_torch_fused_on_dtensors=("ratio", _of_torch),
)
class Step:
    """Optimizer steps. AdamW fused on flat ragged parameters is to stay below half of torch's on DTensors."""

    timeout = 900

    def setup_cache(self) -> dict[str, float]:
        return optimizers.measure_steps(9)


@recorded_as(
    "muon",
    gib_received=("GiB", lambda model, ranks: optimizers.plan_counts(model, ranks)["owners_gib"]),
    imbalance=("max/mean", lambda model, ranks: optimizers.plan_counts(model, ranks)["imbalance"]),
)
class MuonPlans:
    """Figures of plans for large models."""

    params = (tuple(optimizers.LLAMAS), (64, 128, 512))
    param_names = ("model", "ranks")


@recorded_as(
    "muon",
    time_ratio=("ratio", lambda results, system: results[system][0] / results[optimizers.FULL][0]),
    cpu_ratio=("ratio", lambda results, system: results[system][1] / results[optimizers.FULL][1]),
    bytes_sent=("bytes", lambda results, system: results[system][2]),
)
class MuonSteps:
    """A step of each system on two ranks, over the all-gather Muon's in the same run; bytes sent."""

    params = (optimizers.MUONS,)
    param_names = ("system",)
    timeout = 600

    def setup_cache(self) -> dict[str, list[float]]:
        return optimizers.muon_on_ranks(2)


@recorded_as(
    "shampoo",
    median=("ms", lambda results, system: results[system][0]),
    largest=("ms", lambda results, system: results[system][1]),
)
class StepProfile:
    """Thread CPU milliseconds of a step, over 50 steps."""

    params = (tuple(optimizers.SHAMPOOS),)
    param_names = ("system",)
    timeout = 3600

    def setup_cache(self) -> dict[str, tuple[float, float]]:
        return {system: optimizers.profile(system) for system in optimizers.SHAMPOOS}


@recorded_as("shampoo", state=("bytes/parameter", optimizers.state_bytes))
class Memory:
    """Bytes of optimizer state per parameter."""

    params = (tuple(optimizers.SHAMPOOS),)
    param_names = ("system",)
