"""Activations in CPU memory between forward and backward, on the simulated device: no race, the same bits."""

import gc
import weakref
from typing import Any

import pytest
import torch
from runtime_helpers import Body, device, locals_of, loss_of, same_bits, seeded, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp_runtime import OffloadPolicy, fully_shard
from fsdp_runtime._schedule import activations
from fsdp_runtime._schedule.model import member_of
from fsdp_runtime.memory import SelectiveOffloadPolicy

POLICY, NONE = SelectiveOffloadPolicy(activations=True), OffloadPolicy()


class Block(nn.Module):
    """Saves its input, views of one storage, an expanded tensor and its own parts."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.register_buffer("table", torch.rand(5, width))
        self.spoils = False

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        gate = x.mean(-1, keepdim=True).expand_as(x)
        y = torch.tanh(x + self.out(torch.tanh(q) * torch.sigmoid(k) * v * gate * self.table))
        return y.mul_(2) if self.spoils else y


class Net(Body):
    def __init__(self, recompute="", **options):
        super().__init__(width=16, blocks=4, **options)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.recompute = recompute
        self.between = lambda x: x

    def forward(self, tokens, order=(0, 1, 2, 3)):
        x = self.embed(tokens)
        for index in order:
            if self.recompute:
                x = checkpoint(self.blocks[index], x, use_reentrant=self.recompute == "reentrant")
            else:
                x = self.blocks[index](x)
            x = self.between(x)
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def _small_tensors_too(monkeypatch):
    monkeypatch.setattr(activations, "SMALLEST", 1)


def build(blocks=POLICY, root=NONE, **options):
    model = seeded(Net, **options)
    for block in model.blocks:
        fully_shard(block, offload_policy=blocks)
    return fully_shard(model, offload_policy=root)


def store_of(model):
    return member_of(model).passes.activations


def step(model, number, optimizer=None, **options):
    loss_of(model, tokens(number), **options).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model):
    for number in range(4):
        model.set_requires_gradient_sync(number % 2 == 1)
        step(model, number)


def two_forwards_at_a_time(model):
    for number in range(2):
        losses = [loss_of(model, tokens(10 * number + i)) for i in range(2)]
        for loss in losses:
            model.set_is_last_backward(loss is losses[-1])
            loss.backward()


def the_graph_twice(model):
    loss = loss_of(model, tokens())
    loss.backward(retain_graph=True)
    loss.backward()


def other_orders(model):
    for order in ((0, 1, 2, 3), (3, 0), (1, 1, 2), (0, 1, 2, 3)):
        step(model, 0, order=order)


def without_gradients(model):
    with torch.no_grad():
        model(tokens(1))
    model(tokens(2))  # a loss that is never used
    step(model, 0)


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(2):
        step(model, number, optimizer)


RUNS = (accumulated, two_forwards_at_a_time, the_graph_twice, other_orders, without_gradients, trained)


def values_of(model):
    """This rank's parameters and gradients."""
    return locals_of(model) + [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]


def values_after(run, **options):
    model = build(**options)
    run(model)
    return values_of(model), model


@pytest.mark.parametrize("root", [pytest.param(NONE, marks=pytest.mark.long), POLICY], ids=["blocks", "all"])
def test_parameters_and_gradients_are_the_same_bits_and_no_access_is_a_race(root):
    with device("at random"):
        plain, model = build(blocks=NONE), build(root=root)
        moved = 0
        for run in RUNS:
            run(plain)
            run(model)
            assert store_of(model).bytes_out > moved, run
            moved = store_of(model).bytes_out
            assert same_bits(values_of(model), values_of(plain)), run
        assert store_of(model).bytes_in > 0


@pytest.mark.parametrize("kind", [pytest.param("reentrant", marks=pytest.mark.long), "not reentrant"])
def test_of_a_checkpoint_the_inputs_move_with_the_unit_around_it(kind):
    with device("late"):
        expected, _ = values_after(trained, blocks=NONE, recompute=kind)
        values, model = values_after(trained, root=POLICY, recompute=kind)
        assert same_bits(values, expected)
        moved = store_of(model).bytes_out
        assert moved > 0
        _, whole = values_after(trained, root=POLICY)
        assert 3 * moved < store_of(whole).bytes_out


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint_inside_the_unit_moves_its_input():
    with device():
        model = seeded(Net)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = fully_shard(Recomputed(block), offload_policy=POLICY)
        fully_shard(model)
        step(model, 0)
        assert store_of(model).bytes_out == 4 * tokens().numel() * 16 * 4


