"""Coefficient sets for Newton-Schulz, by name. One step maps each singular value x to ``a x + b x^3 + c x^5``.

    name             steps    singular values of a Gaussian matrix    from
    ---------------  -------  ------------------------------------    ------------------------------------------
    keller           any (5)  0.7 .. 1.2                              Jordan's post on Muon; torch.optim.Muon
    quintic          5        0.98 .. 1.03                            You Jiacheng's five tuned steps
    polar_express    any (5)  0.85 .. 1.14                            arXiv 2505.16932, computed here
    cans             5        0.88 .. 1.12                            arXiv 2506.10935, computed here
    aol              4        0.95 .. 1.02                            arXiv 2512.04632, its own normalisation
    deepseek_v4      10 +     1.00 .. 1.00                            eight of keller's, then (2, -1.5, 0.5)
    cubic            5        0.77 .. 1.30                            computed here: c = 0, two products a step

"Computed here" means: by the recursion of `minimax_steps` and `cubic_steps`, not typed in; the tests hold the
results against the published digits. keller, quintic and aol were found by numerical search and are
data. A custom set is a list of triples, or one triple for every step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

Triple = tuple[float, float, float]
# A name, triples, or one triple for every step.
Coefficients = str | Sequence[Sequence[float]] | Sequence[float]
Normalisation = Literal["frobenius", "aol"]

KELLER: Triple = (3.4445, -4.7750, 2.0315)
_CONVERGED: Triple = (15 / 8, -10 / 8, 3 / 8)  # the minimax quintic on an interval that has shrunk to {1}
_QUINTIC: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_AOL: tuple[Triple, ...] = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)
_POLAR_EXPRESS_CUSHION = 0.02407327424182761
_CONVERGED_AFTER = 7  # Polar Express's steps from the eighth on are the fixed one, which needs no safety


@dataclass(frozen=True)
class Polynomials:
    """The polynomials of one orthogonalisation, in order, and how the matrix is scaled before the first.

    Attributes:
        name: the set's name, or "custom".
        steps: a triple (a, b, c) for each step.
        normalisation: "frobenius" divides by the Frobenius norm; "aol" by the row sums of the Gram matrix's
            absolute values, which costs nothing since the first step needs the Gram matrix anyway.
    """

    name: str
    steps: tuple[Triple, ...]
    normalisation: Normalisation = "frobenius"

    def __call__(self, x: float) -> float:
        """Where a singular value of ``x`` ends in exact arithmetic."""
        for a, b, c in self.steps:
            x = a * x + b * x**3 + c * x**5
        return x

    @property
    def ceiling(self) -> float:
        """The largest singular value that can come out for inputs in [0, 1], by sampling."""
        return _ceiling(self.steps)


def resolve(coefficients: Coefficients, steps: int | None = None) -> Polynomials:
    """The polynomials that a user's choice means.

    Args:
        coefficients: a name from the table above, a list of triples, or one triple for every step.
        steps: how many; None takes what the set says (5; 4 for aol, 10 for deepseek_v4, a custom list's length).

    Raises:
        ValueError: an unknown name, a step count that the set does not have, triples that are none.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100):
        raise ValueError(f"ns_steps is {steps!r}: expected None or an integer from 1 to 99")
    if not isinstance(coefficients, str):
        return _custom(coefficients, steps)
    return _named(coefficients, steps)


def polar_express(steps: int = 5, safety: float = 1.01) -> tuple[Triple, ...]:
    """Polar Express: the greedy minimax composition for singular values in [0.001, 1], cushioned.

    Dividing x by ``safety`` inside every step keeps rounding in bf16 from pushing singular values out of the
    interval that the step was made for; 1.01 is the paper's, others use up to 1.05. Amsel et al., arXiv 2505.16932.
    """
    raw = minimax_steps(1e-3, steps, _POLAR_EXPRESS_CUSHION)
    return tuple(
        (a / safety, b / safety**3, c / safety**5) if i < _CONVERGED_AFTER else (a, b, c)
        for i, (a, b, c) in enumerate(raw)
    )


