"""Newton-Schulz: the polar factor of a matrix by matrix products alone, without allocating once warm.

For X of s x l (transposed so that s <= l), divided by its Frobenius norm, each step maps every singular value x to
``a x + b x^3 + c x^5``, in bf16:

    G = X X'      X = a X + (b G + c G G) X        5 steps: 20 s s l + 10 s s s FLOPs

These are torch.optim.Muon's operations one by one (norm after the cast to bf16, transpose, addmm), so a matrix gets the
same bits.

    coefficients     steps    singular values of a Gaussian matrix    from
    ---------------  -------  ------------------------------------    ------------------------------------------
    keller           any (5)  0.7 .. 1.2                              Jordan's post on Muon; torch.optim.Muon
    quintic          5        0.98 .. 1.03                            You Jiacheng's five tuned steps
    polar_express    5        0.85 .. 1.14                            arXiv 2505.16932, with its safety factor
    deepseek_v4      10       1.00 .. 1.00                            eight of keller's, then (2, -1.5, 0.5)
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from block_optim.core.scratch import Scratch

Triple = tuple[float, float, float]
# A name, triples, or one triple for every step.
Coefficients = str | Sequence[Sequence[float]] | Sequence[float]

KELLER: Triple = (3.4445, -4.7750, 2.0315)
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY = 1.01  # rounding in bf16 then pushes no singular value out of the interval that a step was made for
SETS: dict[str, tuple[Triple, ...]] = {
    "keller": (KELLER,),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
    "deepseek_v4": (KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}


def steps_of(coefficients: Coefficients, steps: int | None = None) -> tuple[Triple, ...]:
    """A triple (a, b, c) for each step.

    Coefficients are a name from the table above, a list of triples, or one triple for every step, of which 5 is the
    default. Raises ValueError for an unknown name, another number of steps than of triples, and triples that are none.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100):
        raise ValueError(f"ns_steps is {steps!r}: expected None or an integer from 1 to 99")
    if isinstance(coefficients, str):
        if coefficients not in SETS:
            raise ValueError(
                f"coefficients {coefficients!r} are not known: use one of {', '.join(SETS)}, or a list of triples"
            )
        triples = SETS[coefficients]
    else:
        triples = _triples(coefficients)
    if len(triples) == 1:
        return triples * (steps or 5)
    if steps not in (None, len(triples)):
        raise ValueError(
            f"coefficients {coefficients!r} are {len(triples)} steps that belong together, ns_steps is {steps}; leave "
            "it None, or take keller, which has any number"
        )
    return triples


def _triples(numbers: Sequence[Sequence[float]] | Sequence[float]) -> tuple[Triple, ...]:
    # One triple is torch.optim.Muon's ns_coefficients: the same polynomial in each of the steps.
    single = len(numbers) == 3 and all(isinstance(x, (int, float)) for x in numbers)
    result: list[Triple] = []
    try:
        for triple in [numbers] if single else numbers:
            a, b, c = map(float, triple)  # type: ignore[arg-type]
            result.append((a, b, c))
    except (TypeError, ValueError):
        result = []
    if not result or not all(math.isfinite(x) for triple in result for x in triple):
        raise ValueError(f"coefficients {numbers!r}: expected a list of triples (a, b, c) of finite numbers")
    return tuple(result)


def flops_of(rows: int, columns: int, steps: Sequence[Triple]) -> int:
    """Floating-point operations for one matrix."""
    short, long = min(rows, columns), max(rows, columns)
    return sum(4 * short * short * long + (2 * short**3 if c else 0) for _, _, c in steps)


def orthogonalize(
    matrix: Tensor, coefficients: Coefficients = "keller", steps: int | None = None, *, eps: float = 1e-7
) -> Tensor:
    """The approximate polar factor ``U V'`` of a matrix ``U S V'``, in bf16; the matrix is left as it is."""
    result = matrix.detach().to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
    orthogonalize_(result, steps_of(coefficients, steps), eps, Scratch(matrix.device))
    return result


def orthogonalize_(matrix: Tensor, steps: Sequence[Triple], eps: float, scratch: Scratch) -> Tensor:
    """Replace a contiguous bf16 matrix (rows, columns) by its polar factor, and return it."""
    if not matrix.numel():
        return matrix
    rows, columns = matrix.shape
    short, long, tall = min(rows, columns), max(rows, columns), rows > columns
    norm = scratch.take("norm", (), matrix.dtype)
    normed = scratch.take("a", (rows, columns), matrix.dtype)
    torch.linalg.vector_norm(matrix.mT if tall else matrix, out=norm)
    torch.div(matrix, norm.clamp_(min=eps), out=normed)
    x = normed.mT if tall else normed
    spare = [scratch.take(name, (short, long), matrix.dtype) for name in ("b", "a")]
    g, u = (scratch.take(name, (short, short), matrix.dtype) for name in ("gram", "update"))
    for i, (a, b, c) in enumerate(steps):
        torch.mm(x, x.mT, out=g)
        if c:
            torch.addmm(g, g, g, beta=b, alpha=c, out=u)
            torch.addmm(x, u, x, beta=a, out=spare[i % 2])
        else:
            torch.addmm(x, g, x, beta=a, alpha=b, out=spare[i % 2])
        x = spare[i % 2]
    return matrix.copy_(x.mT if tall else x)
