"""Launches of the Triton kernels: one for all runs, or two if some runs are not aligned for vectors."""

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ragged_shard.device import has_triton

from .noise import Noise, signed
from .tiles import Bands, RowRun, RunList, Runs, bands_of

BlockFormat = Any  # of `formats`, which imports this module
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOST = 16384  # elements that one program can hold
_GROUP = 4096  # elements of the tiles of one row that a program does


def has_kernels(fmt: BlockFormat, device: torch.device) -> bool:
    """Whether the kernels take a format's tiles on this device; else torch ops do the work."""
    rows, columns = map(_span, fmt.piece)
    return has_triton(device) and rows * columns <= _MOST


def _span(size: int) -> int:
    return 1 << (size - 1).bit_length()


Table = tuple[Tensor, Tensor, bool]  # rows of pieces, each program's row, whether all are aligned


@cache
def constants_of(fmt: BlockFormat) -> dict[str, Any]:
    """Compile-time constants of the kernels for a format, and warps a program."""
    height, width = fmt.piece
    rows, columns = _span(height), _span(width)
    if height == 1:
        rows = max(1, _GROUP // columns)
    warps = min(8, max(1, rows * columns // 1024))
    return {
        "CODE": fmt.code,
        "TILE_COLUMNS": width,
        "TILES_A_SCALE": fmt.tile[1] // width,
        "SPAN_ROWS": rows,
        "SPAN_COLUMNS": columns,
        "ONE_ROW": height == 1,
        "num_warps": 1 << (warps.bit_length() - 1),
    }


def _tables(fmt: BlockFormat, runs: Runs, device: torch.device) -> list[Table]:
    """Tables of all pieces, by whether they are aligned for vectors; kept by a `RunList`."""
    kept = runs.tables if isinstance(runs, RunList) else {}
    if device not in kept:
        by_access: dict[bool, list[list[int]]] = {}
        for row in [_row(fmt, run, piece) for run in runs for piece in bands_of(run)]:
            by_access.setdefault(_is_aligned(fmt, row), []).append(row)
        kept[device] = [(*_table(fmt, rows, device), vector) for vector, rows in by_access.items()]
    return list(kept[device])


def _row(fmt: BlockFormat, run: RowRun, piece: Bands) -> list[int]:
    """A row of a table, as `kernels` lists the columns, but with the number of a band's programs for the first one."""
    columns = run.grid.columns
    return [
        run.values + piece.row * columns,
        run.codes + piece.row * fmt.code_bytes(columns),
        run.scales + piece.band * run.grid.across,
        columns,
        piece.bands,
        piece.height,
        -(-columns // fmt.piece[1]),
        run.element + piece.row * columns,
    ]


def _is_aligned(fmt: BlockFormat, row: list[int]) -> bool:
    """Whether values and columns are on 16 elements, and codes on 16 bytes, or on 4 if a code is less than a byte."""
    values, codes, _, columns = row[:4]
    width = fmt.code_bytes(columns)
    return not any(n % 16 for n in (values, columns, fmt.piece[1])) and not any(
        n % (16 if width == columns else 4) for n in (codes, width)
    )


def _table(fmt: BlockFormat, pieces: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    at_once = constants_of(fmt)["SPAN_ROWS"] if constants_of(fmt)["ONE_ROW"] else 1
    counts = [-(-row[4] // at_once) * row[6] for row in pieces]
    rows = [
        [*row[:6], first, row[7]] for row, first in zip(pieces, accumulate(counts, initial=0), strict=False)
    ]
    piece_of = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    return torch.tensor(rows, dtype=torch.int64).to(device), piece_of.to(device)


def _launch(name: str, fmt: BlockFormat, table: Table, *arguments: Any, **constants: Any) -> None:
    from . import kernels

    rows, piece_of, aligned = table
    vector = constants.pop("VECTOR", True) and aligned
    vector = vector and not any(a.data_ptr() % 16 for a in arguments if isinstance(a, Tensor))
    fixed = {**constants_of(fmt), **constants, "VECTOR": vector}
    getattr(kernels, name)[(piece_of.numel(),)](
        *arguments, table=rows, piece_of=piece_of, **fixed, enable_fp_fusion=False
    )


def _as_int16(values: Tensor) -> Tensor:
    """bf16 as the kernels take it."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def quantize(
    fmt: BlockFormat, runs: Runs, values: Tensor, codes: Tensor, scales: Tensor, noise: Noise | None
) -> None:
    """`BlockFormat.quantize`."""
    first, second = (0, 0) if noise is None else map(signed, noise.keys())
    for table in _tables(fmt, runs, values.device):
        _launch(
            "quantize_tiles", fmt, table,
            _as_int16(values), codes, scales, first=first, second=second,
            TYPE=_TYPES[values.dtype], TOP=fmt.top, POW2=fmt.scale == "pow2", RANDOM=noise is not None,
        )  # fmt: skip


def read(fmt: BlockFormat, runs: Runs, codes: Tensor, scales: Tensor, out: Tensor, levels: Tensor) -> None:
    """`BlockFormat.sum`, or `BlockFormat.dequantize` where there is one rank; codes and scales are (ranks, n).

    `levels` are NF4's, on the same device.
    """
    ranks, stride = codes.shape
    for table in _tables(fmt, runs, out.device):
        _launch(
            "sum_tiles", fmt, table,
            codes, scales, _as_int16(out), levels,
            code_stride=stride, scale_stride=scales.shape[1],
            TYPE=_TYPES[out.dtype], RANKS=ranks, SIZE=fmt.size, VECTOR=ranks == 1 or stride % 16 == 0,
        )  # fmt: skip
