"""Optimizers on a simulated device, where an access to memory without an order between streams raises."""

import io
import pickle

import pytest
import torch
from runs import MATRICES, Run, SmallBuckets

from block_optim import SOAP, Muon, Shampoo
from ragged_shard.testing import SimulatedDevice, simulated_ranks

LARGE = ((24, 40), (40, 24), (16, 16))


def run(kind, layout, steps=5, rank=1, **options):
    with SimulatedDevice() as device, simulated_ranks(4, rank=rank):
        Run(kind, layout, (4,), **options).steps(0, steps)
        return device.accesses


@pytest.mark.parametrize(
    ("layout", "normuon"), [("rows", False), ("shard", False), ("shard", True), ("whole", True)]
)
def test_muons_transfers_and_newton_schulz_have_an_order(layout, normuon):
    assert run(SmallBuckets, layout, shapes=MATRICES, lr=0.01, normuon=normuon, steps=3) > 200


@pytest.mark.parametrize("kind", [Muon, Shampoo])
def test_asking_which_ranks_have_a_gradient_has_an_order(kind):
    with SimulatedDevice() as device, simulated_ranks(4, rank=1):
        run = Run(kind, "elements", (4,), shapes=LARGE, lr=0.01)
        for step in range(3):
            run.step(step, without=(0,))
        assert device.accesses > 100


@pytest.mark.parametrize(("kind", "layout"), [(SOAP, "elements"), (Shampoo, "planned")])
def test_exchanges_of_blocks_have_an_order(kind, layout):
    options = {"max_preconditioner_dim": 16, "precondition_frequency": 1, "steps": 3}
    assert run(kind, layout, shapes=LARGE, lr=0.01, **options) > 500


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_state_dicts_have_an_order_after_a_step(kind):
    options = {"shapes": LARGE, "lr": 0.01, "precondition_frequency": 1}
    with SimulatedDevice(), simulated_ranks(4):
        run = Run(kind, "planned", (4,), **options).steps(0, 3)
        torch.save(run.optimizer.state_dict(), io.BytesIO())
        run.steps(3, 4)
        pickle.dumps(run.optimizer)
        run.steps(4, 5)
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        other = Run(kind, "planned", (4,), **options).steps(0, 3)
        other.optimizer.load_state_dict(run.optimizer.state_dict())
        other.steps(3, 5)
        other.optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(4)))]})
        other.optimizer.step()
