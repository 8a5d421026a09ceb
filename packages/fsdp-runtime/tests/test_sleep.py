"""Shards, gradients and optimizer states in CPU memory, and back into the same objects."""

from typing import Any

import pytest
import torch
from runtime_helpers import (
    OPTIMIZERS,
    BrokenTransport,
    Ops,
    device,
    loss_of,
    same_bits,
    seeded,
    shard,
    tokens,
)

from fsdp_runtime import (
    QuantizationPolicy,
    fully_shard,
    iter_full_params,
    load_safetensors,
    offload,
    reload,
    save_safetensors,
)
from fsdp_runtime.quantization import BlockInt8
from ragged_shard.testing import on_ranks


def train(kind, sleeps):
    model = shard(seeded(width=16))
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    params, losses = list(model.parameters()), []
    for step in range(3):
        loss = loss_of(model, tokens(step))
        loss.backward()
        if sleeps:
            assert offload(model, optimizer) > 0
            assert offload(model, optimizer) == 0
            held = [p.to_local().untyped_storage() for p in params if p.to_local().numel()]
            assert all(storage.nbytes() <= 8 for storage in held)
            assert all(p.grad is None and p.to_local().isnan().all() for p in params)
            reload(model, optimizer)
            reload(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert all(one is two for one, two in zip(params, model.parameters(), strict=True))
    return losses, [p.full_tensor().detach() for p in params]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_training_with_naps_gives_the_same_bits(kind):
    losses, values = train(kind, sleeps=False)
    again, same = train(kind, sleeps=True)
    assert same_bits(losses + values, again + same)


@on_ranks(2)
def test_each_of_them_is_offloaded_by_choice():
    model = shard(seeded())
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, tokens()).backward()
    optimizer.step()
    param = next(p for p in model.parameters() if p.to_local().numel())
    grad, moments = param.grad, optimizer.state[param]["exp_avg"]
    before = moments.to_local().clone()

    offload(model, optimizer, parameters=False, gradients=False)
    assert moments.to_local().untyped_storage().nbytes() == 0
    assert not param.to_local().isnan().any()
    assert param.grad is grad
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
    ):
        with pytest.raises(RuntimeError, match="the optimizer's states are offloaded"):
            use()
    assert not optimizer.state
    loss_of(model, tokens()).backward()
    reload(model, optimizer)
    assert optimizer.state[param]["exp_avg"].to_local().equal(before)

    offload(model, gradients=True, parameters=False)
    assert param.grad is None
    loss_of(model, tokens()).backward()
    with pytest.raises(RuntimeError, match="parameters have gradients since offload"):
        reload(model)
    with pytest.raises(RuntimeError, match="have gradients since the last offload"):
        offload(model, parameters=False)
    optimizer.zero_grad()
    reload(model)
    assert param.grad is grad
    optimizer.step()


@on_ranks(2)
def test_what_uses_parameters_while_they_are_offloaded_raises_by_name(tmp_path):
    pytest.importorskip("safetensors.torch")
    path = tmp_path / "files"
    model = shard(seeded())
    save_safetensors(model, path)
    state = model.state_dict()
    offload(model)
    for use in (
        lambda: loss_of(model, tokens()),
        model.blocks[0].unshard,
        model.state_dict,
        lambda: model.load_state_dict(state),
        lambda: iter_full_params(model),
        lambda: load_safetensors(model, path),
    ):
        with pytest.raises(
            (RuntimeError, ValueError, OSError), match=r"are offloaded; call fsdp_runtime.reload|no \*\.safe"
        ):
            use()
    param = next(p for p in model.parameters() if p.to_local().numel() > 1)
    with pytest.raises(RuntimeError, match="more than one element"):
        param.detach().add_(1)
    reload(model)
    assert loss_of(model, tokens()).equal(loss_of(seeded(), tokens()))
    load_safetensors(model, path)
    offload(model)
    reload(model)


@on_ranks(1)
def test_memory_that_numpy_holds_is_refused_and_nothing_is_lost():
    model = shard(seeded())
    param = next(p for p in model.parameters() if p.to_local().numel() > 1)
    kept = param.to_local().detach().numpy()
    with pytest.raises(RuntimeError, match="cannot be freed, since they are shared with numpy"):
        offload(model)
    assert loss_of(model, tokens()).isfinite()
    assert kept.size


@on_ranks(2)
def test_codes_sleep_too_and_gradients_that_wait_for_their_reduction_are_not_lost():
    model = seeded().requires_grad_(False)
    shard(model, quantization_policy=QuantizationPolicy(at_rest=BlockInt8(8)))
    before = loss_of(model, tokens())
    offload(model)
    reload(model)
    assert loss_of(model, tokens()).equal(before)
    model = shard(seeded())
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens()).backward()
    with pytest.raises(RuntimeError, match=r"gradients of \['Body', .* wait for their reduction"):
        offload(model)
    offload(model, gradients=False)
    reload(model)


def test_a_flat_buffer_is_one_copy_and_the_order_of_streams_holds():
    def note(op, args):
        if op is torch.ops.aten.copy_.default and args[0].nbytes > 100:
            copies.append(args[0])

    with device():
        model = fully_shard(seeded(width=16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            loss_of(model, tokens(step)).backward()
            copies: list[Any] = []
            with Ops(note):
                offload(model)
                assert len(copies) == 2  # one group: its shard, its gradients
                reload(model)
                assert len(copies) == 4
            offload(model, optimizer)
            reload(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


def test_shards_that_are_in_cpu_memory_anyway_stay_where_they_are():
    from fsdp_runtime import CPUOffloadPolicy

    with device(device="cpu:0"):
        model = fully_shard(seeded(), offload_policy=CPUOffloadPolicy())
        assert offload(model) == 0
        with pytest.raises(RuntimeError, match="are offloaded"):
            loss_of(model, tokens())
        reload(model)


@on_ranks(2)
def test_memory_that_others_may_still_read_after_a_failure_is_not_freed():
    broken: Any = BrokenTransport()
    model: Any = fully_shard(torch.nn.Linear(8, 6), transport=lambda _: broken)
    with pytest.raises(RuntimeError, match="a peer died"):
        model(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="a collective of Linear"):
        offload(model)
    assert model.weight.local.untyped_storage().nbytes()
