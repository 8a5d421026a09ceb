"""How the Triton kernel for 8-bit moments takes blocks: passes, pieces, tiles of a program, and warps.

    span of a tile (powers of two)      passes     a thread holds
    up to 8192 elements                 1          16 elements, of several tiles if they are small
    larger                              2          16, piece after piece

One pass over a larger tile would take all registers of a multiprocessor, which would then wait for its memory.
A thread works on 16 elements; rows whose addresses or widths are not multiples of 8 elements (`Row.aligned`) get
kernels of scalar accesses, with 4 elements a thread. tests/test_kernels_compiled.py reads what these compile to.
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
    """Dtypes of parameters and gradients, and whether parameters are rounded stochastically."""

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
    """A kernel with its constants."""

    kernel: Any  # a function that Triton compiles
    constants: dict[str, Any]
    num_warps: int
    per_program: int  # tiles that one program works on
    elements: int  # elements of one program, with the padding of tiles whose sides are no powers of two
    pieces: int = 1  # number of times that it runs through its loops


def quantized_variant(tile: tuple[int, int], types: Types, aligned: bool, single: bool) -> Variant:
    """Variant for tiles of 8-bit states; ``single``: no row of the stretches has more than one tile."""
    from block_optim.adam.q8 import kernels_triton

    rows, columns = (1 << (n - 1).bit_length() for n in tile)  # the smallest powers of two that are not less
    span, elements = rows * columns, 2 * VECTOR if aligned else 4  # of a thread at once
    passes, pieces, tiles, warps = 1, 1, 1, _MOST_WARPS
    if span <= _MOST_WARPS * WARP * elements:
        tiles = max(1, 4 * WARP * elements // span)
        warps = max(1, tiles * span // (WARP * elements))
    else:
        passes, warps = 2, 4
        pieces = span // (4 * WARP * elements)
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
        "PASSES": passes,
        "VECTOR": VECTOR if aligned else 1,
        "SINGLE": single,
    }
    return Variant(kernels_triton.quantized_adamw, constants, warps, tiles, tiles * span, pieces)
