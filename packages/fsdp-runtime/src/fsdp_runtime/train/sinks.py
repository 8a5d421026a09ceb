"""Where metrics are logged: a file of JSON lines always, and the trackers of ``--log-to``. Rank 0 only."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .errors import TrainError, one_line


class Sink(Protocol):
    """Takes metrics. Any exception ends the run, on every rank."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of a step. Names are ``train/loss``, ``held_out/loss`` and so on, of one kind per call."""

    def close(self) -> None:
        """Write what is buffered."""


class JsonLines:
    """A file with one JSON object per call: ``{"kind": "train", "step": 7, "loss": 2.1}``.

    Args:
        path: of the file, which is replaced.
        kept: entries that it begins with.
    """

    def __init__(self, path: Path, kept: Iterable[Mapping[str, Any]] = ()) -> None:
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(partial, path)
        self._file = path.open("a", buffering=1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line."""
        kind = next(iter(values)).partition("/")[0]
        figures = {name.removeprefix(f"{kind}/"): value for name, value in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run. Steps from `start` on replace those of a killed run."""

    def __init__(self, folder: Path, start: int, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Tracker:
    """A run of wandb or trackio, named as the folder. `WANDB_PROJECT` names the project of both."""

    def __init__(
        self, init: Callable[..., Any], folder: Path, config: dict[str, Any], **options: Any
    ) -> None:
        project = os.environ.get("WANDB_PROJECT", "fsdp-train")
        self._run = init(project=project, name=folder.resolve().name, config=config, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb(folder: Path, start: int, config: dict[str, Any]) -> Sink:
    import wandb

    return Tracker(wandb.init, folder, config, dir=str(folder))


def _trackio(folder: Path, start: int, config: dict[str, Any]) -> Sink:
    import trackio

    return Tracker(trackio.init, folder, config, resume="allow" if start else "never")


# By package.
TRACKERS = {"tensorboard": TensorBoard, "wandb": _wandb, "trackio": _trackio}


def check_installed(names: Iterable[str]) -> None:
    """Raises `TrainError`, with the command that installs them, if packages of trackers are missing."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        extras = ",".join(missing)
        raise TrainError(f"--log-to {extras}: not installed: pip install 'fsdp-runtime[{extras}]'")


def open_trackers(names: Iterable[str], folder: Path, start: int, config: dict[str, Any]) -> list[Sink]:
    """Open trackers by name, for a run in `folder` whose next step is `start`.

    Raises:
        TrainError: a package is missing, or the tracker cannot start.
    """
    check_installed(names)
    sinks: list[Sink] = []
    for name in dict.fromkeys(names):
        try:
            sinks.append(TRACKERS[name](folder, start, config))
        except Exception as error:
            raise TrainError(f"--log-to {name}: {one_line(error)}") from error
    return sinks
