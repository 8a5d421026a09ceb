"""Constants, sizes of programs and numbers of warps of the Triton kernel for fp32 moments.

A thread works on 16 elements. Rows whose addresses or widths are not multiples of 8 elements (`Row.aligned`) get
kernels of scalar accesses, with 4 elements a thread. The kernel for 8-bit moments has `q8.variants`. What these choices
compile to is shown by `python -m bench kernels`.
"""

from dataclasses import dataclass
from typing import Any

import torch

VECTOR = 8  # elements of an access: 8 bytes of codes, 16 of bf16, twice 16 of fp32
WARP = 32
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
    """A kernel with its constants.

    Attributes:
        per_program: tiles (of runs: elements) that one program works on.
        elements: elements of one program, with the padding of tiles whose sides are no powers of two.
        pieces: number of times that it runs through its loops.
    """

    kernel: Any  # a function that Triton compiles
    constants: dict[str, Any]
    num_warps: int
    per_program: int
    elements: int
    pieces: int = 1


def wide_variant(types: Types, aligned: bool, single: bool = False) -> Variant:
    """Variant for parameters with fp32 moments, the same whether or not rows have a ``single`` tile."""
    from block_optim.adam import kernels_triton

    block = 4 * WARP * elements_of_thread(aligned)
    constants = {"BLOCK": block, "VECTOR": VECTOR if aligned else 1, **types.constants}
    return Variant(kernels_triton.wide_adamw, constants, 4, block, block)


def elements_of_thread(aligned: bool) -> int:
    """Number of elements that a thread works on at once."""
    return 2 * VECTOR if aligned else 4
