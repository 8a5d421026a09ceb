"""Newton-Schulz: the polar factor of a matrix by matrix products alone, without allocating once warm.

    method      computes, for X of s x l (transposed so that s <= l)            FLOPs, 5 steps
    ----------  --------------------------------------------------------------  ----------------------
    standard    each step: G = X X', X = a X + (b G + c G G) X        bf16      20 s s l + 10 s s s
    gram        the same polynomials on R = X X' alone, Q gathers
                the factors, X = Q X at a restart and at the end      fp16      8 s s l + 28 s s s

Standard repeats torch.optim.Muon's operations one by one (norm after the cast to bf16, transpose, addmm), so a
matrix gets the same bits. On a GPU several of one shape go through baddbmm, which saves launches and agrees within
bf16 roundings (2e-2); on a CPU that would save nothing, so there they are computed one by one. Gram Newton-Schulz
loses precision in R quickly: it runs in fp16 (fp32 on CPU) and restarts from X after step 2 and every third step
from there; in bf16, or without restarts, it diverges.

A result is checked (finite, and no larger than the polynomials can make it) and, where it fails, done again by a safer
method: gram -> standard -> fp32 with a prior scaling. Where all fail it is zero: the matrix stays as it is.
"""

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from block_optim.core import device as devices
from block_optim.core.options import check_choice
from block_optim.core.scratch import Scratch
from block_optim.muon.coefficients import Coefficients, Polynomials, polar_express, resolve

_log = logging.getLogger("block_optim")

Method = Literal["standard", "gram", "auto"]
METHODS = ("standard", "gram", "auto")
_AUTO_LEAST = 256  # short side below which launches, not FLOPs, are what a GPU waits for
_SLACK = 1.15  # rounding, over what exact arithmetic allows


@dataclass(frozen=True)
class Recipe:
    """Options of Newton-Schulz: polynomials, the norm's floor, the method, whether equal shapes are one batch.

    Attributes:
        batched: None takes batches on GPUs only.
    """

    polynomials: Polynomials
    eps: float = 1e-7
    method: Method = "standard"
    batched: bool | None = None

    def uses_gram(self, rows: int, columns: int, device: torch.device) -> bool:
        """Whether the Gram form is used for this shape: where it saves FLOPs; "auto" also wants a GPU and some size."""
        if self.method == "standard":
            return False
        if self.method == "auto" and (not devices.is_accelerator(device) or min(rows, columns) < _AUTO_LEAST):
            return False
        return _gram_flops(rows, columns, self.polynomials) < _standard_flops(rows, columns, self.polynomials)

    def flops(self, rows: int, columns: int, device: torch.device) -> int:
        """Floating-point operations for one matrix."""
        count = _gram_flops if self.uses_gram(rows, columns, device) else _standard_flops
        return count(rows, columns, self.polynomials)


def orthogonalize(
    matrix: torch.Tensor,
    coefficients: Coefficients = "keller",
    steps: int | None = None,
    *,
    eps: float = 1e-7,
    method: Method = "standard",
) -> torch.Tensor:
    """The approximate polar factor ``U V'`` of a matrix ``U S V'``, or of each of a stack of matrices, in bf16.

    Args:
        matrix: shape ``(rows, columns)`` or ``(n, rows, columns)``, any floating dtype; left as it is.
        coefficients: a set's name or triples.
        steps: as `Muon`'s ``ns_steps``.
        eps: the least norm that is divided by.
        method: "standard", "gram" (where it saves FLOPs), or "auto" (that, on a GPU, for matrices of some size).

    Raises:
        ValueError: another number of dimensions, an unknown set or method.
    """
    if matrix.ndim not in (2, 3):
        raise ValueError(
            f"orthogonalize takes one matrix or a stack of them, got shape {tuple(matrix.shape)}"
        )
    check_choice("method", method, METHODS)
    recipe = Recipe(resolve(coefficients, steps), eps, method)
    stack = matrix.detach().to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
    orthogonalize_(stack if matrix.ndim == 3 else stack[None], recipe, Scratch(matrix.device))
    return stack


