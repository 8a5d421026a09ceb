"""fsdp-train: pretrains a small transformer on real text with the whole stack. See README.md in this folder.

    fsdp-train                     on all local ranks, the default run
    fsdp-train compare             the same work on other systems
    fsdp-train gathers             the same work with gathers in fp32, bf16, fp8 and int8
    fsdp-train optimizers          the same work with other optimizers
    fsdp-train plan                what a run will hold in memory, before anything is trained
    fsdp-train export              a checkpoint as one safetensors file
    fsdp-train verify              whether checkpoints are as they were written

Needs the extra ``train``. The parts can be used alone: `Transformer` knows nothing of sharding, `Batches` nothing
of models.
"""

from .batches import Batches
from .config import RunConfig
from .corpus import Corpus, read_data
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
