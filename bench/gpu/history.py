"""GPU figures as history: measured here where there is a CUDA device, else brought in by `python -m bench import`.

Without a device everything is NaN, which asv leaves out.
"""

import math
from typing import Any

from ..common.history import recorded_as

WORLDS = [
    "one-rank", "real", "simulated-gpu-dense-8", "simulated-gpu-dense-64", "simulated-gpu-stacked-8",
    "simulated-gpu-stacked-64",
]  # fmt: skip
SYSTEMS = ["plain", "ddp", "ours", "fsdp2"]
FIGURES = ("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "exposed_seconds")


@recorded_as("gpu_history", **{f"track_{name}": "seconds" for name in FIGURES})
class Gpu:
    """Seconds of one step, in bf16; in a simulated world also those in which communication is exposed."""

    params = (WORLDS, SYSTEMS)
    param_names = ("world", "system")
    timeout = 900
    version = "1"

    def setup_cache(self) -> dict[str, Any]:
        import tempfile
        from pathlib import Path

        import torch

        if not torch.cuda.is_available():
            return {}
        from .run import BUDGET, run

        with tempfile.TemporaryDirectory() as folder:
            return run(Path(folder), dry=False, budget=BUDGET, skip_tests=True)["pieces"]

    def track_step_seconds(self, pieces: Any, world: str, system: str) -> float:
        return figure("step_seconds", pieces, world, system)

    def track_forward_seconds(self, pieces: Any, world: str, system: str) -> float:
        return figure("forward_seconds", pieces, world, system)

    def track_backward_seconds(self, pieces: Any, world: str, system: str) -> float:
        return figure("backward_seconds", pieces, world, system)

    def track_optimizer_seconds(self, pieces: Any, world: str, system: str) -> float:
        return figure("optimizer_seconds", pieces, world, system)

    def track_exposed_seconds(self, pieces: Any, world: str, system: str) -> float:
        return figure("exposed_seconds", pieces, world, system)


def figure(name: str, pieces: dict[str, Any], world: str, system: str) -> float:
    """One figure of what `run` found; NaN where it has none."""
    keys = {"step_seconds": "wall", "forward_seconds": "forward", "backward_seconds": "backward"}
    keys |= {"optimizer_seconds": "update", "exposed_seconds": "exposed"}
    found: float = pieces.get(world, {}).get("times", {}).get(system, {}).get(keys[name], math.nan)
    return found
