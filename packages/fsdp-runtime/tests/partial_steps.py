"""Steps in which ranks use different parts of a model: on ranks, and in one process that has all batches.

A model is called with its inputs and the parts to use; `steps` has the parts of each rank, step by step.
"""

from typing import Any

import torch
import torch.distributed as dist

WIDTH = 7


def inputs(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def same_on_all_ranks(model):
    """Whether the same gradients are None on all ranks."""
    own = {name: p.grad is None for name, p in model.named_parameters()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return everywhere == [own] * dist.get_world_size()


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def _copy(grad):
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad if grad is None else grad.clone()


def mean_backward(model, step, parts):
    """Backward of the mean over the batches of all ranks, in one process."""
    for rank, chosen in enumerate(parts):
        (model(inputs(step, rank), chosen).square().mean() / len(parts)).backward()


def trained(model, steps, ends, sync):
    """Gradients of the steps in `ends`, None where there is none, and the parameters after all steps.

    Gradients of other steps add up; `sync` is called before each step with whether it is in `ends`.
    """
    optimizer, gradients, rank = _adamw(model), [], dist.get_rank()
    for number, parts in enumerate(steps):
        sync(number in ends)
        model(inputs(number, rank), parts[rank]).square().mean().backward()
        if number in ends:
            assert same_on_all_ranks(model)
            gradients.append({name: _copy(p.grad) for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return gradients, {name: _copy(p.detach()) for name, p in model.named_parameters()}


def alone(model, steps, ends, world):
    """As `trained`, in one process."""
    optimizer, gradients = _adamw(model), []
    for number, parts in enumerate(steps):
        mean_backward(model, number, parts[:world])
        if number in ends:
            gradients.append({name: _copy(p.grad) for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return gradients, dict(model.named_parameters())


def check(results, expected):
    """The results of all ranks are those of one process."""
    for gradients, params in results:
        for own, reference in zip(gradients, expected[0], strict=True):
            assert {n for n, g in own.items() if g is None} == {n for n, g in reference.items() if g is None}
            for name, grad in reference.items():
                if grad is not None:
                    torch.testing.assert_close(own[name], grad, rtol=1e-5, atol=1e-7, msg=name)
        for name, param in expected[1].items():
            torch.testing.assert_close(params[name], param, rtol=1e-4, atol=1e-5, msg=name)
