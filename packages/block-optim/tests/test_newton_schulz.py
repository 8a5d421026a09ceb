"""Newton-Schulz against torch's and fp64, alone and in batches; sets of coefficients."""

import itertools
import math

import pytest
import torch

from block_optim.muon.coefficients import KELLER, NAMES, Polynomials, polar_express, resolve
from block_optim.muon.newton_schulz import orthogonalize

# Minimax steps without a margin (arXiv 2506.10935).
CANS = [
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]

# Wide, tall, square, prime, one row, one column, one element.
SHAPES = [(24, 40), (40, 24), (16, 16), (13, 7), (1, 5), (5, 1), (1, 1)]


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def polar(matrix):
    u, _, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vt


def power_law(short, long, seed=0):
    """Singular values k^-1.5: what gradients look like, and where half precision goes wrong."""
    u, _, vt = torch.linalg.svd(gaussian(short, long, seed=seed).double(), full_matrices=False)
    return (u * torch.arange(1, short + 1, dtype=torch.float64) ** -1.5) @ vt


def torchs(matrix, **options):
    """The update that torch.optim.Muon computes from a matrix, scaled by the factor for its shape; and that factor."""
    param = torch.nn.Parameter(torch.zeros_like(matrix))
    param.grad = matrix
    torch.optim.Muon([param], lr=1.0, weight_decay=0, momentum=0, nesterov=False, **options).step()
    return -param.detach(), math.sqrt(max(1, matrix.size(0) / matrix.size(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_gets_the_bits_of_torch_muon_and_is_left_as_it_is(dtype):
    for shape, steps in itertools.product(SHAPES, (1, 2, 5)):
        matrix = gaussian(*shape, dtype=dtype)
        expected, scale = torchs(matrix.float(), ns_steps=steps)
        update = torch.zeros(shape).add_(orthogonalize(matrix, KELLER, steps), alpha=scale)
        assert torch.equal(update, expected), (shape, steps)
        assert torch.equal(matrix, gaussian(*shape, dtype=dtype))


def test_a_norm_below_eps_is_taken_as_eps():
    stack = gaussian(2, 6, 9) * 1e-5
    expected = torch.stack([torchs(matrix, eps=10.0)[0] for matrix in stack])
    assert orthogonalize(stack, eps=10.0).float().equal(expected)
    assert 1e-4 < float(torch.linalg.matrix_norm(expected, 2).max()) < 0.1


@pytest.mark.parametrize(
    ("name", "error"), [("keller", 0.25), ("quintic", 0.03), ("polar_express", 0.13), ("deepseek_v4", 0.02)]
)
@pytest.mark.parametrize("shape", [(24, 96), (96, 24)])
def test_the_result_is_near_the_fp64_polar_factor(name, shape, error):
    matrix = gaussian(*shape)
    for method in ("standard", "gram"):
        found = orthogonalize(matrix, name, method=method).double()
        want = polar(matrix)
        assert float((found - want).norm() / want.norm()) < error


@pytest.mark.parametrize("name", ["keller", "quintic", "polar_express", "deepseek_v4"])
def test_gram_newton_schulz_follows_the_polynomials(name):
    matrix = power_law(32, 128).float()
    polynomials = resolve(name)
    values = torch.linalg.svdvals(matrix.double() / matrix.double().norm())
    expected = torch.tensor([polynomials(v) for v in values.tolist()]).sort().values
    found = torch.linalg.svdvals(orthogonalize(matrix, name, method="gram").double()).sort().values
    assert float((found - expected).abs().max()) < 0.03


def test_zeros_stay_zero_and_rank_one_stays_rank_one():
    assert not orthogonalize(torch.zeros(6, 4)).any()
    matrix = torch.zeros(6, 4)
    matrix[2] = 1  # its norm is 2, so that dividing by it rounds nothing
    for name in NAMES:
        first, second = torch.linalg.svdvals(orthogonalize(matrix, name).float())[:2].tolist()
        assert first > 0.5, name
        assert second == 0, name


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_scale_does_not_matter_even_where_the_norm_overflows(scale):
    matrix = gaussian(8, 20)
    found = orthogonalize(matrix * scale, "quintic", eps=1e-37).float()
    assert float(torch.linalg.svdvals(found).min()) > 0.9
    assert float(torch.linalg.svdvals(found).max()) < 1.2


def test_a_set_without_margin_that_rounding_drives_out_of_range_falls_back(caplog):
    # A rank-one matrix has its singular value at exactly 1, where CANS's first polynomial is steepest.
    for seed in range(40):
        matrix = gaussian(64, 1, seed=seed) @ gaussian(1, 96, seed=seed + 99)
        assert float(torch.linalg.matrix_norm(orthogonalize(matrix, CANS).float(), 2)) < 1.3
    assert "done again in fp32" in caplog.text


def test_what_no_method_can_do_is_left_out(caplog):
    assert not orthogonalize(torch.full((4, 6), math.nan)).any()
    assert "left as it is" in caplog.text


def test_empty_matrices_are_nothing_to_do():
    for shape in [(0, 4, 6), (2, 0, 6), (2, 4, 0)]:
        assert orthogonalize(torch.empty(shape)).shape == shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
def test_on_a_gpu_the_result_is_as_near_the_polar_factor(method):
    for matrix in (gaussian(256, 1024), power_law(256, 1024).float()):
        for name in ("keller", "quintic", "polar_express"):
            polynomials = resolve(name)
            values = torch.linalg.svdvals(matrix.double() / matrix.double().norm())
            expected = torch.tensor([polynomials(v) for v in values.tolist()]).sort().values
            found = orthogonalize(matrix.cuda(), name, method=method).double().cpu()
            assert float((torch.linalg.svdvals(found).sort().values - expected).abs().max()) < 0.12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_matrix_gets_the_bits_of_torch_muon_and_batches_agree():
    stack = gaussian(5, 96, 160).cuda()
    for matrix in (stack[0], stack[0].T.contiguous()):
        expected, scale = torchs(matrix)
        assert torch.equal(torch.zeros_like(matrix).add_(orthogonalize(matrix), alpha=scale), expected)
    for together, matrix in zip(orthogonalize(stack), stack, strict=True):
        torch.testing.assert_close(together, orthogonalize(matrix), atol=2e-2, rtol=0)


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
    assert resolve([(2, -1.5, 0.5), KELLER]) == Polynomials(((2.0, -1.5, 0.5), KELLER))


def test_deepseek_goes_on_with_its_last_step():
    assert resolve("deepseek_v4", 12).steps[8:] == ((2.0, -1.5, 0.5),) * 4
