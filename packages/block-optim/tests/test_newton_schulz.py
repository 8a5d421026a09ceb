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


def test_one_triple_is_repeated_as_torch_does_and_a_list_is_taken_as_it_is():
    assert steps_of(KELLER, 7) == (KELLER,) * 7
    assert steps_of([(2, -1.5, 0.5), KELLER]) == ((2.0, -1.5, 0.5), KELLER)