def orthogonalize_(stack: torch.Tensor, recipe: Recipe, scratch: Scratch) -> int | torch.Tensor:
    """Replace each of a contiguous bf16 stack ``(n, rows, columns)`` by its polar factor; how many fell back.

    Results are checked on CPU, and wherever the Gram form was used. The host does not wait for a device to say so: what
    failed there is zero, and the answer is a mask ``(n,)`` of it, for the next time.
    """
    n, rows, columns = stack.shape
    if not stack.numel():
        return 0
    batched = devices.is_accelerator(stack.device) if recipe.batched is None else recipe.batched
    if n > 1 and not batched:
        results = [orthogonalize_(stack[k : k + 1], recipe, scratch) for k in range(n)]
        masks = [mask for mask in results if isinstance(mask, torch.Tensor)]
        return torch.cat(masks) if masks else sum(count for count in results if isinstance(count, int))
    gram = recipe.uses_gram(rows, columns, stack.device)
    result, norms = (_gram if gram else _standard)(stack, recipe, scratch)
    bad: list[int] = []
    if gram or not devices.runs_ahead(stack.device):
        limit = _SLACK * math.sqrt(min(rows, columns)) * recipe.polynomials.ceiling
        sizes = torch.linalg.vector_norm(
            result, dim=(-2, -1), dtype=torch.float32, out=scratch.take("size", (n,), torch.float32)
        )
        if devices.runs_ahead(stack.device):
            failed: torch.Tensor = ~((sizes <= limit) & norms.view(-1).isfinite())
            stack.copy_(result).masked_fill_(failed[:, None, None], 0)
            return failed
        pairs = zip(sizes.tolist(), norms.view(-1).tolist(), strict=True)
        bad = [i for i, (size, norm) in enumerate(pairs) if not size <= limit or not math.isfinite(norm)]
    # From the inputs, which the stack still holds.
    rescued = {i: _rescue(stack[i], recipe, gram) for i in bad}
    stack.copy_(result)
    for i, matrix in rescued.items():
        stack[i].copy_(matrix)
    return len(bad)


def _standard(stack: torch.Tensor, recipe: Recipe, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """The results, in scratch and in the stack's orientation, and the norms. The stack is left as it is."""
    n, rows, columns = stack.shape
    dtype, short, long = stack.dtype, min(rows, columns), max(rows, columns)
    if n == 1:  # two dimensions and a 0-d norm, as torch.optim.Muon has them
        stack = stack[0]
    batch = stack.shape[:-2]
    norm = scratch.take("norm", (*batch, 1, 1) if batch else (), dtype)
    normed = scratch.take("a", tuple(stack.shape), dtype)
    x = stack.mT if rows > columns else stack
    if batch:
        torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, out=norm)
    else:
        torch.linalg.vector_norm(x, out=norm)
    torch.div(stack, norm.clamp_(min=recipe.eps), out=normed)
    x = normed.mT if rows > columns else normed
    spare = scratch.take("b", (*batch, short, long), dtype), scratch.take("a", (*batch, short, long), dtype)
    g = scratch.take("gram", (*batch, short, short), dtype)
    u = scratch.take("update", (*batch, short, short), dtype)
    product, fused = (torch.bmm, torch.baddbmm) if batch else (torch.mm, torch.addmm)
    for i, (a, b, c) in enumerate(recipe.polynomials.steps):
        product(x, x.mT, out=g)
        target = spare[i % 2]
        if c:
            fused(g, g, g, beta=b, alpha=c, out=u)
            fused(x, u, x, beta=a, out=target)
        else:
            fused(x, g, x, beta=a, alpha=b, out=target)
        x = target
    result = x.mT if rows > columns else x
    return result.view(n, rows, columns) if batch else result[None], norm


