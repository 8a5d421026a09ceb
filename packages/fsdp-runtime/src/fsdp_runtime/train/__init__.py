"""fsdp-train: pretrains a small transformer on real text with the whole stack. See README.md in this folder.

    fsdp-train                     on all local ranks, the default run
    fsdp-train compare             the same work on several systems, optimizers or wire formats
    fsdp-train plan                what a run will hold in memory, before anything is trained
    fsdp-train verify              whether checkpoints are as they were written

Needs the extra ``train``. The parts can be used alone: `Transformer` knows nothing of sharding, `Batches` nothing
of models.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RunConfig
    from .data import Batches, Corpus, read_data
    from .errors import TrainError
    from .model import PRESETS, ModelConfig, Transformer
    from .trainer import Trainer

__all__ = [
    "PRESETS",
    "Batches",
    "Corpus",
    "ModelConfig",
    "RunConfig",
    "TrainError",
    "Trainer",
    "Transformer",
    "read_data",
]
_MODULES = {
    "PRESETS": "model",
    "Batches": "data",
    "Corpus": "data",
    "ModelConfig": "model",
    "RunConfig": "config",
    "TrainError": "errors",
    "Trainer": "trainer",
    "Transformer": "model",
    "read_data": "data",
}


def __getattr__(name: str) -> Any:  # imported when used: the command reports what is missing, and has --help
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
