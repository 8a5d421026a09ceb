"""Launches of the Triton kernels: one for all runs, or two if some runs are not aligned to 16 elements."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ragged_shard.device import has_triton

from ..noise import Noise, signed
from ..tiles import RowRun, RunList, Runs, bands_of

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOST = 16384  # elements of a tile that one program can hold
_GROUP = 4096  # elements of the tiles of one row that a program does
PAIRS = 1024  # bytes of four-bit codes that a program reads
_WRITTEN = 4096  # elements of blocks of four-bit codes that a program writes


def has_kernels(tile: tuple[int, int], device: torch.device) -> bool:
    """Whether the kernels take tiles of this size on this device; else torch ops do the work."""
    return has_triton(device) and _span(tile[0]) * _span(tile[1]) <= _MOST


def writes_pairs(size: int, device: torch.device) -> bool:
    """Whether the kernel writes four-bit codes of blocks of this size on this device; else the torch ops do."""
    return has_triton(device) and _span(size) <= _WRITTEN


def reads_pairs(device: torch.device) -> bool:
    """Whether the kernel reads four-bit codes back on this device; else the torch ops do."""
    return has_triton(device)


def _span(size: int) -> int:
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Table:
    """Pieces of runs on a device: the kernels' rows, and each program's."""

    rows: torch.Tensor
    piece_of: torch.Tensor
    constants: dict[str, Any]

    @property
    def programs(self) -> int:
        """How many to launch."""
        return self.piece_of.numel()


def tables_of(tile: tuple[int, int], runs: Runs, device: torch.device) -> list[Table]:
    """Tables for all runs; kept by a `RunList`."""
    kept = runs.tables if isinstance(runs, RunList) else {}
    if device not in kept:
        constants = constants_of(tile)
        pieces = [row for run in runs for row in _pieces(run, tile[1])]
        tables = []
        for vector in (True, False):
            same = [row for row in pieces if vector == (_on_16(row) and tile[1] % 16 == 0)]
            if same:
                tables.append(_table(same, {**constants, "VECTOR": vector}, device))
        kept[device] = tables
    return list(kept[device])


def constants_of(tile: tuple[int, int]) -> dict[str, Any]:
    """Compile-time constants of the kernels, and warps a program."""
    rows, columns = _span(tile[0]), _span(tile[1])
    if tile[0] == 1:
        rows = max(1, _GROUP // columns)
    warps = min(8, max(1, rows * columns // 1024))
    return {
        "TILE_COLUMNS": tile[1],
        "SPAN_ROWS": rows,
        "SPAN_COLUMNS": columns,
        "ONE_ROW": tile[0] == 1,
        "num_warps": 1 << (warps.bit_length() - 1),
    }


def _pieces(run: RowRun, width: int) -> list[list[int]]:
    """Table rows; the column of the first program is replaced by the number of programs in the band."""
    columns = run.grid.columns
    if not columns:
        return []
    return [
        [
            run.values + piece.row * columns,
            run.codes + piece.row * columns,
            run.scales + piece.band * run.grid.across,
            columns,
            piece.bands,
            piece.height,
            -(-columns // width),
            run.element + piece.row * columns,
        ]
        for piece in bands_of(run.grid, run.start, run.stop)
    ]


def _on_16(row: list[int]) -> bool:
    return not any(row[i] % 16 for i in (0, 1, 3))


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
    from . import triton as kernels

    buffers = [a for a in arguments if isinstance(a, torch.Tensor)]
    fixed = dict(table.constants)
    if fixed.get("VECTOR"):
        fixed["VECTOR"] = not any(buffer.data_ptr() % 16 for buffer in buffers)
    kernel = getattr(kernels, name)
    kernel[(table.programs,)](*arguments, **fixed, **constants, enable_fp_fusion=False)


def _as_int16(values: torch.Tensor) -> torch.Tensor:
    """bf16 as the kernels take it."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def amax(tile: tuple[int, int], runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
    """`codec.write_amax`."""
    for table in tables_of(tile, runs, values.device):
        _launch(
            "amax_tiles", table, _as_int16(values), out, table.rows, table.piece_of, TYPE=_TYPES[values.dtype]
        )


def quantize(
    tile: tuple[int, int],
    coder: Any,  # a `codec.Coder`
    runs: Runs,
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    noise: Noise | None,
) -> None:
    """`BlockFormat.quantize`."""
    first, second = (0, 0) if noise is None else map(signed, noise.keys())
    for table in tables_of(tile, runs, values.device):
        _launch(
            "quantize_tiles", table,
            _as_int16(values), codes, scales, table.rows, table.piece_of, first, second,
            TYPE=_TYPES[values.dtype], CODE=coder.code, TOP=coder.top, POW2=coder.pow2,
            RANDOM=noise is not None,
        )  # fmt: skip


