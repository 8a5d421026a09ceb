"""Training loose parameters with Shampoo and SOAP on lists of gradients, one list for each."""

import torch
from shampoo_reference import blocks_of


def gradients(shape, count=14, seed=0):
    """Correlated gradients, so that factors have structure."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(shape[-1], shape[-1], generator=generator) / shape[-1] ** 0.5
    mix += 0.3 * torch.eye(shape[-1])
    return [torch.randn(shape, generator=generator) @ mix for _ in range(count)]


def train(params, grads, optimizer):
    """Step through lists of gradients, one list for each parameter."""
    params = list(params)
    for step in zip(*grads, strict=True):
        for param, grad in zip(params, step, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()


def parameter(shape, seed=7):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def numbered_blocks(weight, max_dim):
    """The shape of each block of a matrix, with its number among the blocks of that shape."""
    numbers: dict[torch.Size, int] = {}
    for block in blocks_of(weight, max_dim):
        numbers[block.shape] = numbers.get(block.shape, -1) + 1
        yield block.shape, numbers[block.shape]


def close(found, wanted, tolerance=2e-4):
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance
