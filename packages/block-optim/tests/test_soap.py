"""SOAP in one process, against the paper's algorithm."""

from typing import Any

import pytest
import torch
from shampoo_helpers import SoapMatrix, blocks_of, close, numbered_blocks, parameter, train

from block_optim import SOAP


def gradients(shape, count=14):
    """Of clearly different size along rows and columns, so that eigenvalues lie apart."""
    generator = torch.Generator().manual_seed(0)
    sizes = [torch.logspace(0, -1.5, n) for n in shape]
    mixes = [torch.linalg.qr(torch.randn(n, n, generator=generator))[0] for n in shape]
    return [
        mixes[0] @ (sizes[0][:, None] * torch.randn(shape, generator=generator) * sizes[1]) @ mixes[1]
        for _ in range(count)
    ]


def reference(weight, grads, max_dim, lr, decay=0.0, bases=None, **options):
    """The matrix after all gradients. `bases`: the first ones of each block; for deficient factors they are free."""
    weight = weight.double()
    blocks = [
        SoapMatrix(*shape, number=number, **options) for shape, number in numbered_blocks(weight, max_dim)
    ]
    for grad in grads:
        direction = torch.zeros_like(weight)
        found = [b.direction(g) for b, g in zip(blocks, blocks_of(grad.double(), max_dim), strict=True)]
        if found[0] is None:
            for block, (left, right) in zip(blocks, bases or [], strict=bases is not None):
                for basis, factor in ((left, block.left), (right, block.right)):
                    turned = basis.mT @ factor @ basis
                    assert float((turned - turned.diag().diag()).norm() / factor.norm()) < 1e-5
                    assert bool((turned.diag().diff() <= 1e-6 * factor.norm()).all())
                block.q_left, block.q_right = left, right
            continue
        for into, part in zip(blocks_of(direction, max_dim), found, strict=True):
            into.copy_(part)
        weight = weight - lr * direction
        weight = weight - lr * decay * weight
    return weight


def bases_of(state, shape, max_dim):
    """The bases in a state, block by block, in fp64."""
    sizes = [part.shape for part in blocks_of(torch.empty(shape), max_dim)]
    lefts = state["basis_rows"].double().split([r * r for r, _ in sizes])
    rights = state["basis_cols"].double().split([c * c for _, c in sizes])
    return [(a.view(r, r), b.view(c, c)) for a, b, (r, c) in zip(lefts, rights, sizes, strict=True)]


@pytest.mark.parametrize("shape", [(6, 6), (10, 7), (4, 9)])
def test_matches_the_dense_reference(shape):
    grads, param = gradients(shape), parameter(shape)
    before = param.detach().clone()
    optimizer = SOAP(
        [param], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, shampoo_beta=0.8, precondition_frequency=3,
        max_preconditioner_dim=4,
    )  # fmt: skip
    train([param], [grads[:1]], optimizer)
    bases = bases_of(optimizer.state[param], shape, 4)
    train([param], [grads[1:]], optimizer)
    options: dict[str, Any] = {"betas": (0.9, 0.95), "shampoo_beta": 0.8, "eps": 1e-8, "frequency": 3}
    close(param.detach(), reference(before, grads, 4, 0.02, 0.1, bases, **options))


def test_the_first_step_makes_the_bases_and_moves_nothing():
    param, vector = parameter((6, 4)), parameter((5,))
    before = [param.detach().clone(), vector.detach().clone()]
    optimizer = SOAP([param, vector])
    train([param, vector], [gradients((6, 4), 1), [torch.ones(5)]], optimizer)
    assert torch.equal(param.detach(), before[0])
    assert torch.equal(vector.detach(), before[1])
    basis = optimizer.state[param]["basis_rows"].view(6, 6)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(6))
    assert not torch.equal(basis.abs(), torch.eye(6))


def test_vectors_take_adams_step_from_the_second_step_on():
    param = parameter((7,))
    grads = [torch.randn(7, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    twin = torch.nn.Parameter(param.detach().clone())
    train([param], [grads], SOAP([param], lr=0.1, weight_decay=0.0))
    train([twin], [grads[1:]], torch.optim.Adam([twin], lr=0.1, betas=(0.95, 0.95)))
    torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


def test_a_huge_dimension_is_not_rotated():
    grads, param = gradients((12, 5)), parameter((12, 5))
    optimizer = SOAP([param], lr=0.02, weight_decay=0.0, diagonal_above=10, precondition_frequency=3)
    assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq", "factor_cols", "basis_cols"}
    options: dict[str, Any] = {"betas": (0.95, 0.95), "shampoo_beta": 0.95, "eps": 1e-8, "frequency": 3}

    class OneSided(SoapMatrix):
        def _refreshed(self, factor, basis):
            return (
                (basis, torch.arange(len(basis))) if len(basis) == 12 else super()._refreshed(factor, basis)
            )

    one, weight = OneSided(12, 5, **options), param.detach().double()
    for grad in grads:
        found = one.direction(grad.double())
        one.q_left = torch.eye(12).double()
        weight = weight if found is None else weight - 0.02 * found
    train([param], [grads], optimizer)
    close(param.detach(), weight)
