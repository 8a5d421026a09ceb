"""Optimizers, clipping and loss scaling on ragged parameters, bit by bit against the unsharded run."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import RaggedShard, distribute_like, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

SHAPES = [(24, 5), (12,), (4, 6, 3), (12, 1), (1, 7)]
STEPS = 4


def placements_of(ranks, two_d=False):
    """One sharding for each shape: uneven, empty shares, several prefix dims, one holder."""
    units = {2: (1, 3), 3: (3, 0, 1)}[ranks]
    hot = (0,) * (ranks - 1) + (1,)
    found = [
        RaggedShard((0,), units), RaggedShard((0,), units), RaggedShard((0, 1), units), RaggedShard((0,), hot),
        RaggedShard((0,), hot),
    ]  # fmt: skip
    return [(Replicate(), p) if two_d else (p,) for p in found]


def make(mesh, placements):
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(shape, generator=generator) for shape in SHAPES]
    grads = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]
    plain = [nn.Parameter(w.clone()) for w in full]
    ragged = [
        nn.Parameter(distribute_tensor(w, mesh, p, src_data_rank=None))
        for w, p in zip(full, placements, strict=True)
    ]
    return plain, ragged, grads


def set_grads(params, grads, scale=1.0):
    for param, grad in zip(params, grads, strict=True):
        param.grad = distribute_like(grad * scale, param, src_data_rank=None)


def compare(plain, ragged, ulp=0, name=""):
    for a, b in zip(plain, ragged, strict=True):
        got, wanted = b.full_tensor(), a.detach()
        if not ulp:
            assert torch.equal(got, wanted), (name, (got - wanted).abs().max())
        else:
            next_up = torch.nextafter(wanted, torch.full_like(wanted, math.inf)) - wanted
            assert ((got - wanted).abs() <= ulp * next_up.abs() * 1.0001).all(), name


def train(mesh_shape, optimizer, ulp=0, name="", steps=STEPS):
    """Some steps on a mesh, bit by bit those of plain tensors and without communication."""
    mesh = rank_mesh(*mesh_shape)
    plain, ragged, grads = make(mesh, placements_of(mesh_shape[-1], len(mesh_shape) == 2))
    theirs, ours = optimizer(plain), optimizer(ragged)
    for step in range(steps):
        set_grads(plain, grads[step])
        set_grads(ragged, grads[step])
        with record_collectives() as record:
            ours.step()
        assert record.kinds == [], name
        theirs.step()
        ours.zero_grad(set_to_none=step % 2 == 0)
    compare(plain, ragged, ulp, name)
    for a, b in zip(plain, ragged, strict=True):
        for key, value in theirs.state[a].items():
            found = ours.state[b][key]
            if getattr(found, "ndim", 0):
                assert found.placements == b.placements
                if not ulp:
                    assert torch.equal(found.full_tensor(), value), (name, key)


def adamw(**kwargs):
    return functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, **kwargs)


EXACT = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD foreach": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "AdamW for-loop": adamw(foreach=False),
    "AdamW foreach": adamw(foreach=True),
    "AdamW amsgrad foreach": adamw(foreach=True, amsgrad=True),
    "AdamW maximize for-loop": adamw(foreach=False, maximize=True),
    "Adam foreach": functools.partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "Adagrad foreach": functools.partial(torch.optim.Adagrad, lr=1e-2, foreach=True),
    "RMSprop foreach": functools.partial(torch.optim.RMSprop, lr=1e-2, foreach=True),
    "Adamax for-loop": functools.partial(torch.optim.Adamax, lr=1e-2, foreach=False),
    "NAdam foreach": functools.partial(torch.optim.NAdam, lr=1e-2, foreach=True),
    "RAdam foreach": functools.partial(torch.optim.RAdam, lr=1e-2, foreach=True),
    "Adadelta foreach": functools.partial(torch.optim.Adadelta, lr=1e-2, foreach=True),
    "ASGD foreach": functools.partial(torch.optim.ASGD, lr=1e-2, foreach=True),
    "Rprop foreach": functools.partial(torch.optim.Rprop, lr=1e-2, foreach=True),
    "Rprop for-loop": functools.partial(torch.optim.Rprop, lr=1e-2, foreach=False),
}
REFUSED = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}  # rows of test_refusals.py


def test_every_optimizer_of_torch_is_tested_or_refused():
    named = {name.split()[0] for name in EXACT} | {"AdamW", "Adam", "SGD"} | REFUSED
    found = {name for name in torch.optim.__all__ if name.lower() != name} - {"Optimizer"}
    assert found == named


every_mesh = pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)


@every_mesh
@on_ranks("mesh_shape")
def test_optimizers_give_bit_equal_parameters_and_states_without_communication(mesh_shape):
    for name, optimizer in EXACT.items():
        train(mesh_shape, optimizer, name=name)


@every_mesh
@on_ranks("mesh_shape")
def test_fused_optimizers_agree_but_for_the_ulps_of_simd_tails(mesh_shape):
    for optimizer in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        fused = functools.partial(optimizer, lr=1e-2, weight_decay=0.1, fused=True)
        for steps in (1, STEPS):
            train(mesh_shape, fused, ulp=steps, name=optimizer.__name__, steps=steps)


@pytest.mark.parametrize("fused", [True, False])
@on_ranks(3)
def test_a_tensor_learning_rate_and_a_schedule_work(fused):
    mesh = rank_mesh(3)
    plain, ragged, grads = make(mesh, placements_of(3))
    for params in (plain, ragged):
        optimizer = torch.optim.AdamW(
            params, lr=torch.tensor(1e-2), fused=fused, foreach=False if not fused else None
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(2):
            set_grads(params, grads[step])
            optimizer.step()
            schedule.step()
    compare(plain, ragged, ulp=2 if fused else 0)


def clip(mesh_shape, norm_type, foreach):
    mesh = rank_mesh(*mesh_shape)
    plain, ragged, grads = make(mesh, placements_of(mesh_shape[-1], len(mesh_shape) == 2))
    for max_norm in (0.5, 1e9):
        set_grads(plain, grads[0])
        set_grads(ragged, grads[0])
        with record_collectives() as record:
            got = nn.utils.clip_grad_norm_(ragged, max_norm, norm_type, foreach=foreach)
        ranks = mesh_shape[-1]
        case = (norm_type, foreach, max_norm)
        assert len(record.kinds) == (len(SHAPES) if foreach is False else 1), case
        assert all(event.ranks == ranks for event in record.events)
        wanted = nn.utils.clip_grad_norm_(plain, max_norm, norm_type, foreach=foreach)
        total = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert total.item() == pytest.approx(wanted.item(), rel=1e-6), case
        assert got.item() == total.item()
        assert bool(got < math.inf)
        for a, b in zip(plain, ragged, strict=True):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=2e-6, atol=1e-7)
    assert nn.utils.get_total_norm([p.grad for p in ragged]).item() == pytest.approx(
        nn.utils.get_total_norm([p.grad for p in plain]).item(), rel=1e-6
    )
    nn.utils.clip_grad_value_(ragged, 0.1)
    nn.utils.clip_grad_value_(plain, 0.1)
    for a, b in zip(plain, ragged, strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)


@every_mesh
@on_ranks("mesh_shape")
def test_clip_grad_norm_is_right_to_1e_6_with_one_collective_for_the_list(mesh_shape):
    for norm_type, foreach in itertools.product((1.0, 2.0, math.inf), (True, False, None)):
        clip(mesh_shape, norm_type, foreach)


@pytest.mark.skipif(not SUBCLASSES_DTENSOR, reason="torch < 2.12: a list with a DTensor is DTensor's alone")
@on_ranks(3)
def test_ragged_and_fsdp2_parameters_are_stepped_in_one_list():
    mesh = rank_mesh(3)
    plain, ragged, grads = make(mesh, placements_of(3))
    theirs: Any = nn.Parameter(torch_distribute_tensor(plain[0].detach().clone(), mesh, [Shard(0)]))
    params = [theirs, *ragged[1:]]
    set_grads(plain, grads[0])
    set_grads(params, grads[0])
    for optimizer in (adamw(foreach=True), adamw(foreach=False), adamw(fused=True)):
        ours = optimizer(params)
        ours.step()
        optimizer(plain).step()
        compare(plain[1:], params[1:], ulp=4)
        torch.testing.assert_close(theirs.full_tensor(), plain[0].detach())


def scaled(mesh_shape, fused):
    mesh = rank_mesh(*mesh_shape)
    plain, ragged, grads = make(mesh, placements_of(mesh_shape[-1], len(mesh_shape) == 2))
    grads[1][0][23, 4] = math.inf  # one rank's alone
    finals = []
    for params in (plain, ragged):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        optimizer = torch.optim.SGD(params, lr=0.1, fused=fused)
        scaler.scale(torch.tensor(1.0))
        for step in range(STEPS):
            set_grads(params, grads[step], scaler.get_scale())
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        finals.append(scaler.get_scale())
    assert finals[0] == finals[1] == 4.0
    compare(plain, ragged, ulp=STEPS if fused else 0)


@every_mesh
@on_ranks("mesh_shape")
def test_grad_scaler_skips_the_same_steps_on_all_ranks(mesh_shape):
    for fused in (True, False):
        scaled(mesh_shape, fused)


@on_ranks(3)
def test_a_fused_step_unscales_by_itself_and_skips_parameters_without_gradient():
    mesh = rank_mesh(3)
    plain, ragged, grads = make(mesh, placements_of(3))
    for params in (plain, ragged):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
        scaler.scale(torch.tensor(1.0))
        set_grads(params, grads[0], 2.0)
        params[0].grad = None
        scaler.step(optimizer)  # unscales inside the fused step
        scaler.update()
    compare(plain, ragged, ulp=2)
