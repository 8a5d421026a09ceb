"""Ranks that hold the same parameters, as under DDP, divide the work on them; `test_fsdp2` compares the bits."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from block_optim import SOAP, Mixed, Muon, Shampoo
from block_optim.core import device as devices
from ragged_shard.testing import record_collectives, run_ranks

SHAPES = ((24, 16), (16, 24), (16, 16), (40, 8), (3, 8, 6))
SMALL = {"max_preconditioner_dim": 8, "precondition_frequency": 1}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (Muon, {}),
    "NorMuon": (Muon, {"normuon": True}),
    "Shampoo": (Shampoo, SMALL),
    "Shampoo, next to the step": (Shampoo, {**SMALL, "overlap": True}),
    "SOAP": (SOAP, SMALL),
}


def matrices():
    torch.manual_seed(0)
    return [(f"w{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(SHAPES)]


def built(name, **options):
    kind, own = KINDS[name]
    if dist.is_initialized():
        options["replicate_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    return kind(matrices(), lr=0.1, **own, **options)


def params(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def same(first, second):
    return all(map(torch.equal, first, second))


def step(optimizer, *numbers, without=()):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for i, p in enumerate(params(optimizer)):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = None if i in without else grad
        optimizer.step()
    return [p.detach().clone() for p in params(optimizer)]


def sent(name):
    optimizer = built(name)
    step(optimizer, 0)
    for p in params(optimizer):
        p.grad = torch.ones_like(p)
    with record_collectives() as record:
        optimizer.step(grad_norm=1.0)
    state = sum(n for key, n in optimizer.state_bytes().items() if key != "step")
    work = optimizer.assignment.domains[0].loads if isinstance(optimizer, Muon) else ()
    return record.kinds, state, work


@pytest.mark.parametrize("name", ["Muon", "Shampoo", "SOAP"])
def test_only_updates_travel_and_each_rank_has_a_share_of_the_work(name):
    alone = sum(n for key, n in built(name).state_bytes().items() if key != "step")
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


def without_some(name, absent):
    optimizer = built(name)
    return step(optimizer, 0), step(optimizer, 1, without=absent), step(optimizer, 2)


@pytest.mark.parametrize("name", KINDS)
def test_a_parameter_without_gradient_stays(name):
    optimizer = built(name)
    expected = step(optimizer, 0), step(optimizer, 1, without=(1, 4)), step(optimizer, 2)
    for result in run_ranks(3, without_some, name, (1, 4)):
        assert all(map(same, expected, result))


class Late:
    """A copy to the host that arrives when it is read."""

    def __init__(self, value):
        self._value = value.clone()

    def has_arrived(self):
        return False

    def read(self):
        return self._value


def disagreeing(name, late):
    optimizer = built(name)
    before = step(optimizer, 0)
    absent = (1,) if dist.get_rank() == 2 else ()
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(devices, "_stand_in", Late)
            step(optimizer, 1, without=absent)
        try:
            after = step(optimizer, 2, without=() if late else absent)
        except ValueError as error:
            after = [p.detach() for p in params(optimizer)]
            return str(error), late or same(before, after)
    return None


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "a device that runs ahead"])
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_a_gradient_that_one_rank_lacks_is_an_error_on_every_rank(name, late):
    for message, unchanged in run_ranks(3, disagreeing, name, late):
        assert "w1: some ranks have a gradient and others none" in message
        assert unchanged


def not_finite_on_one(name):
    optimizer = built(name)
    before = step(optimizer, 0)
    for p in params(optimizer):
        p.grad = torch.full_like(p, torch.nan if dist.get_rank() == 1 else 1.0)
    optimizer.step()
    return optimizer.skipped_steps, same(before, params(optimizer))


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(name):
    assert run_ranks(3, not_finite_on_one, name) == [(1, True)] * 3


def copied(name):
    optimizer = built(name)
    step(optimizer, 0)
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    return [step(each, 1, 2) for each in (optimizer, *twins)]


@pytest.mark.parametrize("name", ["NorMuon", "Shampoo", "SOAP"])
def test_copies_and_pickles_go_on_alike(name):
    optimizer = built(name)
    expected = step(optimizer, 0, 1, 2)
    for results in run_ranks(3, copied, name):
        assert all(same(expected, result) for result in results)


def save(name, folder):
    optimizer = built(name)
    step(optimizer, 0, 1)
    dcp.save({"optimizer": optimizer.state_dict()["state"]}, checkpoint_id=folder)


def load(name, folder):
    optimizer = built(name)
    state = optimizer.state_dict()
    dcp.load({"optimizer": state["state"]}, checkpoint_id=folder)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(params(optimizer), step(built(name), 0, 1), strict=True):
            p.copy_(value)
    return step(optimizer, 2)


@pytest.mark.parametrize("name", ["NorMuon", "Shampoo", "SOAP"])
def test_checkpoints_move_between_world_sizes(name, tmp_path):
    expected = step(built(name), 0, 1, 2)
    for saved, loaded in ((3, 1), (3, 2), (1, 3)):
        folder = tmp_path / str(saved)
        if not folder.exists():
            run_ranks(saved, save, name, folder)
        assert all(same(expected, result) for result in run_ranks(loaded, load, name, folder))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict(dict(matrices()))


def full_state(name):
    model = Model()
    optimizer = KINDS[name][0](
        model.parameters(), lr=0.1, replicate_mesh=init_device_mesh("cpu", (3,)), **KINDS[name][1]
    )
    step(optimizer, 0, 1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, optimizer, options=options), params(optimizer)


@pytest.mark.parametrize("name", ["NorMuon", "Shampoo", "SOAP"])
def test_a_full_state_dict_goes_on_in_one_process(name):
    state, values = run_ranks(3, full_state, name)[0]
    model = Model()
    optimizer = KINDS[name][0](model.parameters(), lr=0.1, **KINDS[name][1])
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)
    set_optimizer_state_dict(model, optimizer, state)
    assert same(step(built(name), 0, 1, 2), step(optimizer, 2))


def refused():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match=r"replicate_mesh=.*: expected a DeviceMesh; .*DeviceMesh.from_group"):
        Muon(matrices(), replicate_mesh=dist.group.WORLD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"w0 is on meta, replicate_mesh is of 'cpu' devices"):
        Muon([("w0", nn.Parameter(torch.zeros(4, 4, device="meta")))], replicate_mesh=mesh)
    groups = [{"params": [p], "algorithm": "muon", "replicate_mesh": mesh} for _, p in matrices()]
    optimizer = Mixed(groups, lr=0.1)
    step(optimizer, 0)
    return optimizer.optimizers["muon"].replicate_mesh == mesh


def test_what_is_no_mesh_of_the_parameters_device_is_refused():
    assert run_ranks(2, refused) == [True, True]
