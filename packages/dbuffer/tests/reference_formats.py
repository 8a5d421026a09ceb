"""The formats once more, tile by tile in numpy and fp64: what the codes and scales must be."""

import numpy as np

E4M3 = np.array(
    [
        np.nan if code == 127 else (code % 8 / 8 + (code >= 8)) * 2.0 ** (max(code // 8, 1) - 7)
        for code in range(128)
    ]
)  # of codes without sign


def matrices(values):
    """A tensor as (stacked matrices, rows, columns)."""
    if values.ndim < 2:
        return values.reshape(1, 1, -1)
    return values.reshape(-1, *values.shape[-2:])


def tiles(values, tile):
    """Every tile's place in `matrices`, row-major."""
    stacked, rows, columns = matrices(values).shape
    for m in range(stacked):
        for r in range(0, rows, tile[0]):
            for c in range(0, columns, tile[1]):
                yield m, slice(r, r + tile[0]), slice(c, c + tile[1])


def factors(amax, top, scale):
    """(what values are multiplied by, what codes are multiplied by), fp32."""
    if not np.isfinite(amax):
        return np.float32(np.nan), np.float32(np.nan)
    with np.errstate(over="ignore"):
        up = np.float32(1) if amax == 0 else np.float32(top) / np.float32(amax)
    up = min(up, np.finfo(np.float32).max)
    if scale == "pow2":
        up = np.float32(2.0 ** (np.frexp(np.float64(up))[1] - 1))
    return up, np.float32(1) / up


def e4m3_codes(scaled):
    """The nearest codes of finite fp64 numbers, ties to the even code."""
    magnitude = np.minimum(np.abs(scaled), 448.0)
    table = E4M3[:127]
    middles = (table[:-1] + table[1:]) / 2
    found = np.searchsorted(middles, magnitude, side="left")
    tie = magnitude == np.append(middles, np.inf)[found]
    found += tie & (found % 2 == 1)
    return (found | np.signbit(scaled) * 128).astype(np.uint8)


def quantize(values, tile, top, scale, code_of):
    """(codes in the shape of `matrices`, scales) of fp32 values; their product with the factor is rounded to fp32."""
    stacked = matrices(values.astype(np.float32))
    codes, scales = np.zeros(stacked.shape, np.uint8), []
    for place in tiles(values, tile):
        found = stacked[place]
        up, down = factors(np.abs(found).max(), top, scale)
        scales.append(down)
        if np.isfinite(up):
            codes[place] = code_of((found * up).astype(np.float64))
    return codes, np.array(scales, np.float32)


def int8_codes(scaled):
    """To nearest, ties to even."""
    return np.clip(np.round(scaled), -127, 127).astype(np.int8).view(np.uint8)
