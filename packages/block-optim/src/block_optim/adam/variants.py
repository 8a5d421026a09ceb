"""Which Triton kernel takes which blocks, in how large programs of how many warps.

    span of a tile (powers of two)      kernel                    a thread holds
    up to 8192 elements                 quantized_adamw           16 elements, of several tiles if they are small
    up to 16384, all of 16 bits         quantized_adamw           32, finished in four pieces
    larger                              quantized_adamw_twice     16, piece after piece
    runs with fp32 moments              wide_adamw                16

Rows whose addresses or widths are not multiples of 8 elements (`Row.aligned`) get kernels of scalar accesses, with 4
elements a thread. What these choices compile to is shown by `python -m bench kernels`.
"""

from dataclasses import dataclass
from typing import Any

import torch

VECTOR = 8  # elements of an access: 8 bytes of codes, 16 of bf16, twice 16 of fp32
WARP = 32
_MOST_WARPS = 16
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Types:
    """Of parameters and gradients, and whether parameters are rounded stochastically."""

    param: torch.dtype
    grad: torch.dtype
    rounds: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """The kernels' arguments."""
        rounds = self.rounds and self.param == torch.bfloat16
        return {"PARAM_TYPE": _TYPES[self.param], "GRAD_TYPE": _TYPES[self.grad], "ROUND": rounds}


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants.

    Attributes:
        per_program: tiles (of runs: elements) that one program works on.
        elements: of one program, with what is missing of tiles whose sides are no powers of two.
        pieces: how often it runs through its loops.
    """

    kernel: Any  # a function that Triton compiles
    constants: dict[str, Any]
    num_warps: int
    per_program: int
    elements: int
    pieces: int = 1


def wide_variant(types: Types, aligned: bool) -> Variant:
    """For parameters with fp32 moments."""
    from block_optim.adam import kernels_triton

    block = 4 * WARP * _held(aligned)
    constants = {"BLOCK": block, "VECTOR": VECTOR if aligned else 1, **types.constants}
    return Variant(kernels_triton.wide_adamw, constants, 4, block, block)


def quantized_variant(tile: tuple[int, int], types: Types, *, aligned: bool, single: bool) -> Variant:
    """For tiles of 8-bit states; ``single``: no row of the stretches has more than one tile."""
    from block_optim.adam import kernels_triton

    rows, columns = (kernels_triton.power_of_two(n) for n in tile)
    span, held = rows * columns, _held(aligned)
    kernel, pieces, tiles, warps = kernels_triton.quantized_adamw, 1, 1, _MOST_WARPS
    narrow = max(types.param.itemsize, types.grad.itemsize) == 2 and not types.rounds
    if span <= _MOST_WARPS * WARP * held:
        tiles = max(1, 4 * WARP * held // span)
        warps = max(1, tiles * span // (WARP * held))
    elif aligned and narrow and span == 2 * _MOST_WARPS * WARP * held:
        pieces = 4
    else:
        kernel, warps = kernels_triton.quantized_adamw_twice, 4
        pieces = span // (4 * WARP * held)
    piece = tiles * span // pieces
    column_span = min(columns, piece // tiles)
    constants = {
        **types.constants,
        "TILES": tiles,
        "TILE_ROWS": tile[0],
        "TILE_COLUMNS": tile[1],
        "ROW_SPAN": piece // tiles // column_span,
        "COLUMN_SPAN": column_span,
        "PIECES": pieces,
        "VECTOR": VECTOR if aligned else 1,
        "SINGLE": single,
    }
    return Variant(kernel, constants, warps, tiles, tiles * span, pieces)


def _held(aligned: bool) -> int:
    """Elements that a thread works on at once."""
    return 2 * VECTOR if aligned else 4