def _gram(stack: torch.Tensor, recipe: Recipe, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps of `_standard` on the Gram matrix, in fp16 (fp32 on CPU)."""
    n, rows, columns = stack.shape
    dtype = gram_dtype(stack.device)
    short, long = min(rows, columns), max(rows, columns)
    norm = scratch.take("norm", (n, 1, 1), torch.float32)
    torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True, dtype=torch.float32, out=norm)
    x = scratch.take("a", (n, rows, columns), dtype)
    torch.div(stack, norm.clamp_(min=recipe.eps), out=x)
    spare = scratch.take("b", (n, short, long), dtype), scratch.take("a", (n, short, long), dtype)
    x = x.mT if rows > columns else x
    r, z, q, t = (scratch.take(name, (n, short, short), dtype) for name in ("gram", "update", "q", "t"))
    steps, first = recipe.polynomials.steps, 0
    for i, last in enumerate(restarts(len(steps))):
        torch.bmm(x, x.mT, out=r)
        for k in range(first, last):
            a, b, c = steps[k]
            torch.baddbmm(r, r, r, beta=b, alpha=c, out=z) if c else torch.mul(r, b, out=z)
            z.diagonal(dim1=-2, dim2=-1).add_(a)  # z: this step's factor; all factors are polynomials of r
            if k == first:
                q.copy_(z)
            else:
                torch.bmm(z, q, out=t)
                q, t = t, q
            if k + 1 < last:
                torch.bmm(z, r, out=t)
                torch.bmm(t, z, out=r)
        target = spare[i % 2]
        torch.bmm(q, x, out=target)
        x, first = target, last
    return (x.mT if rows > columns else x), norm


def gram_dtype(device: torch.device) -> torch.dtype:
    """Dtype of the Gram form: fp16 on GPUs, fp32 where fp16 products are slow."""
    return torch.float16 if devices.is_accelerator(device) else torch.float32


def _rescue(matrix: torch.Tensor, recipe: Recipe, was_gram: bool) -> torch.Tensor:
    """One matrix again, by a safer method than the one that failed; zeros where none helps. Allocates."""
    limit = _SLACK * math.sqrt(min(matrix.shape))
    if was_gram:
        scratch = Scratch(matrix.device)
        result, norm = _standard(matrix[None], recipe, scratch)
        size = float(torch.linalg.vector_norm(result, dtype=torch.float32))
        if size <= limit * recipe.polynomials.ceiling and math.isfinite(float(norm)):
            _log.warning(
                "Gram Newton-Schulz of a %s matrix failed its check; done again as standard", _size(matrix)
            )
            return result[0]
    x = matrix.float()
    x = x / x.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    x = x / x.norm().clamp(min=torch.finfo(torch.float32).tiny)
    x = x.mT if x.size(0) > x.size(1) else x
    safest = Polynomials(polar_express(8))
    for a, b, c in safest.steps:
        g = x @ x.mT
        x = torch.addmm(x, torch.addmm(g, g, g, beta=b, alpha=c), x, beta=a)
    x = x.mT if matrix.size(0) > matrix.size(1) else x
    if float(x.norm()) <= limit * safest.ceiling:
        _log.warning(
            "Newton-Schulz of a %s matrix failed its check; done again in fp32, scaled first", _size(matrix)
        )
        return x
    _log.warning(
        "Newton-Schulz of a %s matrix failed in every method; the matrix is left as it is", _size(matrix)
    )
    return torch.zeros_like(matrix)


def _size(matrix: torch.Tensor) -> str:
    return f"{matrix.size(0)}x{matrix.size(1)}"


@lru_cache(maxsize=128)
def restarts(steps: int) -> tuple[int, ...]:
    """After which steps the Gram form computes X and restarts: 2, then every third, and the last."""
    return (*range(2, steps, 3), steps)


@lru_cache(maxsize=4096)
def _standard_flops(rows: int, columns: int, polynomials: Polynomials) -> int:
    short, long = min(rows, columns), max(rows, columns)
    return sum(4 * short * short * long + (2 * short**3 if c else 0) for _, _, c in polynomials.steps)


@lru_cache(maxsize=4096)
def _gram_flops(rows: int, columns: int, polynomials: Polynomials) -> int:
    short, long = min(rows, columns), max(rows, columns)
    total, first = 0, 0
    for last in restarts(len(polynomials.steps)):
        total += 4 * short * short * long  # the Gram matrix, and Q X
        squares = sum(1 for _, _, c in polynomials.steps[first:last] if c)
        total += 2 * short**3 * (squares + 3 * (last - first - 1))  # each factor, Q, and P R P between steps
        first = last
    return total
