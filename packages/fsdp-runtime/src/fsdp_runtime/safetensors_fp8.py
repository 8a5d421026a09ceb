"""The published layout of FP8 checkpoints: `X` in e4m3, `X_scale_inv` in fp32, one entry a tile, to multiply with.

`config.json` says in `quantization_config` how large tiles are (`weight_block_size`) and which linear layers have none.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dbuffer import BlockFP8, BlocksOnWire, RowRun

from ._model import member_of

SCALES = "_scale_inv"
CONFIG = "config.json"


def formats_of(module: nn.Module) -> dict[int, BlockFP8]:
    """The format of each parameter of a module that is gathered in e4m3, by the id of the sharded parameter.

    Raises:
        ValueError: there is none, or tiles differ: a checkpoint has one `weight_block_size`.
    """
    found: dict[int, BlockFP8] = {}
    for inner in module.modules():
        member = member_of(inner)
        for group in member.unit.groups if member is not None else ():
            wire = group.plan.wire
            if isinstance(wire, BlocksOnWire) and isinstance(wire.format, BlockFP8):
                found.update({id(param.sharded): wire.format for param in group.params})
    tiles = sorted({fmt.tile for fmt in found.values()})
    if len(tiles) != 1:
        raise ValueError(
            f"save_safetensors(quantized=True): weights with tiles {tiles} in this module; it writes those of "
            "QuantizationPolicy(weights=BlockFP8(...)), all of one tile"
        )
    return found


def quantize_whole(key: str, full: torch.Tensor, fmt: BlockFP8) -> list[tuple[str, torch.Tensor]]:
    """A whole weight as it is written: its codes and its scales, on the CPU. The same codes as a gather sends."""
    grid = fmt.grid(full.shape)
    codes = torch.empty(full.numel(), dtype=torch.uint8)
    scales = torch.empty(grid.num_scales)
    fmt.quantize([RowRun(grid, 0, grid.rows)], full.cpu().contiguous().view(-1), codes, scales)
    matrices = full.shape[:-2]
    return [
        (key, codes.view(torch.float8_e4m3fn).view(full.shape)),
        (key + SCALES, scales.view(*matrices, -1, grid.across)),
    ]


def write_config(module: nn.Module, formats: dict[int, BlockFP8], folder: Path) -> None:
    """Put `quantization_config` into the folder's `config.json`, which may be there."""
    path = folder / CONFIG
    config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    plain = [
        name
        for name, inner in module.named_modules()
        if isinstance(inner, nn.Linear) and id(inner.weight) not in formats
    ]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(next(iter(formats.values())).tile),
        "modules_to_not_convert": plain,
    }
    unfinished = folder / f"{CONFIG}.unfinished"
    unfinished.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(unfinished, path)


def read_safetensors(
    folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The tensors of a folder of safetensors files, for `load_state_dict`; FP8 weights are read back from their codes.

    On the CPU, on every rank that calls it; communicates nothing.

    Args:
        folder: with `*.safetensors`, and where weights are FP8 a `config.json` that has `weight_block_size`.
        dtype: of weights that were FP8.

    Raises:
        ValueError: an FP8 weight without scales, scales without their weight, or of another shape than
            `weight_block_size` says; by name.
        FileNotFoundError: no file.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found.update(_read_file(file))
    scales = {key.removesuffix(SCALES): found.pop(key) for key in list(found) if key.endswith(SCALES)}
    for key in scales:
        if key not in found or found[key].dtype != torch.float8_e4m3fn:
            what = found[key].dtype if key in found else "missing"
            raise ValueError(
                f"{folder}: {key}{SCALES} are the scales of an e4m3 tensor {key}, which is {what}"
            )
    tile = tile_in(folder) if scales else (1, 1)
    for key, value in found.items():
        if value.dtype == torch.float8_e4m3fn:
            if key not in scales:
                raise ValueError(
                    f"{folder}: {key} is e4m3, and there is no {key}{SCALES} to multiply it with"
                )
            found[key] = _read_back(key, value, scales[key], tile).to(dtype)
    return found


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file, or damaged: {str(error)[:200]}") from error


def tile_in(folder: Path) -> tuple[int, int]:
    """Rows and columns of a tile, as the `config.json` of a folder says. Raises ValueError where it does not."""
    path = folder / CONFIG
    try:
        config: Any = json.loads(path.read_text()) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({str(error)[:200]})") from None
    for key in ("quantization_config", "weight_block_size"):
        config = config.get(key) if isinstance(config, dict) else None
    if not isinstance(config, list) or [type(size) for size in config] != [int, int] or min(config) < 1:
        raise ValueError(
            f"{path}: quantization_config.weight_block_size is {str(config)[:200]}; expected [rows, columns] of a tile"
        )
    return config[0], config[1]


def _read_back(key: str, codes: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    if codes.ndim < 2:
        raise ValueError(f"{key} is e4m3 of shape {tuple(codes.shape)}; expected a matrix")
    rows, columns = codes.shape[-2:]
    expected = (*codes.shape[:-2], -(-rows // tile[0]), -(-columns // tile[1]))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"{key}{SCALES} has shape {tuple(scales.shape)}; expected {expected} for tiles of {tile}"
        )
    spread = scales.float().repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return codes.float().mul_(spread[..., :rows, :columns])
