"""Coefficient sets for Newton-Schulz, by name. One step maps each singular value x to ``a x + b x^3 + c x^5``.

    name             steps    singular values of a Gaussian matrix    from
    ---------------  -------  ------------------------------------    ------------------------------------------
    keller           any (5)  0.7 .. 1.2                              Jordan's post on Muon; torch.optim.Muon
    quintic          5        0.98 .. 1.03                            You Jiacheng's five tuned steps
    polar_express    any (5)  0.85 .. 1.14                            arXiv 2505.16932, with its safety factor
    deepseek_v4      10 +     1.00 .. 1.00                            eight of keller's, then (2, -1.5, 0.5)

A custom set is a list of triples, or one triple for every step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

Triple = tuple[float, float, float]
# A name, triples, or one triple for every step.
Coefficients = str | Sequence[Sequence[float]] | Sequence[float]

KELLER: Triple = (3.4445, -4.7750, 2.0315)
_QUINTIC: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Each is the minimax step after those before it; from the eighth on they are the last one.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = (
    1.01  # keeps rounding in bf16 from pushing singular values out of the interval that a step was made for
)


@dataclass(frozen=True)
class Polynomials:
    """The polynomials of one orthogonalisation, in order. The matrix is divided by its Frobenius norm before the first.

    Attributes:
        steps: a triple (a, b, c) for each step.
    """

    steps: tuple[Triple, ...]

    def __call__(self, x: float) -> float:
        """The result for a singular value ``x`` in exact arithmetic."""
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
        steps: number of steps. Defaults to that of the set (5; 10 for deepseek_v4, a custom list's length).

    Raises:
        ValueError: an unknown name, a step count that the set does not have, triples that are none.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100):
        raise ValueError(f"ns_steps is {steps!r}: expected None or an integer from 1 to 99")
    if not isinstance(coefficients, str):
        return _custom(coefficients, steps)
    return _named(coefficients, steps)


def polar_express(steps: int = 5) -> tuple[Triple, ...]:
    """Polar Express, for singular values in [0.001, 1]. Amsel et al., arXiv 2505.16932."""
    *early, last = _POLAR_EXPRESS
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in early]
    return tuple(safe[:steps]) + (last,) * (steps - len(safe))


@lru_cache(maxsize=256)
def _named(name: str, steps: int | None) -> Polynomials:
    if name == "keller":
        return Polynomials((KELLER,) * (steps or 5))
    if name == "polar_express":
        return Polynomials(polar_express(steps or 5))
    if name == "deepseek_v4":
        return Polynomials((KELLER,) * 8 + ((2.0, -1.5, 0.5),) * (_at_least(name, 10, steps) - 8))
    if name == "quintic":
        return Polynomials(_exactly(name, _QUINTIC, steps))
    raise ValueError(
        f"coefficients {name!r} are not known: use one of {', '.join(NAMES)}, or a list of triples"
    )


NAMES = ("keller", "quintic", "polar_express", "deepseek_v4")


def _custom(numbers: Sequence[Sequence[float]] | Sequence[float], steps: int | None) -> Polynomials:
    # One triple is torch.optim.Muon's ns_coefficients: the same polynomial in each of the steps.
    single = [x for x in numbers if isinstance(x, (int, float)) and not isinstance(x, bool)]
    triples = [single] * (steps or 5) if len(single) == len(numbers) == 3 else numbers
    try:
        result = tuple(_triple(triple) for triple in triples)
    except (TypeError, ValueError):
        result = ()
    if not result or not all(math.isfinite(x) for triple in result for x in triple):
        raise ValueError(f"coefficients {numbers!r}: expected a list of triples (a, b, c) of finite numbers")
    return Polynomials(_exactly("custom", result, steps))


def _triple(numbers: Sequence[float] | float) -> Triple:
    if isinstance(numbers, (int, float)):
        raise TypeError(numbers)
    a, b, c = numbers
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
