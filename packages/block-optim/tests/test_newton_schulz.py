"""Newton-Schulz against torch's and fp64; sets of coefficients."""

import itertools
import math

import pytest
import torch

from block_optim.muon.newton_schulz import KELLER, SETS, orthogonalize, steps_of

# Wide, tall, square, prime, one row, one column, one element.
SHAPES = [(24, 40), (40, 24), (16, 16), (13, 7), (1, 5), (5, 1), (1, 1)]


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def polar(matrix):
    u, _, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vt


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
    matrix = gaussian(6, 9) * 1e-5
    expected = torchs(matrix, eps=10.0)[0]
    assert orthogonalize(matrix, eps=10.0).float().equal(expected)
    assert 1e-4 < float(torch.linalg.matrix_norm(expected, 2)) < 0.1


@pytest.mark.parametrize(
    ("name", "error"), [("keller", 0.25), ("quintic", 0.03), ("polar_express", 0.13), ("deepseek_v4", 0.02)]
)
@pytest.mark.parametrize("shape", [(24, 96), (96, 24)])
def test_the_result_is_near_the_fp64_polar_factor(name, shape, error):
    matrix = gaussian(*shape)
    want = polar(matrix)
    assert float((orthogonalize(matrix, name).double() - want).norm() / want.norm()) < error


def test_zeros_stay_zero_and_rank_one_stays_rank_one():
    assert not orthogonalize(torch.zeros(6, 4)).any()
    matrix = torch.zeros(6, 4)
    matrix[2] = 1  # its norm is 2, so that dividing by it rounds nothing
    for name in SETS:
        first, second = torch.linalg.svdvals(orthogonalize(matrix, name).float())[:2].tolist()
        assert first > 0.5, name
        assert second == 0, name


@pytest.mark.parametrize("scale", [1e-15, 1e-10, 1e10, 1e15])
def test_scale_does_not_matter(scale):
    found = orthogonalize(gaussian(8, 20) * scale, "quintic", eps=1e-37).float()
    assert float(torch.linalg.svdvals(found).min()) > 0.9
    assert float(torch.linalg.svdvals(found).max()) < 1.2


def test_empty_matrices_are_nothing_to_do():
    assert all(orthogonalize(torch.empty(shape)).shape == shape for shape in [(0, 6), (4, 0)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_matrix_gets_the_bits_of_torch_muon():
    matrix = gaussian(96, 160).cuda()
    for each in (matrix, matrix.T.contiguous()):
        expected, scale = torchs(each)
        assert torch.equal(torch.zeros_like(each).add_(orthogonalize(each), alpha=scale), expected)


def singular_values(steps, shape, seed=0):
    """Singular values of a Gaussian matrix after the steps, in exact enough arithmetic."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x / x.norm()
    values = torch.linalg.svdvals(x)
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return values


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
    for found in SETS["polar_express"]:
        triple = minimax_quintic(max(low, cushion * high), high)
        ends = [sum(t * x**k for t, k in zip(triple, (1, 3, 5), strict=True)) for x in (low, high)]
        a, b, c = (t * 2 / sum(ends) for t in triple)  # centred on 1
        assert found == pytest.approx((a / safety, b / safety**3, c / safety**5), rel=1e-6)
        low = a * low + b * low**3 + c * low**5
        high = 2 - low


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
    values = singular_values(steps_of(name), shape)
    assert least <= float(values.min())
    assert float(values.max()) <= most


def test_one_triple_is_repeated_as_torch_does_and_a_list_is_taken_as_it_is():
    assert steps_of(KELLER, 7) == (KELLER,) * 7
    assert steps_of([(2, -1.5, 0.5), KELLER]) == ((2.0, -1.5, 0.5), KELLER)
