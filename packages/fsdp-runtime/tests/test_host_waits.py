"""On a device no part of a training step waits for it. Found on the CPU, whose memory stands for the device's."""

from typing import Any

import pytest
import torch
from host_waits import host_waits
from runtime_helpers import loss_of, seeded, shard, tokens
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime.token_loss import TokenLoss, count_tokens
from layout_planner import Rows
from ragged_shard.testing import rank_mesh, simulated_ranks

pytestmark = [pytest.mark.gpu_guard]

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "blocks": {"block_policy": lambda name, p: Rows(3)},
    "mixed precision": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "kept": {"reshard_after_forward": False},
    "two axes": {},
}


def step(model, optimizer, number, clip):
    """Two batches, of which the first only accumulates; the loss stays where it is."""
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        loss_of(model, tokens(2 * number + part)).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("case", "clip"), [("dense", False), *((case, True) for case in OPTIONS)])
def test_no_part_of_a_step_waits(case, clip):
    with simulated_ranks(4):
        shape, names = ((2, 2), ("replicate", "shard")) if case == "two axes" else ((4,), ("shard",))
        mesh = rank_mesh(*shape, names=names)
        model = shard(seeded(), mesh=mesh, **OPTIONS[case])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(2):
            step(model, optimizer, number, clip)
        batch = [tokens(6), tokens(7)]
        with host_waits([*model.parameters(), *batch]) as waits:
            step(model, optimizer, 3, clip)
        assert waits.lines == []


def test_counting_tokens_and_dividing_losses_do_not_wait():
    with simulated_ranks(4):
        token_loss = TokenLoss(shard(seeded(), mesh=rank_mesh(4)))
        labels = [tokens(6), tokens(7)]
        with host_waits(labels) as waits:
            counted = token_loss.step(count_tokens(part) for part in labels)
            counted.loss(torch.ones(()))
        assert waits.lines == []
        assert counted.total == 4 * sum(part.numel() for part in labels)  # the other ranks are copies


WAITS = {
    "item": lambda x: x.sum().item(), "bool": lambda x: bool(x[0] > 0), "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(), "cpu": lambda x: (x + 1).cpu(), "equal": lambda x: torch.equal(x, x + 1),
    "nonzero": lambda x: (x > 0).nonzero(), "mask": lambda x: x[x > 0], "eigh": lambda x: torch.linalg.eigh(x.outer(x)),
    "pageable copy": lambda x: x.copy_(torch.tensor([1.0, 2.0, 3.0])),
    "after a foreach op": lambda x: torch._foreach_add([x], 1.0)[0].tolist(),
    "after a view": lambda x: x.view(3, 1)[1].item(),
    "after out=": lambda x: torch.mul(x, 2, out=torch.empty(3)).tolist(),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS)
def test_a_wait_is_found_where_it_is_called(case):
    x = torch.tensor([1.0, -2.0, 3.0])
    with host_waits([x]) as waits:
        WAITS[case](x)
    assert waits.lines
    assert all(line.endswith(")") and "test_host_waits.py" in line for line in waits.lines)


def test_what_stays_on_the_device_or_on_the_host_is_no_wait():
    x, count = torch.tensor([1.0, -2.0, 3.0], requires_grad=True), torch.zeros(())
    with host_waits([x]) as waits:
        torch.where(x > 0, x, 0).square().sum().backward()
        x.detach().clamp_(min=0).add_(torch.ones(3))
        count += 1
        assert count.item() == 1
    assert waits.lines == []
