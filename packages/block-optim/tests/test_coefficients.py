import math

import pytest
import torch

from block_optim.muon.coefficients import KELLER, NAMES, Polynomials, polar_express, resolve


def singular_values(polynomials, shape, seed=0):
    """Of a Gaussian matrix after the steps, in exact enough arithmetic."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x / x.norm()
    return torch.tensor([polynomials(value) for value in torch.linalg.svdvals(x).tolist()])


def minimax_quintic(low, high):
    """The odd quintic nearest to 1 on [low, high], by Remez exchange: its error alternates at four points."""
    q, r = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(100):
        rows = [[x, x**3, x**5, sign] for x, sign in ((low, 1.0), (q, -1.0), (r, 1.0), (high, -1.0))]
        ones = torch.ones(4, dtype=torch.float64)
        a, b, c, _error = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), ones).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)  # of p'(x): the two inner extremes
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return a, b, c


def test_polar_express_has_the_minimax_steps_of_its_paper_with_the_safety_factor():
    low, high, cushion, safety = 1e-3, 1.0, 0.02407327424182761, 1.01
    for found in polar_express(6):
        triple = minimax_quintic(max(low, cushion * high), high)
        ends = [sum(t * x**k for t, k in zip(triple, (1, 3, 5), strict=True)) for x in (low, high)]
        a, b, c = (t * 2 / sum(ends) for t in triple)  # centred on 1
        assert found == pytest.approx((a / safety, b / safety**3, c / safety**5), rel=1e-6)
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    assert polar_express(12)[7:] == ((1.875, -1.25, 0.375),) * 5
    assert polar_express(3) == polar_express(12)[:3]


@pytest.mark.parametrize(
    ("name", "shape", "least", "most"),
    [
        ("keller", (512, 2048), 0.70, 1.16),
        ("quintic", (512, 2048), 0.975, 1.035),
        ("polar_express", (512, 2048), 0.84, 1.15),
        ("deepseek_v4", (64, 96), 0.999, 1.001),
    ],
)
def test_a_gaussian_matrix_ends_with_singular_values_near_one(name, shape, least, most):
    values = singular_values(resolve(name), shape)
    assert least <= float(values.min())
    assert float(values.max()) <= most


@pytest.mark.parametrize("name", NAMES)
def test_no_set_lets_a_singular_value_of_at_most_one_exceed_its_ceiling(name):
    polynomials = resolve(name)
    assert 1.0 <= polynomials.ceiling < 1.35
    assert max(abs(polynomials(i / 977)) for i in range(978)) <= polynomials.ceiling + 1e-3


def test_one_triple_is_repeated_as_torch_does_and_a_list_is_taken_as_it_is():
    assert resolve(KELLER, 7).steps == (KELLER,) * 7
    assert resolve([(2, -1.5, 0.5), KELLER]) == Polynomials("custom", ((2.0, -1.5, 0.5), KELLER))


def test_deepseek_goes_on_with_its_last_step():
    assert resolve("deepseek_v4", 12).steps[8:] == ((2.0, -1.5, 0.5),) * 4


@pytest.mark.parametrize(
    ("coefficients", "steps", "message"),
    [
        ("kelller", None, "not known: use one of keller"),
        ("quintic", 3, "belong together"),
        ("deepseek_v4", 5, "at least 10"),
        ([(1.0, 2.0)], None, "expected a list of triples"),
        ([], None, "expected a list of triples"),
        ([(1.0, math.nan, 0.0)], None, "finite"),
        ([KELLER, KELLER], 3, "belong together"),
        ("keller", 0, "from 1 to 99"),
        ("keller", 100, "from 1 to 99"),
    ],
)
def test_a_set_that_means_nothing_is_refused(coefficients, steps, message):
    with pytest.raises(ValueError, match=message):
        resolve(coefficients, steps)
