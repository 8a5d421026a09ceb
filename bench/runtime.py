"""fsdp-runtime: its exact counts, and its times and memory beside its peers', as history.

Figures come from `counts`, `rounds` and `footprint`; here they only get names and units. asv takes any rise for a
regression, so what is tracked is seconds, bytes and shares, never tokens/s. A commit without a runtime gives NaN,
and so do times of a busy machine: asv shows neither.
"""

import math
import sys
from typing import Any

RANKS = [8, 64, 1024]
PEERS = ["ddp", "fsdp2", "ours"]
WORKLOADS = ["dense", "moe"]


class Counts:
    """One step of a 31.6M-parameter Llama on simulated ranks, beyond the same model's own step. Exact."""

    params = (RANKS,)
    param_names = ("ranks",)
    timeout = 600
    version = "1"

    def setup_cache(self) -> dict[int, dict[str, Any]]:
        from .counts import compare, plain

        base = plain("counts")
        return {ranks: compare("counts", ranks, ("ours", "fsdp2"), base) for ranks in RANKS}

    def track_collectives(self, figures: Any, ranks: int) -> float:
        return _of(figures[ranks]["ours"], lambda found: sum(found["collectives"].values()))

    def track_calls(self, figures: Any, ranks: int) -> float:
        return _of(figures[ranks]["ours"], lambda found: sum(found["calls"].values()))

    def track_wire_bytes(self, figures: Any, ranks: int) -> float:
        return _of(figures[ranks]["ours"], lambda found: found["wire_bytes"])

    def track_copied_forward_bytes(self, figures: Any, ranks: int) -> float:
        return _of(figures[ranks]["ours"], lambda found: found["copied"]["forward"])

    def track_copied_backward_bytes(self, figures: Any, ranks: int) -> float:
        return _of(figures[ranks]["ours"], lambda found: found["copied"]["backward"])

    def track_peak_bytes(self, figures: Any, ranks: int) -> float:
        return _of(figures[ranks]["ours"], lambda found: found["peak"])

    def track_peak_of_fsdp2(self, figures: Any, ranks: int) -> float:
        theirs = figures[ranks]["fsdp2"]["peak"]
        return _of(figures[ranks]["ours"], lambda found: found["peak"] / theirs)

    track_collectives.unit = track_calls.unit = "calls"
    for _track in (
        track_wire_bytes, track_copied_forward_bytes, track_copied_backward_bytes, track_peak_bytes
    ):  # fmt: skip
        _track.unit = "bytes"
    track_peak_of_fsdp2.unit = "ratio"
    del _track


class Speed:
    """Two gloo ranks of one thread each, systems alternating: seconds a step, and peak memory of fresh processes."""

    params = (WORKLOADS, PEERS)
    param_names = ("workload", "system")
    timeout = 900
    version = "1"

    def setup_cache(self) -> dict[str, Any]:
        from .speed import measure

        figures = {}
        for workload in WORKLOADS:
            found, noise = measure(workload, 2, systems=PEERS, rounds=4, steps=1)
            for reason in noise:
                print(
                    f"{workload}: times are not kept, the machine is too busy to tell: {reason}",
                    file=sys.stderr,
                )
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

    for _track in (
        track_step_seconds, track_cpu_seconds, track_forward_seconds, track_backward_seconds, track_optimizer_seconds
    ):  # fmt: skip
        _track.unit = "seconds"
    track_step_of_ddp.unit = "ratio"
    track_peak_rss_bytes.unit = "bytes"
    del _track


def _of(found: dict[str, Any], figure: Any) -> float:
    return math.nan if "skipped" in found else float(figure(found))


def _time(figures: dict[str, Any], system: str, key: str) -> float:
    if figures["noise"] or system not in figures["times"]:
        return math.nan
    return figures["times"][system][key]
