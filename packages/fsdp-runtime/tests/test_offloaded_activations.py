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

from fsdp_runtime import fully_shard
from fsdp_runtime.memory import activations
from fsdp_runtime.memory.activations import OffloadActivations
from ragged_shard.device import device_layer
from ragged_shard.testing import on_ranks, simulated_ranks


class Block(nn.Module):
    """Saves its input, views of one storage, an expanded tensor and its own parts."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.register_buffer("table", torch.rand(5, width))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        gate = x.mean(-1, keepdim=True).expand_as(x)
        return torch.tanh(x + self.out(torch.tanh(q) * torch.sigmoid(k) * v * gate * self.table))


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


class Offloading(nn.Module):
    """A sharded model whose forward runs inside of the context."""

    def __init__(self, model, ahead):
        super().__init__()
        self.model, self.offload = model, OffloadActivations(model, ahead=ahead)

    def forward(self, *args, **kwargs):
        with self.offload:
            return self.model(*args, **kwargs)

    def set_is_last_backward(self, value):
        self.model.set_is_last_backward(value)


def build(ahead: int | None = 4, **options) -> Any:
    model = seeded(Net, **options)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model if ahead is None else Offloading(model, ahead)


def step(model, number, optimizer=None, **options):
    loss_of(model, tokens(number), **options).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


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


def failed(model):
    def fail(x):
        raise KeyError("on purpose")

    net = getattr(model, "model", model)
    net.between = fail
    with pytest.raises(KeyError):
        model(tokens())
    net.between = lambda x: x
    step(model, 0)


def evaluated_between(model):
    for number in range(2):
        loss = loss_of(model, tokens(number))
        with torch.inference_mode():
            model(tokens())
        loss.backward()


RUNS = (
    two_forwards_at_a_time, the_graph_twice, other_orders, without_gradients, failed, evaluated_between, trained,
)  # fmt: skip


def values_of(model):
    """This rank's parameters and gradients."""
    return locals_of(model) + [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]


def values_after(run, **options):
    model = build(**options)
    run(model)
    return values_of(model), model


@pytest.mark.parametrize("ahead", [1, pytest.param(8, marks=pytest.mark.long)])
def test_parameters_and_gradients_are_the_same_bits_and_no_access_is_a_race(ahead):
    expected = []
    with simulated_ranks(4, rank=1):
        plain = build(None)
        for run in RUNS:
            run(plain)
            expected.append([value.clone() for value in values_of(plain)])
    with device():
        model, moved = build(ahead), 0
        for run, wanted in zip(RUNS, expected, strict=True):
            run(model)
            assert model.offload.bytes_out > moved, run
            moved = model.offload.bytes_out
            assert same_bits(values_of(model), wanted), run
        assert model.offload.bytes_in > 0


@pytest.mark.parametrize("kind", [pytest.param("reentrant", marks=pytest.mark.long), "not reentrant"])
def test_of_a_checkpoint_the_inputs_move(kind):
    with device():
        expected, _ = values_after(trained, ahead=None, recompute=kind)
        values, model = values_after(trained, recompute=kind)
        assert same_bits(values, expected)
        moved = model.offload.bytes_out
        assert moved > 0
        _, whole = values_after(trained)
        assert 3 * moved < whole.offload.bytes_out


def test_activations_leave_the_device_until_backward():
    sizes: dict[str, list[int]] = {"activations": [], "after backward": []}
    for ahead in (None, 2):
        with device() as found:
            model = build(ahead)
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
        model: Any = fully_shard(Block(16))
        offload = OffloadActivations(model)
        with offload:
            model(torch.ones(2, 5, 16, requires_grad=True)).sum().backward()
        # x; q, k and v in one storage; the gate before it is expanded; tanh twice, sigmoid and four products.
        assert offload.bytes_out <= 10 * 4 * (16 + 3 * 16 + 1 + 3 * 16 + 4 * 16)


def test_a_graph_that_ends_while_copies_are_in_flight_frees_memory_after_them():
    with device() as found:
        model = build()
        loss = loss_of(model, tokens())
        del loss
        step(model, 0)
        kept = []
        handle = model.model.head.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        loss, known = loss_of(model, tokens()), weakref.ref(model)
        torch.autograd.grad(loss, kept, retain_graph=True)  # others come, and are not used
        handle.remove()
        kept.clear()
        del model, loss, handle
        gc.collect()
        assert known() is None
        found.raise_late()


def test_a_change_in_place_before_the_copy_has_ended_is_refused_and_a_later_one_changes_nothing():
    def spoil(x):
        if not inputs:
            layer.wait(layer.record(model.offload._stream))  # else the change is a race too
            x.mul_(2)
        inputs.append(x)
        return x

    with device():
        model, inputs, layer = build(ahead=1000), list[Any](), device_layer("cpu")
        model.model.between = spoil
        with pytest.raises(RuntimeError, match=r"shape \(2, 5, 16\) .* changed in place"):
            step(model, 0)
    gradients = []
    for ahead in (None, 1):
        with device():
            model = build(ahead)
            inputs = []
            model_of = model if ahead is None else model.model
            model_of.between = lambda x, inputs=inputs: inputs.append(x) or x
            loss = loss_of(model, tokens())
            if ahead is not None:
                with torch.no_grad():
                    inputs[0].mul_(2)
            loss.backward()
            gradients.append(values_of(model))
    assert same_bits(*gradients)


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(ValueError, match="no module of the model is sharded"):
        OffloadActivations(nn.Linear(2, 2))


@on_ranks(2)
def test_on_a_cpu_nothing_moves():
    model = fully_shard(seeded())
    offload = OffloadActivations(model)
    with offload:
        loss_of(model, tokens()).backward()
    assert offload.bytes_out == 0


class OnMesh(nn.Linear):
    """Computes with DTensors, as under tensor parallelism."""

    def forward(self, x):
        mesh = init_device_mesh("cpu", (4,))
        squared: Any = DTensor.from_local(super().forward(x), mesh, [Replicate()], run_check=False).pow(2)
        return squared.to_local()


def test_a_dtensor_moves_by_its_local_tensor():
    gradients = []
    for ahead in (None, 1):
        with device():
            torch.manual_seed(0)
            model: Any = fully_shard(OnMesh(16, 16))
            run = model if ahead is None else Offloading(model, ahead)
            run(torch.ones(3, 16, requires_grad=True)).sum().backward()
            gradients.append(model.weight.grad.to_local().clone())
            if ahead:
                assert run.offload.bytes_out == 2 * 3 * 16 * 4
    assert torch.equal(*gradients)
