"""Benchmarks whose history asv keeps: what is compared from commit to commit. Run by asv alone.

asv takes any rise for a regression, so it tracks seconds, bytes and shares, never tokens/s. Times of a busy machine are
NaN, which asv does not show. A commit whose packages cannot run a benchmark has no figure.
"""

import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

from . import calls, compare, counts, host, muon, optimizers, packages


def recorded_as(module: str, **units: str) -> Callable[[type], type]:
    """A class decorator: asv's names of the benchmarks begin with `module`, in any file.

    Recorded figures go by name, so a class can move to another file without losing its past.

    Args:
        module: first part of the name.
        units: of benchmarks, by the name of the method.
    """

    def name(cls: type) -> type:
        for attribute, function in list(vars(cls).items()):
            if attribute.startswith(("track_", "time_")):
                function.benchmark_name = f"{module}.{cls.__name__}.{attribute}"
        for attribute, unit in units.items():
            vars(cls)[attribute].unit = unit
        return cls

    return name


# -- fsdp-runtime ------------------------------------------------------------------------------------------------------


@recorded_as(
    "runtime", track_collectives="calls", track_calls="calls", track_wire_bytes="bytes",
    track_copied_forward_bytes="bytes", track_copied_backward_bytes="bytes", track_peak_bytes="bytes",
    track_peak_of_fsdp2="ratio",
)  # fmt: skip
class Counts:
    """One step of a 31.6M-parameter Llama on simulated ranks, beyond the same model's own step. Exact."""

    params = ([8, 64, 1024],)
    param_names = ("ranks",)
    timeout = 600
    version = "1"

    def setup_cache(self) -> dict[int, dict[str, Any]]:
        base = counts.plain("counts")
        return {ranks: counts.compare("counts", ranks, ("ours", "fsdp2"), base) for ranks in self.params[0]}

    def track_collectives(self, figures: Any, ranks: int) -> float:
        return sum(figures[ranks]["ours"]["collectives"].values())

    def track_calls(self, figures: Any, ranks: int) -> float:
        return sum(figures[ranks]["ours"]["calls"].values())

    def track_wire_bytes(self, figures: Any, ranks: int) -> float:
        return figures[ranks]["ours"]["wire_bytes"]

    def track_copied_forward_bytes(self, figures: Any, ranks: int) -> float:
        return figures[ranks]["ours"]["copied"]["forward"]

    def track_copied_backward_bytes(self, figures: Any, ranks: int) -> float:
        return figures[ranks]["ours"]["copied"]["backward"]

    def track_peak_bytes(self, figures: Any, ranks: int) -> float:
        return figures[ranks]["ours"]["peak"]

    def track_peak_of_fsdp2(self, figures: Any, ranks: int) -> float:
        return figures[ranks]["ours"]["peak"] / figures[ranks]["fsdp2"]["peak"]


@recorded_as("runtime", track_own_calls="calls", track_own_calls_of_fsdp2="ratio")
class PythonCalls:
    """Python calls of our own code for a small model, and as a share of FSDP2's. Exact for one Python release."""

    params = (list(calls.PARTS),)
    param_names = ("part",)
    timeout = 300
    version = "1"

    def setup_cache(self) -> dict[str, Any]:
        return calls.measure()

    def track_own_calls(self, figures: Any, part: str) -> float:
        return figures["ours"][part]["calls"]

    def track_own_calls_of_fsdp2(self, figures: Any, part: str) -> float:
        return figures["ours"][part]["calls"] / figures["fsdp2"][part]["calls"]


