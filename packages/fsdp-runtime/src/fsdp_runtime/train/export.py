"""A checkpoint's model as one safetensors file. Names are the model's own: HF's where the model is HF's."""

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from .checkpoint import checkpoints_of, read_about, shortened
from .checkpoint_files import Planner, Reader, find_damage
from .errors import TrainError, one_line


def export(run: str, output: str | None, dtype: str) -> int:
    """Write the newest checkpoint of `run` (or the checkpoint `run`) to `output`; returns 0.

    In one process, without ranks, whatever their number was. Tied weights are written once for each name that the
    checkpoint has. The file appears whole or not at all.

    Raises:
        TrainError: no complete checkpoint, or it cannot be read, or the file cannot be written.
    """
    from safetensors.torch import save_file

    folder = Path(run)
    found = next(iter(checkpoints_of(folder)), None)
    if found is None:
        raise TrainError(f"{run} has no complete checkpoint")
    if lines := find_damage(found):
        raise TrainError(f"{found} is damaged: {shortened(lines)}")
    about = read_about(found)
    tensors = read_model(found)
    if dtype == "bf16":
        tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    path = Path(output) if output else folder / "model.safetensors"
    if output is None and found == folder:
        path = Path("model.safetensors")
    if path.is_dir():
        raise TrainError(f"cannot write {path}: it is a folder")
    partial = path.with_name(path.name + ".part")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "step": str(about["step"])})
        os.replace(partial, path)
    except (OSError, ValueError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise TrainError(f"cannot write {path}: {one_line(error)}") from error
    except Exception as error:  # safetensors raises a class of its own for a full disk
        raise TrainError(f"cannot write {path}: {one_line(error)}") from error
    total = sum(t.numel() for t in tensors.values())
    print(f"{path}: {len(tensors)} tensors, {total / 1e6:.2f}M parameters, step {about['step']}")
    return 0


def read_model(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole model of a checkpoint, on the host, in this process alone.

    Raises:
        TrainError: files are missing or damaged.
    """
    try:
        reader = Reader(checkpoint)
        entries = reader.read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():  # that one process loads is what is meant
            warnings.simplefilter("ignore", UserWarning)
            dcp_load(wanted, storage_reader=reader, planner=Planner(), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise TrainError(f"cannot read {checkpoint}: {one_line(error)}") from error
    return {name.removeprefix("model."): tensor.contiguous() for name, tensor in wanted.items()}