@lru_cache(maxsize=64)
def minimax_steps(lower: float, steps: int, cushion: float = 0.0) -> tuple[Triple, ...]:
    """Odd quintics whose composition brings [lower, 1] as near to 1 as any composition of odd quintics does.

    Each is the minimax approximation of 1 on the interval [1-e, 1+e] that the one before leaves. A cushion
    makes no step look below ``cushion`` times the interval's upper end, which tames the first steps' slopes; the result
    is centred on 1 again. Without it this is CANS (Grishina et al., arXiv 2506.10935), with it Polar Express.
    """
    found: list[Triple] = []
    low, high = lower, 1.0
    for _ in range(steps):
        a, b, c = _minimax_quintic(max(low, cushion * high), high)

        def p(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return a * x + b * x**3 + c * x**5

        centre = 2 / (p(low) + p(high))
        a, b, c = a * centre, b * centre, c * centre
        found.append((a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return tuple(found)


def _minimax_quintic(low: float, high: float) -> Triple:
    """The odd quintic nearest to 1 on [low, high], by Remez exchange: its error alternates at four points."""
    if low / high >= 1 - 5e-6:
        a, b, c = _CONVERGED
        return a / high, b / high**3, c / high**5
    q, r = (3 * low + high) / 4, (low + 3 * high) / 4
    previous = math.inf
    a = b = c = 0.0
    for _ in range(100):
        rows = [[x, x**3, x**5, sign] for x, sign in ((low, 1.0), (q, -1.0), (r, 1.0), (high, -1.0))]
        a, b, c, error = torch.linalg.solve(
            torch.tensor(rows, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        ).tolist()
        if abs(previous - error) <= 1e-15:
            break
        previous = error
        root = math.sqrt(9 * b * b - 20 * a * c)  # of p'(x) = a + 3 b x^2 + 5 c x^4: the two inner extremes
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return a, b, c


@lru_cache(maxsize=16)
def cubic_steps(lower: float, steps: int, ceiling: float) -> tuple[Triple, ...]:
    """Odd cubics (c = 0) whose composition brings [lower, 1] into the narrowest [x, ceiling].

    Each takes the same value at both ends of its interval, its least there, and ``ceiling`` in between.
    """
    found: list[Triple] = []
    low, high = lower, 1.0
    for _ in range(steps):
        ratio = low * low + low * high + high * high  # p(low) = p(high) wants a = -b * ratio
        a = 1.5 * ceiling / math.sqrt(ratio / 3)  # the peak is at sqrt(ratio / 3) with the value 2/3 a x
        found.append((a, -a / ratio, 0.0))
        low, high = a * low - a / ratio * low**3, ceiling
    return tuple(found)


@lru_cache(maxsize=256)
def _named(name: str, steps: int | None) -> Polynomials:
    if name == "keller":
        return Polynomials(name, (KELLER,) * (steps or 5))
    if name == "polar_express":
        return Polynomials(name, polar_express(steps or 5))
    if name == "deepseek_v4":
        return Polynomials(name, (KELLER,) * 8 + ((2.0, -1.5, 0.5),) * (_at_least(name, 10, steps) - 8))
    if name == "quintic":
        return Polynomials(name, _exactly(name, _QUINTIC, steps))
    if name == "cans":
        return Polynomials(name, _exactly(name, minimax_steps(1e-3, 5), steps))
    if name == "aol":
        return Polynomials(name, _exactly(name, _AOL, steps), "aol")
    if name == "cubic":
        return Polynomials(name, _exactly(name, cubic_steps(0.007, 5, 1.3), steps))
    raise ValueError(
        f"coefficients {name!r} are not known: use one of {', '.join(NAMES)}, or a list of triples"
    )


NAMES = ("keller", "quintic", "polar_express", "cans", "aol", "deepseek_v4", "cubic")


def _custom(given: Sequence[Sequence[float]] | Sequence[float], steps: int | None) -> Polynomials:
    # One triple is torch.optim.Muon's ns_coefficients: the same polynomial in each of the steps.
    one = [x for x in given if isinstance(x, (int, float)) and not isinstance(x, bool)]
    triples = [one] * (steps or 5) if len(one) == len(given) == 3 else given
    try:
        found = tuple(_triple(triple) for triple in triples)
    except (TypeError, ValueError):
        found = ()
    if not found or not all(math.isfinite(x) for triple in found for x in triple):
        raise ValueError(f"coefficients {given!r}: expected a list of triples (a, b, c) of finite numbers")
    return Polynomials("custom", _exactly("custom", found, steps))


def _triple(given: Sequence[float] | float) -> Triple:
    if isinstance(given, (int, float)):
        raise TypeError(given)
    a, b, c = given
    return float(a), float(b), float(c)


def _exactly(name: str, triples: tuple[Triple, ...], steps: int | None) -> tuple[Triple, ...]:
    if steps is not None and steps != len(triples):
        raise ValueError(
            f"coefficients {name!r} are {len(triples)} steps that belong together, ns_steps is {steps}; leave it None, "
            "or take keller or polar_express, which have any number"
        )
    return triples


def _at_least(name: str, least: int, steps: int | None) -> int:
    if steps is not None and steps < least:
        raise ValueError(f"coefficients {name!r} need at least {least} steps, ns_steps is {steps}")
    return steps or least


@lru_cache(maxsize=256)
def _ceiling(steps: tuple[Triple, ...]) -> float:
    x = torch.cat([torch.logspace(-8, 0, 20001, dtype=torch.float64), torch.linspace(0, 1, 20001).double()])
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    return float(x.abs().max())
