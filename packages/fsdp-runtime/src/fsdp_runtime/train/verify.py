"""``fsdp-train verify``: whether checkpoints are as they were written."""

from pathlib import Path

from .checkpoint import checkpoints_of
from .checkpoint_files import find_damage
from .errors import TrainError


def verify(run: str) -> int:
    """Read every checkpoint of `run` (or the checkpoint `run`) and print the damaged files.

    Returns 0 if all are as they were written, else 1.

    Raises:
        TrainError: there is no checkpoint.
    """
    checkpoints = checkpoints_of(Path(run))
    if not checkpoints:
        raise TrainError(f"{run} has no complete checkpoint")
    status = 0
    for checkpoint in checkpoints:
        lines = find_damage(checkpoint)
        for line in lines:
            print(f"{checkpoint}: {line}")
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        if not lines:
            print(f"{checkpoint}: as written, {size / 1e6:,.1f} MB")
        status = status or int(bool(lines))
    return status
