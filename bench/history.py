"""The runtime's times and memory beside its peers' as history, for asv.

asv takes any rise for a regression, so what is tracked is seconds, bytes and shares, never tokens/s. Times of a busy
machine are NaN, which asv does not show.
"""

import math
import statistics
import sys
from typing import Any

from .recorded import recorded_as

PEERS = ["ddp", "fsdp2", "ours"]
WORKLOADS = ["dense", "moe"]


@recorded_as(
    "runtime", track_step_seconds="seconds", track_cpu_seconds="seconds", track_forward_seconds="seconds",
    track_backward_seconds="seconds", track_optimizer_seconds="seconds", track_step_of_ddp="ratio",
    track_peak_rss_bytes="bytes",
)  # fmt: skip
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
            found, noise = measure(workload, 2, systems=PEERS, num_rounds=4, steps=1)
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


@recorded_as("runtime", track_step_ms="ms", track_share_of_fsdp2="ratio")
class TinyUnits:
    """Thread CPU time of a step with 64 tiny units on the fake process group. To stay below 0.6 of FSDP2's."""

    timeout = 300
    version = "1"

    def setup_cache(self) -> dict[str, list[float]]:
        from .host import measure_units

        return measure_units(45)

    def track_step_ms(self, samples: Any) -> float:
        return 1e3 * statistics.median(samples["ours"])

    def track_share_of_fsdp2(self, samples: Any) -> float:
        from .host import units_ratio

        return units_ratio(samples)


def _time(figures: dict[str, Any], system: str, key: str) -> float:
    if figures["noise"] or system not in figures["times"]:
        return math.nan
    return figures["times"][system][key]
