"""Launches of the Triton kernel: one for all stretches that share its constants, with no wait for the device.

Stretches that kernels can read 8 or 16 bytes at a time are launched together, and the others together.

rows       a table of addresses, shapes and keys, one row a stretch, on the device; made once
scalars    a row for each class of parameters, written in each step
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from block_optim.adam.q8.ops import Rates
from block_optim.adam.q8.variants import VECTOR, Variant
from block_optim.core.rounding import base_keys
from block_optim.core.runs import Run

# Bytes to which parameters and gradients are aligned for accesses of that width; half as many for codes.
ALIGNMENT = 16

VariantOf = Callable[[bool, bool], Variant]


@dataclass(frozen=True)
class Row:
    """One stretch: its memory, its number of tiles, and its parameter."""

    param: torch.Tensor
    states: tuple[torch.Tensor, ...]  # codes and scales
    run: Run  # the run of the stretch's gradients
    start: int  # elements between the run's first one and the stretch's
    rows: int
    columns: int
    tile_columns: int
    tiles: int
    kind: int
    grad_dtype: torch.dtype
    element: int = 0  # first element in the global tensor, and
    name: str = ""  # name of the parameter, for stochastic rounding

    @property
    def aligned(self) -> bool:
        """Whether accesses of `VECTOR` elements are whole, and at multiples of their size."""
        codes = [t.data_ptr() * ALIGNMENT // VECTOR for t in self.states[:2]]
        places = [self.param.data_ptr(), *codes]
        whole = self.columns % VECTOR == 0 and self.tile_columns % VECTOR == 0
        return whole and not any(place % ALIGNMENT for place in places)

    @property
    def single(self) -> bool:
        """Whether each row of tiles has a single one."""
        return self.columns <= self.tile_columns


def scalar_table(rates: Sequence[Rates], device: torch.device) -> torch.Tensor:
    """The scalars of each class of parameters, in the order of the kernel's columns."""
    rows = [
        [1.0 if r.decay is None else r.decay, r.beta1, r.first, r.beta2, r.second, r.eps * r.root,
         r.step_size * r.root, r.beta2**0.5]
        for r in rates
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).float().to(device, non_blocking=True)


class Launch:
    """One launch over some rows of the same types, on their device even if another one is current.

    Args:
        rows: all `Row.aligned` if ``variant`` asks for that.
        variant: the kernel if gradients are at multiples of `ALIGNMENT` bytes, and
        scalar: where one does not.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        variant: Variant,
        scalar: Variant,
    ) -> None:
        self.rows = rows
        self._device = rows[0].param.device
        self._variants = variant, scalar
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._addresses: list[int] = []
        self._variant = variant

    def _make(self, per_program: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The table of rows, and the row of each program."""
        if per_program not in self._made:
            table, programs, first = [], [], 0
            for row in self.rows:
                states = [t.data_ptr() for t in row.states]
                keys = base_keys(row.name)
                place = [row.rows, row.columns, first, row.kind, row.element]
                table.append([row.param.data_ptr(), 0, *states, *place, *keys, row.tiles])
                programs.append(-(-row.tiles // per_program))
                first += programs[-1]
            row_of = torch.repeat_interleave(torch.arange(len(programs)), torch.tensor(programs))
            self._made[per_program] = (
                torch.tensor(table, dtype=torch.int64).to(self._device),
                row_of.to(torch.int32).to(self._device),
            )
        return self._made[per_program]

    def __call__(self, grads: list[torch.Tensor], rates: torch.Tensor, counts: torch.Tensor) -> None:
        """One step of all rows.

        Args:
            grads: the local gradients.
            rates: of `scalar_table`.
            counts: the step number of each class, fp32.
        """
        addresses = []
        for row in self.rows:
            first = grads[row.run.members[0]]
            addresses.append(first.data_ptr() + row.start * first.element_size())
        if addresses != self._addresses:
            self._addresses = addresses
            self._variant = self._variants[any(a % ALIGNMENT for a in addresses)]
            table, _ = self._make(self._variant.per_program)
            table[:, 1].copy_(torch.tensor(addresses), non_blocking=True)
        variant = self._variant
        table, row_of = self._make(variant.per_program)
        with torch.accelerator.device_index(self._device.index):  # Triton launches on the current one
            variant.kernel[(len(row_of),)](
                table,
                rates,
                counts,
                row_of,
                **variant.constants,
                num_warps=variant.num_warps,
                enable_fp_fusion=False,
            )


def launches_of(rows: list[Row], variant: VariantOf) -> list[Launch]:
    """The launches for rows of one kind, aligned and unaligned.

    Args:
        variant: the variant for rows that are aligned, and whose rows have a single tile.
    """
    result = []
    for aligned, single in itertools.product((True, False), repeat=2):
        chosen = [row for row in rows if (row.aligned, row.single) == (aligned, single)]
        if chosen:
            variants = variant(aligned, single), variant(False, single)
            result.append(Launch(chosen, *variants))
    return result
