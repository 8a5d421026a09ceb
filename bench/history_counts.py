"""The runtime's exact counts as history, for asv. A commit whose runtime cannot be built has none."""

from typing import Any

from .recorded import recorded_as

RANKS = [8, 64, 1024]


@recorded_as(
    "runtime", track_collectives="calls", track_calls="calls", track_wire_bytes="bytes",
    track_copied_forward_bytes="bytes", track_copied_backward_bytes="bytes", track_peak_bytes="bytes",
    track_peak_of_fsdp2="ratio",
)  # fmt: skip
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

    params = (["wrap", "forward", "backward"],)
    param_names = ("part",)
    timeout = 300
    version = "1"

    def setup_cache(self) -> dict[str, Any]:
        from .calls import measure

        return measure()

    def track_own_calls(self, figures: Any, part: str) -> float:
        return figures["ours"][part]["calls"]

    def track_own_calls_of_fsdp2(self, figures: Any, part: str) -> float:
        return figures["ours"][part]["calls"] / figures["fsdp2"][part]["calls"]
