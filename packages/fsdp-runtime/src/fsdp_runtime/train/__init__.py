"""fsdp-train: pretrains a small transformer on real text with the whole stack. See README.md in this folder.

    fsdp-train                     on all local ranks, the default run
    fsdp-train compare             the same work on several systems, optimizers or wire formats
    fsdp-train plan                the bytes of a rank, before a run

Needs what the checkout's requirements.txt installs. Parts can be used alone: `Transformer` knows no sharding, `Batches`
no models.
"""

try:
    from .config import RunConfig
    from .data import Batches, Corpus, read_data
    from .errors import TrainError
    from .model import PRESETS, ModelConfig, Transformer
    from .trainer import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: in the checkout, pip install -r requirements.txt", name=error.name
    ) from error

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
