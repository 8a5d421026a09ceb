"""Muon's momentum in other dtypes than the gradient's: cast, or int8 with a scale for each 256 columns of a row.

    momentum_dtype      state                                            bytes a parameter
    ------------------  -----------------------------------------------  -----------------
    None                momentum_buffer, as the parameter                4 (fp32)
    bfloat16, float32   momentum_buffer in it                            2, 4
    int8                momentum_buffer int8; momentum_scale fp32,       1 + 4/256
                        shape (.., rows, ceil(columns / 256))

The int8 map is linear, q = round(127 m / max|m|) in each block: orthogonalisation divides by no small number, so a
map with finer steps near zero, as Adam's second moment needs it, buys Muon nothing (arXiv 2509.23106). Blocks lie
within rows of the tensor, so they do not depend on the number of ranks, as long as no rank's elements end inside a row.
"""

import torch

BLOCK = 256
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.int8)
_TINY = 1e-30


def scale_columns(columns: int) -> int:
    """Scales of a row."""
    return -(-columns // BLOCK)


def encode(values: torch.Tensor, buffer: torch.Tensor, scale: torch.Tensor | None, columns: int) -> None:
    """Store 1-D values of whole rows in a buffer. Overwrites ``values``. Allocates nothing."""
    if scale is None:
        buffer.copy_(values)
        return
    for block, codes, factors in _blocks(values, buffer, scale, columns):
        torch.linalg.vector_norm(block, ord=float("inf"), dim=-1, out=factors)
        factors.div_(127).clamp_(min=_TINY)
        codes.copy_(block.div_(factors.unsqueeze(-1)).round_())


def decode(
    buffer: torch.Tensor, scale: torch.Tensor | None, columns: int, into: torch.Tensor
) -> torch.Tensor:
    """Read back 1-D values of whole rows, into a tensor of their number. Allocates nothing."""
    into.copy_(buffer)
    if scale is not None:
        for block, _, factors in _blocks(into, buffer, scale, columns):
            block.mul_(factors.unsqueeze(-1))
    return into


def _blocks(
    values: torch.Tensor, buffer: torch.Tensor, scale: torch.Tensor, columns: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views: (rows, blocks, columns of a block) of values and codes with (rows, blocks) of scales.

    The short blocks at the ends of rows are the second entry.
    """
    rows, codes = values.view(-1, columns), buffer.view(-1, columns)
    factors = scale.view(-1, scale_columns(columns))
    whole = columns // BLOCK
    found = []
    for low, high, first, last in ((0, whole * BLOCK, 0, whole), (whole * BLOCK, columns, whole, None)):
        if high > low and rows.numel():
            shape = (-1, BLOCK) if low == 0 and whole else (1, high - low)
            found.append(
                (
                    rows[:, low:high].unflatten(1, shape),
                    codes[:, low:high].unflatten(1, shape),
                    factors[:, first:last],
                )
            )
    return found
