"""Launches of the Triton kernels: one for all runs, or two if some runs are not aligned for vectors."""

from dataclasses import dataclass
from typing import Any

import torch

from ragged_shard.device import has_triton

from .noise import Noise, signed
from .tiles import RowRun, RunList, Runs, bands_of

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


@dataclass(frozen=True)
class Table:
    """Pieces of runs on a device: the kernels' rows, and each program's."""

    rows: torch.Tensor
    piece_of: torch.Tensor
    constants: dict[str, Any]


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
        constants = constants_of(fmt)
        by_access: dict[bool, list[list[int]]] = {}
        for run in runs:
            for row in _pieces(fmt, run):
                by_access.setdefault(_is_aligned(fmt, row), []).append(row)
        kept[device] = [
            _table(rows, {**constants, "VECTOR": vector}, device) for vector, rows in by_access.items()
        ]
    return list(kept[device])


def _pieces(fmt: BlockFormat, run: RowRun) -> list[list[int]]:
    """Rows of a table, as `kernels` lists the columns, but with the number of a band's programs for the first one."""
    columns = run.grid.columns
    return [
        [
            run.values + piece.row * columns,
            run.codes + piece.row * fmt.code_bytes(columns),
            run.scales + piece.band * run.grid.across,
            columns,
            piece.bands,
            piece.height,
            -(-columns // fmt.piece[1]),
            run.element + piece.row * columns,
        ]
        for piece in bands_of(run)
    ]


def _is_aligned(fmt: BlockFormat, row: list[int]) -> bool:
    """Whether values and columns are on 16 elements, and codes on 16 bytes, or on 4 if a code is less than a byte."""
    values, codes, _, columns = row[:4]
    width = fmt.code_bytes(columns)
    return not any(n % 16 for n in (values, columns, fmt.piece[1])) and not any(
        n % (16 if width == columns else 4) for n in (codes, width)
    )


def _table(pieces: list[list[int]], constants: dict[str, Any], device: torch.device) -> Table:
    rows, piece_of, program = [], [], 0
    for i, row in enumerate(pieces):
        bands, across = row[4], row[6]
        if constants["ONE_ROW"]:
            bands = -(-bands // constants["SPAN_ROWS"])
        rows.append([*row[:6], program, row[7]])
        piece_of.append(torch.full((bands * across,), i, dtype=torch.int32))
        program += bands * across
    return Table(torch.tensor(rows, dtype=torch.int64).to(device), torch.cat(piece_of).to(device), constants)


def _launch(name: str, table: Table, *arguments: Any, **constants: Any) -> None:
    from . import kernels

    vector = table.constants["VECTOR"] and constants.pop("VECTOR", True)
    vector = vector and not any(a.data_ptr() % 16 for a in arguments if isinstance(a, torch.Tensor))
    fixed = {**table.constants, **constants, "VECTOR": vector}
    getattr(kernels, name)[(table.piece_of.numel(),)](*arguments, **fixed, enable_fp_fusion=False)


def _as_int16(values: torch.Tensor) -> torch.Tensor:
    """bf16 as the kernels take it."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def quantize(
    fmt: BlockFormat,
    runs: Runs,
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    noise: Noise | None,
) -> None:
    """`BlockFormat.quantize`."""
    first, second = (0, 0) if noise is None else map(signed, noise.keys())
    for table in _tables(fmt, runs, values.device):
        _launch(
            "quantize_tiles", table,
            _as_int16(values), codes, scales, table.rows, table.piece_of, first, second,
            TYPE=_TYPES[values.dtype], TOP=fmt.top, POW2=fmt.pow2, RANDOM=noise is not None,
        )  # fmt: skip


def read(fmt: BlockFormat, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """`BlockFormat.sum`, or `BlockFormat.dequantize` where there is one rank; codes and scales are (ranks, n)."""
    ranks, stride = codes.shape
    levels = fmt.levels(out.device)
    for table in _tables(fmt, runs, out.device):
        _launch(
            "sum_tiles", table,
            codes, scales, _as_int16(out), scales if levels is None else levels, table.rows, table.piece_of,
            stride, scales.shape[1],
            TYPE=_TYPES[out.dtype], RANKS=ranks, SIZE=fmt.size, VECTOR=ranks == 1 or stride % 16 == 0,
        )  # fmt: skip
