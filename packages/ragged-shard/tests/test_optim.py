"""Every optimizer of torch on ragged parameters, bit by bit against the unsharded run."""

import functools
import math

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate

from ragged_shard import RaggedShard, distribute_like, distribute_tensor
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
    "Adamax for-loop": functools.partial(torch.optim.Adamax, lr=1e-2, foreach=False),
    "Rprop for-loop": functools.partial(torch.optim.Rprop, lr=1e-2, foreach=False),
    **{
        f"{name} foreach": functools.partial(getattr(torch.optim, name), lr=1e-2, foreach=True)
        for name in ("Adam", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop")
    },
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
