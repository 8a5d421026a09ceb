"""Gradients in CPU memory, shards on the (simulated) device, whose optimizer brings gradients and states."""

import pytest
import torch
from runtime_helpers import BF16, device, locals_of, loss_of, mesh_of, same_bits, seeded, step_of, tokens
from torch import nn

import block_optim
from fsdp_runtime import OffloadPolicy, clip_grad_norm_, fully_shard
from fsdp_runtime.checkpoint import OffloadedOptimizer
from fsdp_runtime.memory import SelectiveOffloadPolicy

POLICY, NONE = SelectiveOffloadPolicy(gradients=True), OffloadPolicy()
OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01),
    "no states": lambda params: torch.optim.SGD(params, lr=0.01),
    "one bucket": lambda params: block_optim.AdamW(params, lr=0.01),
    "a bucket each": lambda params: block_optim.AdamW([{"params": [p]} for p in params], lr=0.01),
    "together": lambda params: block_optim.Mixed(
        [{"params": list(params), "algorithm": "adamw", "lr": 0.01}]
    ),
}


def build(policy, **options):
    model = seeded(width=16)
    for module in (*model.blocks, model):
        fully_shard(module, offload_policy=policy, **options)
    return model


def train(policy, kind="torch", clip=None, syncs=(True,), shape=(4,), **options):
    model = build(policy, mesh=mesh_of(*shape), mp_policy=BF16, **options)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    if policy is POLICY:
        optimizer = OffloadedOptimizer(optimizer, **({"bucket_bytes": 3000} if "torch" in kind else {}))
    norms = []
    for step in range(2):
        for number, sync in enumerate(syncs):
            model.set_requires_all_reduce(sync)
            loss_of(model, tokens(10 * step + number)).backward()
        if clip is not None:
            norms.append(clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return locals_of(model), norms


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_are_the_same_bits_with_every_optimizer_and_nothing_races(kind):
    with device("at random", device="cpu:0"):
        assert same_bits(train(POLICY, kind)[0], train(NONE, kind)[0])


@pytest.mark.parametrize("options", [
    {"clip": 0.1, "syncs": (True, True)}, {"clip": 0.1, "shape": (2, 2), "syncs": (False, True)},
], ids=str)  # fmt: skip
def test_clipping_accumulation_and_replicas_give_the_same_bits(options):
    with device("late", device="cpu:0"):
        expected, norms = train(NONE, **options)
        values, same = train(POLICY, **options)
    assert same_bits(values, expected)
    assert norms == same


def test_gradients_take_no_memory_on_the_device():
    held = {}
    for policy in (NONE, POLICY):
        with device(device="cpu:0") as found:
            model = build(policy)
            loss_of(model, tokens()).backward()
            model.zero_grad()
            before = sum(found.pools.used.values())
            loss_of(model, tokens()).backward()
            held[policy is POLICY] = sum(found.pools.used.values()) - before
    assert held[False] >= sum(param.to_local().nbytes for param in model.parameters())
    assert held[True] == 4 * len(list(model.parameters()))  # a NaN each


def test_a_gradient_shows_nan_and_other_users_of_it_raise():
    with device(device="cpu:0"):
        model = build(POLICY)
        loss_of(model, tokens()).backward()
        assert all(param.grad.to_local().isnan().all() for param in model.parameters())
        with pytest.raises(RuntimeError, match="more than one element"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(
            RuntimeError, match=r"AdamW: the gradients of .* are in CPU memory .*OffloadedOptimizer"
        ):
            optimizer.step()
        before = locals_of(model)
        model.zero_grad()
        optimizer.step()
        assert same_bits(before, locals_of(model))


def test_a_gradient_that_is_not_finite_skips_the_step():
    with device("late", device="cpu:0"):
        model, seen = build(POLICY), []
        optimizer = OffloadedOptimizer(OPTIMIZERS["a bucket each"](list(model.parameters())))
        (loss_of(model, tokens()) * float("inf")).backward()
        before = locals_of(model)
        optimizer.step()
        assert same_bits(before, locals_of(model))
        optimizer.zero_grad()
        model.set_all_reduce_hook(lambda flat: seen.append(flat.mul_(0.5)))
        step_of(model, optimizer)
        assert not same_bits(before, locals_of(model))
        assert seen
        assert all(flat.is_pinned() or flat.device.type == "cpu" for flat in seen)
