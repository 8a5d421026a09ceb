"""FP8 weights in files: `X` in e4m3, `X_scale_inv` with one for each tile, `config.json` with the tiles' size."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ragged_shard import Box

from .files import Checkpoint, Stored, read_json, whole

SCALES = "_scale_inv"
CONFIG = "config.json"


def read_safetensors(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The tensors of safetensors files, for `load_state_dict`; FP8 weights are read back from their codes.

    On the CPU, on every rank that calls it; communicates nothing.

    Args:
        path: a `.safetensors` file, an index, or a folder with either; where weights are FP8 next to a `config.json`
            that has `weight_block_size`.
        dtype: of weights that were FP8.

    Raises:
        ValueError: an FP8 weight without scales, or with scales of another shape than `weight_block_size` says; or a
            damaged file; by name.
        OSError: a file is missing or cannot be read.
        ImportError: safetensors is not installed.
    """
    checkpoint, tensors = Checkpoint(path), dict[str, torch.Tensor]()
    scales = set[str]()
    for name, stored in checkpoint.tensors.items():
        tensors[name] = stored.tensor
        if stored.dtype == torch.float8_e4m3fn:
            tensors[name] = decoder(stored, checkpoint)(whole(stored.shape)).to(dtype)
            scales.add(name + SCALES)
    return {name: tensor for name, tensor in tensors.items() if name not in scales}


def decoder(codes: Stored, checkpoint: Checkpoint) -> Callable[[Box], torch.Tensor]:
    """A function that reads a box of an e4m3 tensor, multiplied by the scales of its tiles, in fp32.

    Raises:
        ValueError: it has no scales, or scales of other tiles than the folder's `config.json` says.
    """
    scales = checkpoint.tensors.get(codes.name + SCALES)
    if scales is None:
        raise ValueError(
            f"{codes.name} is e4m3, and there is no {codes.name}{SCALES} to multiply it with, in {codes.file}"
        )
    path = checkpoint.folder / CONFIG
    size: Any = read_json(path) if path.exists() else {}
    for key in ("quantization_config", "weight_block_size"):
        size = size.get(key) if isinstance(size, dict) else None
    if not isinstance(size, list) or [type(number) for number in size] != [int, int] or min(size) < 1:
        raise ValueError(
            f"{path}: quantization_config.weight_block_size is {str(size)[:200]}; expected [rows, columns] of a tile"
        )
    rows, columns = codes.shape[-2:] if len(codes.shape) > 1 else (0, 0)
    expected = (*codes.shape[:-2], -(-rows // size[0]), -(-columns // size[1]))
    if scales.shape != expected or not scales.dtype.is_floating_point:
        raise ValueError(
            f"{scales.name} is {scales.dtype} of shape {scales.shape}; expected {expected} for tiles of {size}"
        )
    return partial(_decode, codes.tensor, scales.tensor, (size[0], size[1]))


def _decode(codes: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int], box: Box) -> torch.Tensor:
    tiles, inside = [*box.slices()[:-2]], list[slice]()
    for offset, size, step in zip(box.offsets[-2:], box.sizes[-2:], tile, strict=True):
        tiles.append(slice(offset // step, -(-(offset + size) // step)))
        inside.append(slice(offset % step, offset % step + size))
    factors = scales[tuple(tiles)].float()
    spread = factors.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return codes[box.slices()].float().mul_(spread[..., inside[0], inside[1]])