@recorded_as(
    "runtime", track_step_seconds="seconds", track_cpu_seconds="seconds", track_forward_seconds="seconds",
    track_backward_seconds="seconds", track_optimizer_seconds="seconds", track_step_of_ddp="ratio",
    track_peak_rss_bytes="bytes",
)  # fmt: skip
class Speed:
    """Two gloo ranks of one thread each, systems alternating: seconds a step, and peak memory of new processes."""

    params = (["dense", "moe"], ["ddp", "fsdp2", "ours"])
    param_names = ("workload", "system")
    timeout = 900
    version = "1"

    def setup_cache(self) -> dict[str, Any]:
        figures = {}
        for workload in self.params[0]:
            found, noise = compare.speed(workload, 2, systems=self.params[1], num_rounds=4, steps=1)
            for reason in noise:
                print(f"{workload}: times are not kept, the machine is too busy: {reason}", file=sys.stderr)
            figures[workload] = {**found, "noise": noise}
        return figures

    def track_step_seconds(self, figures: Any, workload: str, system: str) -> float:
        return _time(figures[workload], system, "wall")

    def track_cpu_seconds(self, figures: Any, workload: str, system: str) -> float:
        return _time(figures[workload], system, "cpu")

    def track_forward_seconds(self, figures: Any, workload: str, system: str) -> float:
        return _time(figures[workload], system, "forward")

    def track_backward_seconds(self, figures: Any, workload: str, system: str) -> float:
        return _time(figures[workload], system, "backward")

    def track_optimizer_seconds(self, figures: Any, workload: str, system: str) -> float:
        return _time(figures[workload], system, "update")

    def track_step_of_ddp(self, figures: Any, workload: str, system: str) -> float:
        return 1 / _time(figures[workload], system, "wall_ratio_ddp")

    def track_peak_rss_bytes(self, figures: Any, workload: str, system: str) -> float:
        return figures[workload]["memory"].get(system, {}).get("start", math.nan)


def _time(figures: dict[str, Any], system: str, key: str) -> float:
    if figures["noise"] or system not in figures["times"]:
        return math.nan
    return figures["times"][system][key]


@recorded_as("runtime", track_step_ms="ms", track_share_of_fsdp2="ratio")
class TinyUnits:
    """Thread CPU time of a step with 64 tiny units on the fake process group. To stay below 0.6 of FSDP2's."""

    timeout = 300
    version = "1"

    def setup_cache(self) -> dict[str, list[float]]:
        return host.measure_units(45)

    def track_step_ms(self, samples: Any) -> float:
        return 1e3 * statistics.median(samples["ours"])

    def track_share_of_fsdp2(self, samples: Any) -> float:
        return host.units_ratio(samples)


# -- layout-planner, ragged-shard and dbuffer --------------------------------------------------------------------------


@recorded_as("planner", track_padding_percent="%", track_gap_percent="% above the proven bound")
class Plan:
    """All layers of a model at 1024 ranks. To stay under 0.3 s for each block size."""

    params = (packages.MODELS, packages.BLOCKS)
    param_names = ("model", "block")

    def time_plan(self, name: str, block: str) -> None:
        packages.plan_model(name, block)

    def track_padding_percent(self, name: str, block: str) -> float:
        return packages.padding_percent(packages.plan_model(name, block))

    def track_gap_percent(self, name: str, block: str) -> float:
        layouts = packages.plan_model(name, block)
        padded = sum(count * layout.padded_numel for count, layout in layouts)
        return 100 * (padded / sum(count * layout.lower_bound for count, layout in layouts) - 1)


@recorded_as("planner")
class Fingerprint:
    """The cost for every rank, once, of checking that all agree."""

    def setup(self) -> None:
        self.layouts = [layout for _, layout in packages.plan_model("deepseek-v3", "rows:16")]

    def time_fingerprint(self) -> None:
        for layout in self.layouts:
            layout.fingerprint()


@recorded_as("placement", track_ratio="ratio")
class HostRatio:
    """Cost over torch's DTensor, both alternating in one process: below 1 is cheaper than DTensor."""

    params = (packages.CASES,)
    param_names = ("case",)
    timeout = 120

    def track_ratio(self, case: str) -> float:
        medians = packages.compare_placements(case, ("ragged", "dtensor"), rounds=20)
        return medians["ragged"] / medians["dtensor"]


@recorded_as("placement", track_from_local="us")
class Construction:
    """Microseconds of one from_local with a layout that is cached."""

    params = (("ragged", "dtensor"),)
    param_names = ("system",)

    def track_from_local(self, system: str) -> float:
        return packages.construction()[system]


