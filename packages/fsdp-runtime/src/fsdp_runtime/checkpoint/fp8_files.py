"""FP8 weights in files: `X` in e4m3, `X_scale_inv` with one for each tile, `config.json` with the tiles' size."""

import os
from collections.abc import Mapping
from pathlib import Path
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
        ValueError: an FP8 weight without scales, scales without their weight, or of another shape than
            `weight_block_size` says; or a damaged file; by name.
        OSError: a file is missing or cannot be read.
        ImportError: safetensors is not installed.
    """
    checkpoint = Checkpoint(path)
    stored = checkpoint.tensors
    coded = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    for name in stored:
        weight = name.removesuffix(SCALES)
        if weight != name and weight not in coded:
            what = stored[weight].dtype if weight in stored else "missing"
            raise ValueError(f"{path}: {name} are the scales of an e4m3 tensor {weight}, which is {what}")
    scales = {name: scales_of(stored[name], stored) for name in coded}
    tile = tile_in(checkpoint.folder) if coded else (1, 1)
    for name in coded:
        check_scales(stored[name], scales[name], tile)
    return {
        name: decode(tensor, scales[name], tile, whole(tensor.shape)).to(dtype)
        if name in coded
        else tensor.tensor
        for name, tensor in stored.items()
        if not name.endswith(SCALES)
    }


def tile_in(folder: Path) -> tuple[int, int]:
    """Rows and columns of a tile, as the `config.json` of a folder says. Raises ValueError where it does not."""
    path = folder / CONFIG
    config: Any = read_json(path) if path.exists() else {}
    for key in ("quantization_config", "weight_block_size"):
        config = config.get(key) if isinstance(config, dict) else None
    if not isinstance(config, list) or [type(size) for size in config] != [int, int] or min(config) < 1:
        raise ValueError(
            f"{path}: quantization_config.weight_block_size is {str(config)[:200]}; expected [rows, columns] of a tile"
        )
    return config[0], config[1]


def scales_of(codes: Stored, source: Mapping[str, Stored]) -> Stored:
    """The scales of an e4m3 tensor. Raises ValueError where there are none."""
    if codes.name + SCALES not in source:
        raise ValueError(
            f"{codes.name} is e4m3, and there is no {codes.name}{SCALES} to multiply it with, in {codes.file}"
        )
    return source[codes.name + SCALES]


def check_scales(codes: Stored, scales: Stored, tile: tuple[int, int]) -> None:
    """Raise ValueError where scales are not those of tiles of this size."""
    if len(codes.shape) < 2:
        raise ValueError(f"{codes.name} of shape {codes.shape} has scales; expected a matrix")
    rows, columns = codes.shape[-2:]
    expected = (*codes.shape[:-2], -(-rows // tile[0]), -(-columns // tile[1]))
    if scales.shape != expected or not scales.dtype.is_floating_point:
        raise ValueError(
            f"{scales.name} is {scales.dtype} of shape {scales.shape}; expected {expected} for tiles of {tile}"
        )


def decode(codes: Stored, scales: Stored, tile: tuple[int, int], box: Box) -> torch.Tensor:
    """A box of codes times the scales of its tiles, in fp32."""
    tiles, inside = [*box.slices()[:-2]], list[slice]()
    for offset, size, step in zip(box.offsets[-2:], box.sizes[-2:], tile, strict=True):
        tiles.append(slice(offset // step, -(-(offset + size) // step)))
        inside.append(slice(offset % step, offset % step + size))
    factors = scales.tensor[tuple(tiles)].float()
    spread = factors.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return codes.tensor[box.slices()].float().mul_(spread[..., inside[0], inside[1]])
