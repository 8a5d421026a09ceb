"""Updates inside backward: the values of the same optimizers after it, in less memory."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from runtime_helpers import Body, locals_of, loss_of, same_bits, seeded, shard, tokens
from torch import nn

import block_optim
from fsdp_runtime import clip_grad_norm_, fully_shard, optimizer_in_backward, step_rest
from fsdp_runtime.checkpoint import get_full_optimizer_state_dict, set_full_optimizer_state_dict
from fsdp_runtime.train.live_bytes import LiveBytes
from ragged_shard.testing import on_ranks, rank_mesh, run_ranks

MAKES = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "block adamw": lambda params: block_optim.AdamW(params, lr=0.01),
    "muon": lambda params: block_optim.Mixed(
        [
            {"params": [p for p in params if p[1].ndim == 2], "algorithm": "muon"},
            {"params": [p for p in params if p[1].ndim != 2], "algorithm": "adamw"},
        ],
        lr=0.01,
    ),
}


def sharded(replicas=1, ends=False, **options):
    mesh = None
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = rank_mesh(*shape, names=("replicate", "shard"))
    model = seeded(**options)
    if ends:
        fully_shard([model.norm, model.head], mesh=mesh)
    return shard(model, mesh=mesh)


def after_backward(model, make):
    """The same optimizers, one for each unit, after backward."""
    units: dict[str, list[Any]] = {}
    for name, param in model.named_parameters():
        units.setdefault(name[:9] if name.startswith("blocks.") else "", []).append((name, param))
    return [make(params) for params in units.values()]


def step_all(optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
@on_ranks("ranks")
def test_updates_are_those_of_the_same_optimizers_after_backward(ranks, replicas):
    for kind in MAKES if replicas == 1 else ("adamw", "muon"):
        check_updates(kind, replicas, "" if replicas > 1 else "set_requires_gradient_sync")
    check_updates("adamw", replicas, "set_is_last_backward")
    if replicas > 1:
        check_updates("adamw", replicas, "set_requires_all_reduce")


def check_updates(kind, replicas, announces):
    """With microbatches that this method announces, or without."""
    ends = kind != "muon"  # which has matrices and vectors in each unit
    ours, plain = sharded(replicas, ends), sharded(replicas, ends)
    inside, after = optimizer_in_backward(ours, MAKES[kind]), after_backward(plain, MAKES[kind])
    for step in range(2):
        for model in (ours, plain):
            for last in (False, True) if announces else (True,):
                if announces:
                    getattr(model, announces)(last)
                loss_of(model, tokens(10 * step + last)).backward()
            if model is ours:
                assert all(param.grad is None for param in model.parameters())
                step_rest(inside)
            else:
                step_all(after)
    assert same_bits(locals_of(ours), locals_of(plain)), kind


def peak(in_backward):
    model = seeded(width=64, blocks=10)
    for block in model.blocks:
        fully_shard(block)
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    fully_shard(model)
    make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    optimizers = optimizer_in_backward(model, make) if in_backward else [make(model.parameters())]
    for step in range(2):
        loss = loss_of(model, tokens(step))
        with LiveBytes() as live:
            loss.backward()
            step_rest(optimizers)
    return live.peak


def test_at_most_two_units_gradients_are_alive():
    block = 4 * (64 * 64 + 64) // 2
    (inside, *_), (after, *_) = run_ranks(2, peak, True), run_ranks(2, peak, False)
    assert after - inside >= 7 * block


@on_ranks(2)
def test_schedulers_and_state_dicts_of_a_list_of_optimizers():
    """Through the optimizers' own state dicts, torch's functions, and this package's full states."""
    model, make = sharded(), MAKES["adamw"]
    optimizers = optimizer_in_backward(model, make)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    for step in range(2):
        loss_of(model, tokens(step)).backward()
        step_rest(optimizers)
        for scheduler in schedulers:
            scheduler.step()
    others = []
    for _ in range(3):
        other = sharded()
        other.load_state_dict(model.state_dict())
        others.append((other, optimizer_in_backward(other, make)))
    (_, own), (second, by_torch), (third, by_full) = others
    for optimizer, source in zip(own, optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    states = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizers))
    assert set(states["state"]) == set(dict(model.named_parameters()))
    dcp.set_optimizer_state_dict(second, by_torch, states)
    set_full_optimizer_state_dict(third, by_full, get_full_optimizer_state_dict(model, optimizers))
    for trained, optims in ((model, optimizers), *others):
        assert {group["lr"] for optim in optims for group in optim.param_groups} == {0.0025}
        loss_of(trained, tokens(7)).backward()
        assert sum(len(optim.state) for optim in optims) == len(list(trained.parameters()))
    for params in zip(
        *(trained.parameters() for trained in (model, *(other for other, _ in others))), strict=True
    ):
        first, *rest = [param.to_local() for param in params]
        assert all(first.equal(local) for local in rest)


@on_ranks(2)
def test_parameters_outside_of_units_are_updated_in_step():
    model = seeded()
    fully_shard(model.blocks[0])
    optimizers = optimizer_in_backward(model, MAKES["foreach"])
    before = [param.detach().clone() for param in model.head.parameters()]
    loss_of(model, tokens(0)).backward()
    assert model.blocks[0].weight.grad is None
    assert all(param.equal(old) for param, old in zip(model.head.parameters(), before, strict=True))
    step_rest(optimizers)
    assert not any(param.equal(old) for param, old in zip(model.head.parameters(), before, strict=True))


class Sometimes(nn.Linear):
    """Takes its bias in every other call."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return nn.functional.linear(x, self.weight, self.bias if self.calls % 2 == 0 else None)


class Twice(Body):
    def forward(self, tokens, order=None):
        return super().forward(tokens, order=[0, 1, 0])


def twice(sometimes):
    models = []
    for _ in range(2):
        model = seeded(Twice)
        if sometimes:
            model.blocks[0].__class__ = Sometimes
        for block in model.blocks:
            fully_shard(block)
        models.append(fully_shard(model))
    ours, plain = models
    optimizer_in_backward(ours, MAKES["foreach"])
    loss_of(ours, tokens(0)).backward()
    after = after_backward(plain, MAKES["foreach"])
    loss_of(plain, tokens(0)).backward()
    step_all(after)
    assert same_bits(locals_of(ours), locals_of(plain))


@on_ranks(2)
def test_a_unit_that_runs_twice_is_updated_once_and_backward_after_it_is_refused():
    twice(False)
    with pytest.raises(
        RuntimeError, match=r"backward reaches blocks\.0 again after its parameters were updated"
    ):
        twice(True)


@on_ranks(1)
def test_clipping_and_what_it_cannot_do_are_refused():
    make = MAKES["adamw"]
    with pytest.raises(ValueError, match="no module of the model is sharded"):
        optimizer_in_backward(nn.Linear(2, 2), make)
    wrong: Any = list
    with pytest.raises(TypeError, match="make returned a list"):
        optimizer_in_backward(sharded(), wrong)
    model = sharded()
    optimizers = optimizer_in_backward(model, make)
    with pytest.raises(ValueError, match="updated in backward already"):
        optimizer_in_backward(model, make)
    loss_of(model, tokens()).backward()
    for clip in (lambda: clip_grad_norm_(list(model.parameters()), 1.0), lambda: model.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"optimizer_in_backward updates .*norm of all gradients"):
            clip()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0  # as the guide says
    step_rest(optimizers)
