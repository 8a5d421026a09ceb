"""FP8 weights as published checkpoints have them: `X` in e4m3, `X_scale_inv` in fp32, one for each tile.

`config.json` says in `quantization_config` how large tiles are (`weight_block_size`) and which linear layers have none.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dbuffer import BlockFP8, RowRun

from .._schedule.model import member_of
from .files import atomic_write, read_json
from .fp8_files import CONFIG, SCALES


def formats_of(module: nn.Module) -> dict[int, BlockFP8]:
    """The format of each parameter of a module that is gathered in e4m3, by the id of the sharded parameter.

    Raises:
        ValueError: there is none, or tiles differ: a checkpoint has one `weight_block_size`.
    """
    found: dict[int, BlockFP8] = {}
    for inner in module.modules():
        member = member_of(inner)
        for group in member.unit.groups if member is not None else ():
            fmt = group.wire_format
            if isinstance(fmt, BlockFP8):
                found.update({id(param.sharded): fmt for param in group.params})
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
    config: dict[str, Any] = read_json(path) if path.exists() else {}
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
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(config, indent=2) + "\n")
