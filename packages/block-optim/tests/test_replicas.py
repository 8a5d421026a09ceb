"""Ranks that hold the same parameters, as under DDP, divide the work on them; `test_layouts` compares the bits."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from runs import SHAPES, Mix, Run, run_of
from torch import nn

from block_optim import Muon
from block_optim.core import device as devices
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

MATRICES = ((24, 16), (16, 24), (16, 16), (40, 8), (3, 8, 6))


def sent(name):
    run = run_of(name, "replicas", shapes=MATRICES).steps(0, 1)
    run.give(1)
    with record_collectives() as record:
        run.optimizer.step(grad_norm=1.0)
    state = sum(n for key, n in run.optimizer.state_bytes().items() if key != "step")
    work = run.optimizer.assignment.domains[0].loads if "Muon" in name else ()
    return record.kinds, state, work


@pytest.mark.parametrize("name", ["Muon", "Shampoo", "SOAP"])
def test_only_updates_travel_and_each_rank_has_a_share_of_the_work(name):
    sizes = run_of(name, shapes=MATRICES).optimizer.state_bytes()
    alone = sum(n for key, n in sizes.items() if key != "step")
    results = run_ranks(3, sent, name)
    for kinds, _, work in results:
        assert kinds == ["all_reduce", "all_gather"]  # which gradients there are; the updates
        assert not work or max(work) < 0.5 * sum(work)
    states = [state for _, state, _ in results]
    if name == "Muon":
        assert states == [alone] * 3  # momenta stay where gradients are
    else:
        assert sum(states) < 1.7 * alone
        assert max(states) < alone


class Late:
    """A copy to the host that arrives when it is read."""

    def __init__(self, value):
        self._value = value.clone()

    def has_arrived(self):
        return False

    def read(self):
        return self._value


def disagreeing(name, late):
    run = run_of(name, "replicas").steps(0, 1)
    before = [p.detach().clone() for p in run.params]
    absent = (1,) if dist.get_rank() == 2 else ()
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(devices, "_stand_in", Late)
            run.step(1, without=absent)
        with pytest.raises(ValueError, match="p1: some ranks have a gradient and others none"):
            run.step(2, without=() if late else absent)
    assert late or all(map(torch.equal, before, run.params))


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "a device that runs ahead"])
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_a_gradient_that_one_rank_lacks_is_an_error_on_every_rank(name, late):
    run_ranks(3, disagreeing, name, late)


@pytest.mark.parametrize("name", ["NorMuon", "Shampoo", "SOAP"])
@on_ranks(3)
def test_copies_and_pickles_go_on_alike(name):
    run = run_of(name, "replicas").steps(0, 1)
    twins = [
        copy.deepcopy((run.params, run.optimizer)),
        pickle.loads(pickle.dumps((run.params, run.optimizer))),
    ]
    run.give(1)
    run.optimizer.step()
    for params, optimizer in twins:
        for p, q in zip(params, run.params, strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        assert all(map(torch.equal, params, run.params))


@on_ranks(2)
def test_what_is_no_mesh_of_the_parameters_device_is_refused():
    with pytest.raises(TypeError, match=r"replicate_mesh=.*: expected a DeviceMesh; .*DeviceMesh.from_group"):
        run_of("Muon", replicate_mesh=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"w0 is on meta, replicate_mesh is of 'cpu' devices"):
        Muon([("w0", nn.Parameter(torch.zeros(4, 4, device="meta")))], replicate_mesh=rank_mesh(2))
    mixed = Run(Mix(("muon", {"replicate_mesh": rank_mesh(2)})), shapes=SHAPES).steps(0, 1)
    assert mixed.optimizer.optimizers["muon"].replicate_mesh == rank_mesh(2)
