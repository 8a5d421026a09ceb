"""Which folder a run writes to; rank 0 decides, all ranks learn it."""

from pathlib import Path

import torch.distributed as dist

from .checkpoint import latest
from .config import RunConfig
from .errors import TrainError

RUNS = Path("runs")


def choose_folder(config: RunConfig) -> Path:
    """The folder of a run, made if need be. Collective.

    Raises:
        TrainError: on every rank: the folder holds another run, or there is none to resume, or it cannot be made.
    """
    found: list[str | None] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            folder = _resumed(config) if config.resume else _fresh(config)
            found[0] = str(folder)
        except TrainError as error:
            found[1] = str(error)
        except OSError as error:
            found[1] = f"cannot make the run's folder: {error.strerror}: {error.filename}"
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise TrainError(found[1])
    assert found[0] is not None
    return Path(found[0])


def _fresh(config: RunConfig) -> Path:
    if config.out is None:
        folder = next_free(RUNS)
        folder.mkdir(parents=True)
        return folder
    folder = Path(config.out)
    if latest(folder) is not None:
        raise TrainError(
            f"--out {folder} holds a run already: add --resume to go on with it, or give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _resumed(config: RunConfig) -> Path:
    if config.out is not None:
        if latest(Path(config.out)) is None:
            raise TrainError(f"--resume: {config.out} has no complete checkpoint")
        return Path(config.out)
    runs = sorted(
        (path for path in RUNS.glob("*") if latest(path) is not None), key=lambda p: p.stat().st_mtime
    )
    if not runs:
        raise TrainError(f"--resume: no run in {RUNS.resolve()} has a complete checkpoint; say --out FOLDER")
    return runs[-1]


def next_free(parent: Path) -> Path:
    """The next numbered folder below `parent` that does not exist."""
    number = 1
    while (parent / f"{number:03d}").exists():
        number += 1
    return parent / f"{number:03d}"
