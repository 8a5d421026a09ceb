"""Roots of factors, against fp64, on their own and in any company."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from block_optim.shampoo import linalg
from block_optim.shampoo.roots import eigenbases, inverse_roots, power_bases


def factors(count, dim, rank, seed=0):
    grads = torch.randn(count, dim, rank, generator=torch.Generator().manual_seed(seed))
    return grads @ grads.mT


def reference(matrix, epsilon):
    """(A + epsilon ||A||_F I)^-1/4 by fp64 eigh."""
    wide = matrix.double()
    values, vectors = torch.linalg.eigh(wide)
    ridged = values.clamp(min=0) + epsilon * wide.norm()
    return (vectors * ridged.pow(-0.25)) @ vectors.mT


def roots(batch, last=None):
    return inverse_roots(batch, 1e-5, last=torch.zeros_like(batch) if last is None else last)


def distance(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rank", [200, 40, 1])
def test_a_root_is_close_to_fp64_whatever_the_rank(rank):
    batch = factors(3, 48, rank)
    found = roots(batch)
    assert found.counts.fell_back == found.counts.kept == 0
    for matrix, root in zip(batch, found.roots, strict=True):
        assert distance(root, reference(matrix, 1e-5)) < 5e-3


@pytest.mark.parametrize("scale", [1e-28, 1e-12, 1e12, 1e36])
def test_roots_are_as_good_for_tiny_and_huge_factors(scale):
    batch = factors(2, 16, 20) / 100
    found = roots(batch * scale).roots
    for matrix, root in zip(batch, found, strict=True):
        assert distance(root, reference(matrix.double() * scale, 1e-5)) < 1e-3


@pytest.mark.parametrize("dim", [1, 5, 17, 64])
def test_a_root_has_the_same_bits_in_any_company(dim):
    batch = factors(7, dim, dim + 3)
    batch[2] *= 1e-6
    batch[5] = factors(1, dim, 1)[0]
    together = roots(batch).roots
    for part in ([3], [0, 3], [3, 5, 6], [6, 2, 3]):
        alone = roots(batch[part]).roots
        for index, root in zip(part, alone, strict=True):
            assert torch.equal(root, together[index])


def test_a_zero_factor_has_the_identity_and_disturbs_no_other():
    batch = factors(3, 8, 12)
    batch[1] = 0
    found = roots(batch)
    assert torch.equal(found.roots[1], torch.eye(8))
    assert found.counts.zero == 1
    assert torch.equal(found.roots[[0, 2]], roots(batch[[0, 2]]).roots)


class Ops(TorchDispatchMode):
    """Counts operations, reads by the host among them."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", [inverse_roots, eigenbases, power_bases])
def test_zeros_that_fill_up_a_batch_cost_no_operation_each(call):
    calls = []
    for zeros in (1, 5):
        batch = factors(8, 6, 6)
        batch[8 - zeros :] = 0
        with Ops() as ops:
            call(batch, *([1e-5] if call is inverse_roots else []), last=linalg.identity_like(batch).clone())
        calls.append(ops.calls)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_keeps_the_last_good_root(bad):
    batch, last = factors(3, 8, 12), factors(3, 8, 12, seed=1)
    batch[1, 2, 3] = bad
    found = roots(batch, last=last)
    assert torch.equal(found.roots[1], last[1])
    assert (found.counts.kept, found.kept) == (1, [1])
    assert bool(found.roots.isfinite().all())


def test_a_failed_eigh_falls_back_in_fp64_and_then_to_the_last_root(monkeypatch):
    batch, last = factors(4, 8, 12), factors(4, 8, 12, seed=1)
    real = linalg.eigh

    def broken(matrices):
        values, vectors = real(matrices)
        if matrices.dtype == torch.float32:
            values[1:3], vectors[1:3] = math.nan, math.nan
        elif torch.allclose(matrices[0].float(), batch[2] / batch[2].norm()):
            vectors = vectors * math.nan
        return values, vectors

    monkeypatch.setattr(linalg, "eigh", broken)
    found = roots(batch, last=last)
    assert (found.counts.fell_back, found.counts.kept, found.kept) == (1, 1, [2])
    assert distance(found.roots[1], reference(batch[1], 1e-5)) < 1e-5
    assert torch.equal(found.roots[2], last[2])


def test_bases_diagonalise_in_descending_order():
    batch = factors(3, 12, 20)
    found = eigenbases(batch, torch.zeros_like(batch)).roots
    values = (found.mT @ batch @ found).diagonal(dim1=1, dim2=2)
    assert bool((values.diff(dim=1) <= 1e-4).all())
    off = found.mT @ batch @ found - torch.diag_embed(values)
    assert float(off.norm()) < 1e-4 * float(batch.norm())


def test_a_power_step_reorders_by_estimated_eigenvalue_and_stays_orthonormal():
    batch = factors(2, 12, 20)
    exact = eigenbases(batch, torch.zeros_like(batch)).roots
    shuffled = exact[:, :, torch.randperm(12, generator=torch.Generator().manual_seed(3))]
    result, order = power_bases(batch, shuffled)
    assert torch.equal(torch.gather(shuffled, 2, order[:, None].expand_as(shuffled)), exact)
    assert distance((result.roots.mT @ exact).abs(), torch.eye(12).double().expand(2, 12, 12)) < 1e-3


def test_a_basis_of_a_bad_factor_stays_and_is_counted():
    batch, last = factors(3, 6, 9), eigenbases(factors(3, 6, 9, seed=1), torch.zeros(3, 6, 6)).roots
    batch[0, 0, 0] = math.nan
    batch[1] = 0
    result, order = power_bases(batch, last)
    assert torch.equal(result.roots[:2], last[:2])
    assert torch.equal(order[:2], torch.arange(6).expand(2, 6))
    assert (result.counts.kept, result.counts.zero) == (1, 1)
