"""What Shampoo and SOAP have in common, in one process."""

import math

import pytest
import torch
from runs import small
from shampoo_helpers import gradients, parameter, train

from block_optim import SOAP, Shampoo
from block_optim.shampoo import batches, linalg, rule

KINDS = pytest.mark.parametrize("kind", [Shampoo, SOAP])


@pytest.mark.parametrize(
    ("kind", "shape", "as_matrices"),
    [
        (SOAP, (3, 6, 5), (3, 6, 5)),  # stacked experts
        (Shampoo, (6, 2, 3, 2), (1, 6, 12)),  # a convolution
    ],
)
def test_tensors_are_worked_on_as_the_matrices_they_stand_for(kind, shape, as_matrices):
    grads, param, options = gradients(shape), parameter(shape), small(lr=0.05)
    singles = [torch.nn.Parameter(m.clone()) for m in param.detach().view(as_matrices)]
    train([param], [grads], kind([param], **options))
    own = [[g.view(as_matrices)[i] for g in grads] for i in range(len(singles))]
    train(singles, own, kind(singles, **options))
    assert torch.equal(param.detach().view(as_matrices), torch.stack([s.detach() for s in singles]))


def adversary(name, shape=(9, 6)):
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if name == "rank one":
        return normal[:, :1] @ normal[:1]
    if name == "mixed":
        return normal * torch.logspace(-20, 13, shape[1])
    return {"zero": 0.0, "huge": 1e14, "beyond": 1e30, "tiny": 1e-14, "below": 1e-30}[name] * normal


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Shampoo, {}), (SOAP, {}), pytest.param(Shampoo, {"grafting": "none"}, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "name",
    ["zero", "beyond", "below", "mixed"]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("rank one", "huge", "tiny")],
)
def test_updates_stay_finite_whatever_the_gradient(kind, name, options):
    bad = [adversary(name)] * 4
    for grads in (bad + gradients((9, 6), 3), gradients((9, 6), 3) + bad + gradients((9, 6), 4, seed=2)):
        param = parameter((9, 6))
        optimizer = kind([param], lr=1e-3, **small(**options))
        train([param], [grads], optimizer)
        assert bool(param.isfinite().all())
        for key, value in optimizer.state[param].items():
            assert bool(value.isfinite().all()), key
        assert optimizer.root_counts.computed > 0
        assert optimizer.root_counts.kept == 0


@KINDS
def test_zero_gradients_from_the_start_are_counted_and_move_nothing(kind):
    param = parameter((4, 4))
    before = param.detach().clone()
    optimizer = kind([param], weight_decay=0.0, precondition_frequency=1)
    train([param], [[torch.zeros(4, 4)] * 3], optimizer)
    assert torch.equal(param.detach(), before)
    assert optimizer.root_counts.zero == 6


@pytest.mark.parametrize(("kind", "kept"), [(Shampoo, "root_rows"), (SOAP, "basis_rows")])
def test_what_fails_keeps_the_last_good_one_and_says_so(kind, kept, caplog):
    param = parameter((4, 4))
    optimizer = kind([param], lr=0.1, precondition_frequency=1, betas=(0.9, 0.9))
    train([param], [gradients((4, 4), 3)], optimizer)
    good = optimizer.state[param][kept].clone()
    optimizer.state[param]["factor_rows"][0] = math.nan
    train([param], [gradients((4, 4), 2)], optimizer)
    assert torch.equal(optimizer.state[param][kept], good)
    assert optimizer.root_counts.kept == 2
    assert bool(param.isfinite().all())
    assert "last good ones stay in use (parameter 0" in caplog.text


@KINDS
def test_a_parameter_without_gradient_stays_with_its_state(kind):
    params, alone = [parameter((6, 4)), parameter((6, 4), 8)], parameter((6, 4), 8)
    optimizer = kind(params, precondition_frequency=1)
    grads = gradients((6, 4), 4)
    train(params, [grads, [*grads[:2], None, None]], optimizer)
    assert [int(optimizer.state[p]["step"]) for p in params] == [4, 2]
    train([alone], [grads[:2]], kind([alone], precondition_frequency=1))
    assert torch.equal(params[1].detach(), alone.detach())


def test_memory_is_what_the_formula_says():
    sizes = [(r, c) for r in (4, 4, 2) for c in (4, 3)]
    rows, cols = (4 * sum(size[i] ** 2 for size in sizes) for i in (0, 1))
    factors = {"factor_rows": rows, "factor_cols": cols}
    shampoo = Shampoo([parameter((10, 7))], **small())
    moments = {"step": 4, "exp_avg": 280, "exp_avg_sq": 280}
    assert shampoo.state_bytes() == {**moments, **factors, "root_rows": rows, "root_cols": cols}
    soap = SOAP([parameter((10, 7)), parameter((5,))], **small())
    bases = {"basis_rows": rows, "basis_cols": cols}
    assert soap.state_bytes() == {"step": 8, "exp_avg": 300, "exp_avg_sq": 300, **factors, **bases}


@KINDS
def test_batches_that_are_filled_up_as_on_cuda_change_no_bit_and_no_count(kind, monkeypatch):
    results = []
    for filled in (False, True):
        if filled:
            for module in (batches, rule):
                monkeypatch.setattr(module, "capacity", lambda count, dim, device: linalg.chunk_size(dim))
        param = parameter((9, 6))
        optimizer = kind([param], **small(diagonal_above=8))
        train([param], [[torch.zeros(9, 6), *gradients((9, 6), 6)]], optimizer)
        results.append((param.detach(), optimizer.root_counts))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
