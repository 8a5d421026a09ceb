"""How the Triton kernel for 8-bit moments takes blocks: passes, pieces, tiles of a program, and warps.

    span of a tile (powers of two)      passes     a thread holds
    up to 8192 elements                 1          16 elements, of several tiles if they are small
    larger                              2          16, piece after piece

One pass over a larger tile would take all registers of a multiprocessor, which would then wait for its memory.
What these choices compile to is shown by `python -m bench kernels`.
"""

from block_optim.adam.variants import VECTOR, WARP, Types, Variant, elements_of_thread

_MOST_WARPS = 16


def quantized_variant(tile: tuple[int, int], types: Types, aligned: bool, single: bool) -> Variant:
    """Variant for tiles of 8-bit states; ``single``: no row of the stretches has more than one tile."""
    from block_optim.adam.q8 import kernels_triton

    rows, columns = (_power_of_two(n) for n in tile)
    span, elements = rows * columns, elements_of_thread(aligned)
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


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (n - 1).bit_length()