def sum_ranks(
    tile: tuple[int, int],
    coder: Any,  # a `codec.Coder`
    runs: Runs,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`BlockFormat.sum`, or `BlockFormat.dequantize` where there is one rank; codes and scales are (ranks, n)."""
    ranks, stride = codes.shape
    for table in tables_of(tile, runs, out.device):
        if ranks > 1 and stride % 16:
            table = replace(table, constants={**table.constants, "VECTOR": False})
        _launch(
            "sum_tiles", table,
            codes, scales, _as_int16(out), table.rows, table.piece_of, stride, scales.shape[1],
            TYPE=_TYPES[out.dtype], CODE=coder.code, RANKS=ranks,
        )  # fmt: skip


def write_pairs(
    size: int,
    group: int,
    middles: torch.Tensor,
    runs: Runs,
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """`BlockFormat.quantize` of four bits: `group` blocks of `size` in a row share an amax, which is in the scales."""
    constants = pair_constants(size)
    each = constants["BLOCKS"]
    for table in _flat_tables(size, runs, values.device, item=size, unit=16, each=each, constants=constants):
        _launch(
            "write_pairs", table,
            _as_int16(values), codes, scales, middles, table.rows, table.piece_of,
            MIDDLES=len(middles), GROUP=group, TYPE=_TYPES[values.dtype],
        )  # fmt: skip


def read_pairs(
    size: int,
    group: int,
    levels: torch.Tensor,
    runs: Runs,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`BlockFormat.dequantize` of four bits; `size` and `group` as in `write_pairs`."""
    constants = {"PAIRS": PAIRS, "num_warps": 4}
    for table in _flat_tables(size, runs, out.device, item=2, unit=2, each=PAIRS, constants=constants):
        _launch(
            "read_pairs", table,
            codes, scales, _as_int16(out), levels, table.rows, table.piece_of,
            SIZE=size, GROUP=group, TYPE=_TYPES[out.dtype],
        )  # fmt: skip


def pair_constants(size: int) -> dict[str, Any]:
    """Compile-time constants of `write_pairs`, and warps a program."""
    span = _span(size)
    blocks = min(_WRITTEN // span, 128)  # a thread has one block, or a part of one
    return {"SIZE": size, "SPAN": span, "BLOCKS": blocks, "num_warps": 4}


def _flat_tables(
    size: int,
    runs: Runs,
    device: torch.device,
    *,
    item: int,
    unit: int,
    each: int,
    constants: dict[str, Any],
) -> list[Table]:
    """Tables of runs of rows of items: one for runs that are aligned to 16 elements, one for the others.

    Kept by a `RunList`.

    Args:
        size: elements of a block.
        item: elements of an item.
        unit: columns that are multiples of it are aligned to 16 elements.
        each: items that a program does.
        constants: compile-time constants of the kernel.
    """
    kept = runs.tables if isinstance(runs, RunList) else {}
    key = (device, unit)
    if key not in kept:
        by_access: dict[tuple[bool, int], list[RowRun]] = {}
        for run in runs:
            vector = run.grid.columns % unit == run.values % 16 == 0
            by_access.setdefault((vector, _code_unit(run, size) if vector else 1), []).append(run)
        tables = []
        for (vector, code_unit), same in by_access.items():
            counts = [(run.stop - run.start) * -(-run.grid.columns // item) for run in same]
            fixed = {**constants, "VECTOR": vector, "UNIT": code_unit}
            tables += _flat_table(same, counts, each, fixed, device)
        kept[key] = tables
    return list(kept[key])


def _code_unit(run: RowRun, size: int) -> int:
    """Bytes of four-bit codes in one access: they divide the bytes and the offset of a row's codes and scales."""
    sizes = (-(-run.grid.columns // 2), -(-run.grid.columns // size), run.codes)
    return next(unit for unit in (8, 4, 1) if not any(size % unit for size in sizes))


def _flat_table(
    runs: Runs,
    counts: list[int],
    each: int,
    constants: dict[str, Any],
    device: torch.device,
) -> list[Table]:
    """A table of runs by their numbers of items, of which a program does `each`; None without runs."""
    rows: list[list[int]] = []
    piece_of, program = [], 0
    for run, count in zip(runs, counts, strict=True):
        if count == 0:
            continue
        programs = -(-count // each)
        piece_of.append(torch.full((programs,), len(rows), dtype=torch.int32))
        rows.append([run.values, run.codes, run.scales, run.grid.columns, count, program])
        program += programs
    if not rows:
        return []
    return [
        Table(torch.tensor(rows, dtype=torch.int64).to(device), torch.cat(piece_of).to(device), constants)
    ]
