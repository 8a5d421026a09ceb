"""Launches of the Triton kernels: one for all stretches that share a kernel's constants, with no wait for the device.

rows       a table of addresses, shapes and keys, one row a stretch, on the device; made once
scalars    a row for each class of parameters, worked out on the device from step counts that live there
flag       whether to skip, on the device too
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim.adam.scalars import Hyper
from block_optim.core.rounding import base_keys
from block_optim.core.runs import Run

WIDE_BLOCK = 1024
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def has_kernels(device: torch.device) -> bool:
    """Whether Triton works on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Row:
    """One stretch: where it is, how many programs it takes, and whose it is."""

    param: torch.Tensor
    states: tuple[torch.Tensor, ...]  # codes and scales, or moments
    run: Run  # in whose gradients it lies,
    start: int  # so many elements from the first member's first
    rows: int
    columns: int
    programs: int
    kind: int
    grad_dtype: torch.dtype
    element: int = 0  # its first in the global tensor, and
    name: str = ""  # the parameter's, for stochastic rounding


class Scalars:
    """The table of scalars, on the device."""

    def __init__(self, device: torch.device, kinds: int) -> None:
        self._device = device
        self.counts = torch.zeros(kinds, dtype=torch.float32, device=device)
        self.rates = torch.zeros(kinds, 8, dtype=torch.float32, device=device)
        self._options: torch.Tensor | None = None
        self._seen: list[Hyper] | None = None

    def update(self, hypers: list[Hyper], counters: list[torch.Tensor]) -> None:
        """Fill the table for the counts, which are 0-d and on the device."""
        torch.stack(counters, out=self.counts)
        if hypers != self._seen:
            rows = [[*_fixed(h), h.beta1, h.beta2, h.lr, float(h.lr_in_fp32)] for h in hypers]
            self._options = torch.tensor(rows, dtype=torch.float64).to(self._device, non_blocking=True)
            self.rates[:, :6].copy_(self._options[:, :6])
            self._seen = list(hypers)
        assert self._options is not None
        beta1, beta2, lr, narrow = self._options[:, 6:].unbind(1)
        counts = self.counts.double()
        correction = 1 - beta1**counts
        step_size = torch.where(narrow > 0, (lr.float() / correction.float()).double(), lr / correction)
        self.rates[:, 6].copy_(step_size)
        self.rates[:, 7].copy_((1 - beta2**counts).sqrt())


def _fixed(hyper: Hyper) -> tuple[float, ...]:
    """The scalars that do not depend on the count, in the kernels' order."""
    r = hyper.rates(1)
    first = -r.first if hyper.maximize else r.first
    return (1.0 if r.decay is None else r.decay, r.beta1, first, r.beta2, r.second, r.eps)


class Launch:
    """One launch over some rows of the same types."""

    def __init__(
        self,
        kernel: Any,  # a function that Triton compiles
        rows: Sequence[Row],
        seed: int | None,
        tables: Sequence[torch.Tensor],
        constants: dict[str, Any],
    ) -> None:
        self.rows = rows
        device = rows[0].param.device
        table, stretch_of, program = [], [], 0
        for i, row in enumerate(rows):
            states = [t.data_ptr() for t in row.states] + [0] * (4 - len(row.states))
            keys = base_keys(seed or 0, row.name)
            addresses = [row.param.data_ptr(), 0, *states]
            table.append([*addresses, row.rows, row.columns, program, row.kind, row.element, *keys, 0])
            stretch_of += [i] * row.programs
            program += row.programs
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._stretch_of = torch.tensor(stretch_of, dtype=torch.int32, device=device)
        self._no_flag = torch.zeros((), dtype=torch.float32, device=device)
        self._addresses: list[int] = []
        self._programs = program
        self._tables = tables
        self._constants = {
            **constants,
            "PARAM_TYPE": _TYPES[rows[0].param.dtype],
            "GRAD_TYPE": _TYPES[rows[0].grad_dtype],
            "ROUND": seed is not None and rows[0].param.dtype == torch.bfloat16,
        }
        self._kernel = kernel

    def __call__(self, grads: list[torch.Tensor], scalars: Scalars, flag: torch.Tensor | None) -> None:
        """One step of all rows; nothing is written where ``flag`` is not 0."""
        addresses = []
        for row in self.rows:
            first = grads[row.run.members[0]]
            addresses.append(first.data_ptr() + row.start * first.element_size())
        if addresses != self._addresses:
            self._addresses = addresses
            self._table[:, 1].copy_(torch.tensor(addresses), non_blocking=True)
        self._kernel[(self._programs,)](
            self._table,
            scalars.rates,
            scalars.counts,
            self._stretch_of,
            self._no_flag if flag is None else flag,
            *self._tables,
            **self._constants,
            enable_fp_fusion=False,
        )


def wide_launch(rows: list[Row], seed: int | None) -> Launch:
    """The launch for parameters with fp32 moments."""
    from block_optim.adam import kernels_triton

    return Launch(kernels_triton.wide_adamw, rows, seed, [], {"BLOCK": WIDE_BLOCK})