def test_activations_leave_the_device_until_backward():
    sizes: dict[str, list[int]] = {"activations": [], "after backward": []}
    for policy in (NONE, POLICY):
        with device() as found:
            model = build(policy, policy)
            for number in range(3):
                model.zero_grad()
                before = sum(found.pools.used.values())
                loss = loss_of(model, tokens(number))
                forward = sum(found.pools.used.values()) - before
                loss.backward()
                del loss
            sizes["activations"].append(forward)
            sizes["after backward"].append(sum(found.pools.used.values()))
    assert sizes["activations"][1] < 0.5 * sizes["activations"][0]
    assert sizes["after backward"][0] == sizes["after backward"][1]


def test_a_tensor_moves_once_although_several_operations_save_it():
    with device():
        model = build()
        step(model, 0)
        block_bytes = store_of(model).bytes_out / 4
        rows = tokens().numel() * 4
        # x; q, k and v in one storage; the gate before it is expanded; tanh twice, sigmoid and four products.
        assert block_bytes <= rows * (16 + 3 * 16 + 1 + 3 * 16 + 4 * 16)


def test_activations_that_came_and_are_not_used_are_freed_after_their_copies():
    with device("late") as found:
        model, inputs = build(), []

        def doubled(x):  # in new memory, so that the last block finds all of its own on the device
            inputs.append(2 * x)
            return inputs[-1]

        model.between = doubled
        for number in range(2):
            step(model, number)
        inputs.clear()
        loss = loss_of(model, tokens())
        torch.autograd.grad(loss, inputs[2])  # ends in the last block, while those of the one before come
        assert not store_of(model)._coming
        found.raise_late()


def test_a_model_that_ends_while_copies_are_in_flight_frees_memory_after_them():
    with device("late") as found:
        model = build()
        loss = loss_of(model, tokens())
        assert store_of(model)._leaving
        known = weakref.ref(model)
        del model, loss
        gc.collect()
        assert known() is None
        found.raise_late()


def test_changes_in_place_and_other_hooks_are_refused_by_name():
    with device():
        model = build()
        model.blocks[1].spoils = True
        with pytest.raises(RuntimeError, match=r"shape \(2, 5, 16\) .* changed in place"):
            step(model, 0)
        model.blocks[1].spoils = False
        step(model, 0)
        hooks = torch.autograd.graph.save_on_cpu()
        with hooks, pytest.raises(RuntimeError, match=r"blocks\.0: its policy .*save_on_cpu"):
            model(tokens())
        step(model, 0)


def test_after_a_failed_forward_the_next_step_has_the_same_bits():
    def fail_first(model):
        def fail(x):
            raise KeyError("on purpose")

        model.between = fail
        with pytest.raises(KeyError):
            model(tokens())
        model.between = lambda x: x
        trained(model)

    with device("late"):
        expected, _ = values_after(trained, blocks=NONE)
        values, _ = values_after(fail_first, root=POLICY)
        assert same_bits(values, expected)


def test_an_evaluation_in_inference_mode_between_forward_and_backward_changes_no_bit():
    def evaluated_between(model):
        for number in range(2):
            loss = loss_of(model, tokens(number))
            with torch.inference_mode():
                model(tokens())
            loss.backward()

    with device("late"):
        expected, _ = values_after(evaluated_between, blocks=NONE)
        values, _ = values_after(evaluated_between, root=POLICY)
        assert same_bits(values, expected)


class OnMesh(nn.Linear):
    """Computes with DTensors, as under tensor parallelism."""

    def forward(self, x):
        mesh = init_device_mesh("cpu", (4,))
        squared: Any = DTensor.from_local(super().forward(x), mesh, [Replicate()], run_check=False).pow(2)
        return squared.to_local()


def test_a_dtensor_moves_by_its_local_tensor():
    gradients = []
    for policy in (NONE, POLICY):
        with device():
            torch.manual_seed(0)
            inner: Any = fully_shard(OnMesh(16, 16), offload_policy=policy)
            model: Any = fully_shard(nn.Sequential(inner))
            model(torch.ones(3, 16, requires_grad=True)).sum().backward()
            gradients.append(model[0].weight.grad.to_local().clone())
            if policy is POLICY:
                assert store_of(model).bytes_out == 2 * 3 * 16 * 4
    assert torch.equal(*gradients)
