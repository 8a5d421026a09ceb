"""Launches of the Triton kernel: one for all stretches that share its constants, with no wait for the device.

Stretches that kernels can read 8 or 16 bytes at a time are launched together, and the others together.

rows       a table of addresses, shapes and keys, one row a stretch, on the device; made once
scalars    a row for each class of parameters, written in each step
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from block_optim.adam.q8.ops import Rates, TileTensors
from block_optim.adam.q8.variants import VECTOR, Variant
from block_optim.core.rounding import base_keys
from block_optim.core.runs import Run
from block_optim.core.tiles import Stretch

# Bytes to which parameters and gradients are aligned for accesses of that width; half as many for codes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Row:
    """One stretch: its memory, the run of its gradients, and its class."""

    tensors: TileTensors
    stretch: Stretch
    run: Run
    kind: int

    @property
    def aligned(self) -> bool:
        """Whether accesses of `VECTOR` elements are whole, and at multiples of their size."""
        codes = [t.data_ptr() * ALIGNMENT // VECTOR for t in self.tensors.codes]
        places = [self.tensors.param.data_ptr(), *codes]
        whole = self.stretch.columns % VECTOR == 0 and self.stretch.tile[1] % VECTOR == 0
        return whole and not any(place % ALIGNMENT for place in places)

    @property
    def single(self) -> bool:
        """Whether each row of tiles has a single one."""
        return self.stretch.columns <= self.stretch.tile[1]


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

    Of the variants the first runs if all gradients are at multiples of `ALIGNMENT` bytes; it may need `Row.aligned`.
    """

    def __init__(self, rows: Sequence[Row], variants: tuple[Variant, Variant]) -> None:
        self.rows = rows
        self._device = rows[0].tensors.param.device
        self._variants = variants
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._addresses: list[int] = []
        self._variant = variants[0]

    def _make(self, per_program: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The table of rows, and the row of each program."""
        if per_program not in self._made:
            table, programs, first = [], [], 0
            for row in self.rows:
                t, s = row.tensors, row.stretch
                states = [state.data_ptr() for state in (*t.codes, *t.scales)]
                place = [s.rows, s.columns, first, row.kind, t.first_element]
                table.append([t.param.data_ptr(), 0, *states, *place, *base_keys(t.name), s.num_scales])
                programs.append(-(-s.num_scales // per_program))
                first += programs[-1]
            row_of = torch.repeat_interleave(torch.arange(len(programs)), torch.tensor(programs))
            self._made[per_program] = (
                torch.tensor(table, dtype=torch.int64).to(self._device),
                row_of.to(torch.int32).to(self._device),
            )
        return self._made[per_program]

    def __call__(self, grads: list[torch.Tensor], rates: torch.Tensor, counts: torch.Tensor) -> None:
        """One step of all rows by their local gradients, `scalar_table` and the fp32 step number of each class."""
        addresses = []
        for row in self.rows:
            first = grads[row.run.members[0]]
            addresses.append(first.data_ptr() + row.stretch.start * first.element_size())
        if addresses != self._addresses:
            self._addresses = addresses
            self._variant = self._variants[any(a % ALIGNMENT for a in addresses)]
            table, _ = self._make(self._variant.per_program)
            table[:, 1].copy_(torch.tensor(addresses), non_blocking=True)
        variant = self._variant
        table, row_of = self._make(variant.per_program)
        options = {**variant.constants, "num_warps": variant.num_warps, "enable_fp_fusion": False}
        with torch.accelerator.device_index(self._device.index):  # Triton launches on the current one
            variant.kernel[(len(row_of),)](table, rates, counts, row_of, **options)
