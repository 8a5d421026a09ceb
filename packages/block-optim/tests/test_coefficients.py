import math

import pytest
import torch

from block_optim.muon.coefficients import (
    KELLER,
    NAMES,
    Polynomials,
    cubic_steps,
    minimax_steps,
    polar_express,
    resolve,
)

# What the papers and their code print.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
CANS = [
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]
CUBIC = [
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
]


def singular_values(polynomials, shape, seed=0):
    """Of a Gaussian matrix after the steps, in exact enough arithmetic."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if polynomials.normalisation == "aol":
        gram = x @ x.T
        x = x * gram.abs().sum(-1).rsqrt()[:, None]
    else:
        x = x / x.norm()
    return torch.tensor([polynomials(value) for value in torch.linalg.svdvals(x).tolist()])


def test_polar_express_is_what_the_recursion_gives_to_all_published_digits():
    found = minimax_steps(1e-3, 8, 0.02407327424182761)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(POLAR_EXPRESS), rtol=1e-5, atol=1e-5)


def test_polar_express_divides_by_its_safety_factor_until_it_has_converged():
    found = polar_express(9, safety=1.05)
    for k, (a, b, c) in enumerate(POLAR_EXPRESS[:7]):
        assert found[k] == pytest.approx((a / 1.05, b / 1.05**3, c / 1.05**5), rel=1e-5)
    for step in found[7:]:
        assert step == pytest.approx((1.875, -1.25, 0.375), rel=1e-6)


def test_cans_is_the_minimax_recursion_without_a_cushion():
    assert torch.allclose(torch.tensor(minimax_steps(1e-3, 5)), torch.tensor(CANS), atol=6e-4, rtol=1e-4)


def test_cubic_is_what_its_recursion_gives():
    torch.testing.assert_close(
        torch.tensor(cubic_steps(0.007, 5, 1.3)), torch.tensor(CUBIC), rtol=1e-4, atol=0
    )


def test_each_minimax_step_alternates_between_its_extremes():
    low, high = 1e-3, 1.0
    for a, b, c in minimax_steps(1e-3, 5):
        x = torch.linspace(low, high, 100001, dtype=torch.float64)
        y = a * x + b * x**3 + c * x**5
        error = float((y - 1).abs().max())
        inner = ((y[1:-1] - y[:-2]).sign() != (y[2:] - y[1:-1]).sign()).nonzero().flatten() + 1
        extremes = [y[0], *y[inner], y[-1]]
        assert [round(float(v - 1) / error) for v in extremes] == [-1, 1, -1, 1]
        low, high = 1 - error, 1 + error


@pytest.mark.parametrize(
    ("name", "shape", "least", "most"),
    [
        ("keller", (512, 2048), 0.70, 1.16),
        ("quintic", (512, 2048), 0.975, 1.035),
        ("polar_express", (512, 2048), 0.84, 1.15),
        ("cans", (64, 96), 0.88, 1.12),
        ("aol", (64, 96), 0.95, 1.02),
        ("deepseek_v4", (64, 96), 0.999, 1.001),
        ("cubic", (64, 96), 0.77, 1.301),
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