@recorded_as("buffer", track_host_ms="ms", track_share_of_fsdp2="ratio")
class Group:
    """Host time of a group without its collectives, also as a share of FSDP2's. To stay under 0.3 ms."""

    params = (packages.WORLD_SIZES, packages.DTYPES)
    param_names = ("world_size", "dtype")
    timeout = 600

    def setup_cache(self) -> dict[Any, Any]:
        return {(w, d): packages.measure_buffer(w, d, 7) for w in self.params[0] for d in self.params[1]}

    def track_host_ms(self, results: Any, world_size: int, dtype: str) -> float:
        return sum(results[world_size, dtype]["dbuffer", phase] for phase in ("gather", "reduce"))

    def track_share_of_fsdp2(self, results: Any, world_size: int, dtype: str) -> float:
        times = results[world_size, dtype]
        ours, theirs = (sum(t for (n, _), t in times.items() if n == name) for name in ("dbuffer", "FSDP2"))
        return ours / theirs


# -- block-optim -------------------------------------------------------------------------------------------------------


@recorded_as(
    "optimizer", track_adamw_fused_ms="ms", track_adamw_ms="ms", track_adamw8bit_elements_ms="ms",
    track_adamw8bit_tile_ms="ms", track_share_of_torch_fused_on_dtensors="ratio",
)  # fmt: skip
class Step:
    """Optimizer steps. AdamW fused on flat ragged parameters is to stay below half of torch's on DTensors."""

    timeout = 900

    def setup_cache(self) -> dict[str, float]:
        return optimizers.measure_steps(9)

    def track_adamw_fused_ms(self, results: Any) -> float:
        return results["ours, AdamW fused, ragged"]

    def track_adamw_ms(self, results: Any) -> float:
        return results["ours, AdamW, ragged"]

    def track_adamw8bit_elements_ms(self, results: Any) -> float:
        return results["ours, AdamW8bit elements:256, ragged"]

    def track_adamw8bit_tile_ms(self, results: Any) -> float:
        return results["ours, AdamW8bit tile:32x32, ragged"]

    def track_share_of_torch_fused_on_dtensors(self, results: Any) -> float:
        return results["ours, AdamW fused, ragged"] / results["torch, AdamW fused, DTensor"]


@recorded_as("muon", track_gib_received="GiB", track_imbalance="max/mean")
class MuonPlans:
    """Figures of plans for large models."""

    params = (tuple(muon.MODELS), (64, 128, 512))
    param_names = ("model", "ranks")

    def setup(self, model: str, world_size: int) -> None:
        self.figures = muon.counts(model, world_size)

    def track_gib_received(self, model: str, world_size: int) -> float:
        return self.figures["owners_gib"]

    def track_imbalance(self, model: str, world_size: int) -> float:
        return self.figures["imbalance"]


@recorded_as("muon", track_time_ratio="ratio", track_cpu_ratio="ratio", track_bytes_sent="bytes")
class MuonSteps:
    """A step of each system on two ranks, over the all-gather Muon's in the same run; bytes sent."""

    params = (muon.SYSTEMS,)
    param_names = ("system",)
    timeout = 600

    def setup_cache(self) -> dict[str, list[float]]:
        return muon.on_ranks(2)

    def track_time_ratio(self, figures: Any, system: str) -> float:
        return figures[system][0] / figures[muon.FULL][0]

    def track_cpu_ratio(self, figures: Any, system: str) -> float:
        return figures[system][1] / figures[muon.FULL][1]

    def track_bytes_sent(self, figures: Any, system: str) -> float:
        return figures[system][2]


@recorded_as("shampoo", track_median="ms", track_largest="ms")
class StepProfile:
    """Thread CPU milliseconds of a step, over 50 steps."""

    params = (tuple(optimizers.SHAMPOOS), ("staggered", "together"))
    param_names = ("system", "refresh")
    timeout = 3600

    def setup_cache(self) -> dict[str, dict[bool, tuple[float, float]]]:
        return {system: optimizers.profiles(system) for system in optimizers.SHAMPOOS}

    def track_median(self, figures: Any, system: str, refresh: str) -> float:
        return figures[system][refresh == "staggered"][0]

    def track_largest(self, figures: Any, system: str, refresh: str) -> float:
        return figures[system][refresh == "staggered"][1]


@recorded_as("shampoo", track_state="bytes/parameter")
class Memory:
    """Bytes of optimizer state per parameter."""

    params = (tuple(optimizers.SHAMPOOS),)
    param_names = ("system",)

    def track_state(self, system: str) -> float:
        return optimizers.state_bytes(system)
