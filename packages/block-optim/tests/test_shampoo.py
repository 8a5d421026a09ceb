"""Shampoo and KL-Shampoo in one process, against the papers' equations."""

from typing import Any

import pytest
import torch
from runs import small
from shampoo_helpers import close, gradients, numbered_blocks, parameter, train
from shampoo_reference import MomentumRule, ShampooBlock, blocks_of

from block_optim import Shampoo


def reference(weight, grads, max_dim, rule, stagger=False, **options):
    """The matrix after all gradients, by the plain reference; staggered by a block's number among those of its size."""
    weight = weight.double()
    blocks = [
        ShampooBlock(*shape, phase=number if stagger else None, **options)
        for shape, number in numbered_blocks(weight, max_dim)
    ]
    for grad in grads:
        direction = torch.empty_like(weight)
        for block, g, d in zip(
            blocks, blocks_of(grad.double(), max_dim), blocks_of(direction, max_dim), strict=True
        ):
            d.copy_(block.direction(g))
        weight = rule.apply(weight, direction)
    return weight


ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "grafting": "adam"}
# A shape, the largest block, frequency, first step, ridge, options of both, the rule's, Shampoo's.
DENSE: dict[str, tuple[Any, ...]] = {
    **{
        f"{grafting}, {betas}": ((10, 7), 4, 3, 5, 1e-4, {"betas": betas, "grafting": grafting}, {}, {})
        for grafting in ("none", "rmsprop", "adam")
        for betas in ((0.9, 0.95), (0.8, 1.0))
    },
    **{
        method: ((9, 6), 16, 2, 2, 1e-3, {"betas": (0.9, 0.9), "grafting": "adam"}, {}, {"root_method": method})
        for method in ("eigh", "newton")
    },
    **{
        f"kl, {n}": ((6, 9), 16, n, 3, 1e-3, {"betas": (0.9, 0.9), "grafting": "none", "kl": True}, {}, {})
        for n in (1, 3)
    },
    "momentum": ((6, 5), 8, 1, 1, 1e-4, ADAM, {"weight_decay": 0.1, "momentum": 0.9}, {}),
    "nesterov": ((6, 5), 8, 1, 1, 1e-4, ADAM, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}, {}),
    "dampening": (
        (6, 5), 8, 1, 1, 1e-4, ADAM,
        {"weight_decay": 0.1, "momentum": 0.8, "dampening": 0.3, "nesterov": True}, {},
    ),
    "exponent": ((6, 5), 8, 1, 1, 1e-4, {**ADAM, "grafting": "none", "exponent": 0.5}, {}, {}),
    **{
        f"staggered from {start}": (
            (12, 8), 4, 4, start, 1e-4, {"betas": (0.9, 0.95), "grafting": "rmsprop"}, {}, {"stagger": True},
        )
        for start in (3, 8)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", DENSE)
def test_it_matches_the_dense_reference(case):
    shape, max_dim, frequency, start, epsilon, options, rule, more = DENSE[case]
    grads, param = gradients(shape), parameter(shape)
    turns: dict[str, Any] = {
        "frequency": frequency,
        "start": start,
        "epsilon": epsilon,
        "eps": 1e-8,
        **options,
    }
    stagger = "stagger" in more

    def expected(stagger):
        return reference(param.detach(), grads, max_dim, MomentumRule(0.05, **rule), stagger, **turns)

    wanted, others = expected(stagger), expected(False)
    optimizer = Shampoo(
        [param], lr=0.05, max_preconditioner_dim=max_dim, precondition_frequency=frequency,
        start_preconditioning_step=start, root_epsilon=epsilon, **{"stagger": False, **options, **rule, **more},
    )  # fmt: skip
    train([param], [grads], optimizer)
    close(param.detach(), wanted)
    # The test would see blocks that all turn at once.
    assert not stagger or float((wanted - others).norm()) > 1e-3


def test_vectors_and_single_rows_take_the_grafting_methods_step():
    shapes = [(7,), (), (1, 9), (9, 1)]
    params = [parameter(shape, seed) for seed, shape in enumerate(shapes)]
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(shape, generator=generator) for _ in range(6)] for shape in shapes]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    train(params, grads, Shampoo(params, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1))
    train(twins, grads, torch.optim.AdamW(twins, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1))
    for ours, adam in zip(params, twins, strict=True):
        torch.testing.assert_close(ours, adam, rtol=1e-5, atol=1e-6)


def test_without_grafting_vectors_take_the_diagonal_preconditioners_step():
    param = parameter((5,))
    grads = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected, total = param.detach().clone(), torch.zeros(5)
    for g in grads:
        total += g * g
        expected -= 0.1 * g / (total.sqrt() + 1e-8)
    train([param], [grads], Shampoo([param], lr=0.1, betas=(0.0, 1.0), grafting="none"))
    torch.testing.assert_close(param.detach(), expected)


def test_a_huge_dimension_has_a_diagonal_factor():
    grads, param = gradients((12, 5)), parameter((12, 5))
    optimizer = Shampoo(
        [param],
        lr=0.1,
        betas=(0.0, 1.0),
        grafting="none",
        diagonal_above=10,
        precondition_frequency=1,
        root_epsilon=1e-6,
    )
    state = optimizer.state[param]
    assert state["factor_rows"].numel() == state["root_rows"].numel() == 12
    assert state["factor_cols"].numel() == 15
    weight, rows, cols = param.detach().double(), torch.zeros(12).double(), torch.zeros(5, 5).double()
    for g in grads:
        g = g.double()
        rows, cols = rows + (g * g).sum(1), cols + g.mT @ g
        values, vectors = torch.linalg.eigh(cols)
        root = (vectors * (values + 1e-6 * cols.norm()).pow(-0.25)) @ vectors.mT
        weight = weight - 0.1 * (rows + 1e-6 * rows.norm()).pow(-0.25)[:, None] * g @ root
    train([param], [grads], optimizer)
    close(param.detach(), weight)


def test_factors_may_be_kept_in_bfloat16():
    grads, param, twin = gradients((16, 8)), parameter((16, 8)), parameter((16, 8))
    options = small(lr=0.05, betas=(0.9, 0.9), root_epsilon=1e-3)
    optimizer = Shampoo([param], factor_dtype=torch.bfloat16, **options)
    assert optimizer.state[param]["factor_rows"].dtype == torch.bfloat16
    train([param], [grads], optimizer)
    train([twin], [grads], Shampoo([twin], **options))
    close(param.detach(), twin.detach().double(), 0.02)


def test_groups_have_options_of_their_own():
    grads, params = gradients((6, 4)), [parameter((6, 4)), parameter((6, 4))]
    groups: list[dict[str, Any]] = [
        {"params": [params[0]], "kl": True},
        {"params": [params[1]], "grafting": "rmsprop", "max_preconditioner_dim": 3},
    ]
    train(params, [grads, grads], Shampoo([dict(g) for g in groups], lr=0.01, precondition_frequency=2))
    singles = [parameter((6, 4)), parameter((6, 4))]
    for param, group in zip(singles, groups, strict=True):
        options = {k: v for k, v in group.items() if k != "params"}
        train([param], [grads], Shampoo([param], lr=0.01, precondition_frequency=2, **options))
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(params, singles, strict=True))
