"""Shampoo in one process, against the papers' equations."""

from typing import Any

import pytest
import torch
from shampoo_helpers import ShampooBlock, blocks_of, close, gradients, numbered_blocks, parameter, train

from block_optim import Shampoo


def reference(weight, grads, max_dim, lr, decay=0.0, **options):
    """The matrix after all gradients, by the plain reference; a block's number is among the blocks of its size."""
    weight = weight.double()
    blocks = [
        ShampooBlock(*shape, number=number, **options) for shape, number in numbered_blocks(weight, max_dim)
    ]
    for grad in grads:
        direction = torch.empty_like(weight)
        parts = zip(blocks, blocks_of(grad.double(), max_dim), blocks_of(direction, max_dim), strict=True)
        for block, g, d in parts:
            d.copy_(block.direction(g))
        weight = weight - lr * (direction + decay * weight)
    return weight


# A shape, the largest block, the frequency, the ridge, the decay, options of both.
DENSE: dict[str, tuple[Any, ...]] = {
    **{
        f"{grafting}, {betas}": ((10, 7), 4, 3, 1e-4, 0.0, {"betas": betas, "grafting": grafting})
        for grafting in ("none", "rmsprop", "adam")
        for betas in ((0.9, 0.95), (0.8, 1.0))
    },
    "one block": ((9, 6), 16, 2, 1e-3, 0.0, {"betas": (0.9, 0.9), "grafting": "adam"}),
    "decay": ((6, 5), 8, 1, 1e-4, 0.1, {"betas": (0.9, 0.95), "grafting": "adam"}),
    "spread over steps": ((12, 8), 4, 4, 1e-4, 0.0, {"betas": (0.9, 0.95), "grafting": "rmsprop"}),
}


@pytest.mark.parametrize("case", DENSE)
def test_it_matches_the_dense_reference(case):
    shape, max_dim, frequency, epsilon, decay, options = DENSE[case]
    grads, param = gradients(shape), parameter(shape)
    turns: dict[str, Any] = {"frequency": frequency, "epsilon": epsilon, "eps": 1e-8, **options}
    wanted = reference(param.detach(), grads, max_dim, 0.05, decay, **turns)
    optimizer = Shampoo(
        [param], lr=0.05, max_preconditioner_dim=max_dim, precondition_frequency=frequency, root_epsilon=epsilon,
        weight_decay=decay, **options,
    )  # fmt: skip
    train([param], [grads], optimizer)
    close(param.detach(), wanted)


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
    options: dict[str, Any] = {"betas": (0.0, 1.0), "grafting": "none", "root_epsilon": 1e-6}
    optimizer = Shampoo([param], lr=0.1, diagonal_above=10, precondition_frequency=1, **options)
    state = optimizer.state[param]
    assert state["factor_rows"].numel() == state["root_rows"].numel() == 12
    assert state["factor_cols"].numel() == 25
    weight, rows, cols = param.detach().double(), torch.zeros(12).double(), torch.zeros(5, 5).double()
    for g in grads:
        g = g.double()
        rows, cols = rows + (g * g).sum(1), cols + g.mT @ g
        values, vectors = torch.linalg.eigh(cols)
        root = (vectors * (values + 1e-6 * cols.norm()).pow(-0.25)) @ vectors.mT
        weight = weight - 0.1 * (rows + 1e-6 * rows.norm()).pow(-0.25)[:, None] * g @ root
    train([param], [grads], optimizer)
    close(param.detach(), weight)
