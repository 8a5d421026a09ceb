"""`Mixed` with Shampoo and SOAP on ranks: each parameter gets the bits that its algorithm alone would give it."""

from typing import Any

import pytest
import torch
from runs import Run, full, same

from block_optim import SOAP, AdamW, Mixed, Shampoo
from ragged_shard.testing import record_collectives, run_ranks

SHAPES = ((12, 6), (9, 5), (6, 8), (3, 8, 6), (7,), (10, 3))
OPTIONS = {"max_preconditioner_dim": 4, "precondition_frequency": 2}
CHOICES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "shampoo": (Shampoo, OPTIONS, (0, 1, 4)),
    "soap": (SOAP, OPTIONS, (2, 3)),
    "adamw": (AdamW, {}, (5,)),
}


class Both:
    """Makes a `Mixed` of the choices; its block policy asks each parameter's algorithm."""

    def __new__(cls, named, lr):
        groups = [
            {"params": [named[i] for i in numbers], "algorithm": name, **options}
            for name, (_, options, numbers) in CHOICES.items()
        ]
        return Mixed(groups, lr=lr)

    @staticmethod
    def block_policy(lr):
        policies = {
            f"p{i}": kind.block_policy(lr=lr, **options)
            for kind, options, numbers in CHOICES.values()
            for i in numbers
        }
        return lambda name, param: policies[name](name, param)


class Apart:
    """The same choices as optimizers of their own, behind the calls that a run makes."""

    def __init__(self, named, lr):
        self.parts = [k([named[i] for i in ns], lr=lr, **options) for k, options, ns in CHOICES.values()]
        self.state = {p: o.state[p] for o in self.parts for p in o.state}

    block_policy = Both.block_policy

    def step(self):
        for optimizer in self.parts:
            optimizer.step()


def trained(kind, layout):
    run = Run(kind, layout, shapes=SHAPES, lr=0.1).steps(0, 4)
    run.give(4, without=(0,))
    with record_collectives() as record:
        run.optimizer.step()
    if kind is Both:
        run.optimizer.synchronize()
        moving = [o for o in run.optimizer.optimizers.values() if getattr(o, "bytes_per_step", 0)]
        assert not moving or layout not in ("plain", "planned")
        # Finite? And, once for each algorithm that sends something, who has gradients.
        assert record.kinds.count("all_reduce") == (layout != "plain") + len(moving)
    return run.result()


def alone_and_mixed(layout):
    return trained(Apart, layout), trained(Both, layout)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layout", ["elements", "rows", "shard", "planned"])
def test_mixed_gives_the_bits_of_each_algorithm_alone_and_of_one_process(layout, world_size):
    expected = trained(Apart, "plain")
    same(trained(Both, "plain"), expected)
    for alone, together in run_ranks(world_size, alone_and_mixed, layout):
        same(alone, expected)
        same(together, expected)


def bad_gradient():
    run = Run(Both, "elements", shapes=SHAPES, lr=0.1).steps(0, 2)
    before = [full(p.detach()).clone() for p in run.params]
    run.give(2)
    grad = run.params[2].grad.to_local()
    if grad.numel():
        grad.view(-1)[0] = torch.nan
    run.optimizer.step()
    assert run.optimizer.skipped_steps == 1
    assert all(torch.equal(a, full(b.detach())) for a, b in zip(before, run.params, strict=True))
    return run.optimizer.optimizers["shampoo"].bytes_per_step


def test_a_bad_gradient_of_one_algorithm_skips_all_on_every_rank():
    assert len(set(run_ranks(3, bad_gradient))) == 1


def test_mixed_says_where_its_block_policy_is_to_be_had():
    with pytest.raises(TypeError, match="use block_policy_for"):
        Mixed.block_policy()
