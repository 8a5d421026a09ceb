"""Shards, gradients and optimizer states in CPU memory, and back into the same objects."""

from typing import Any

import pytest
import torch
from runtime_helpers import BrokenTransport, Ops, device, loss_of, seeded, shard, tokens

from fsdp_runtime import fully_shard, iter_full_params, load_safetensors, offload, reload, save_safetensors
from ragged_shard.testing import on_ranks


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
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(RuntimeError, match="the optimizer's states are offloaded"):
            use()
    assert not optimizer.state
    loss_of(model, tokens()).backward()
    reload(model, optimizer)
    assert optimizer.state[param]["exp_avg"].to_local().equal(before)

    offload(model, gradients=True, parameters=False)
    assert param.grad is None
    loss_of(model, tokens()).backward()
    with pytest.raises(RuntimeError, match="reload: parameters of Body have gradients since"):
        reload(model)
    with pytest.raises(RuntimeError, match="have gradients since the last offload"):
        offload(model, parameters=False)
    optimizer.zero_grad()
    reload(model)
    assert param.grad is grad
    optimizer.step()

    assert offload(model, optimizer) > 0
    assert offload(model, optimizer) == 0
    assert param.to_local().untyped_storage().nbytes() <= 8
    assert param.to_local().isnan().all()
    reload(model, optimizer)


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
def test_memory_that_numpy_holds_stays():
    model = shard(seeded())
    param = next(p for p in model.parameters() if p.to_local().numel() > 1)
    kept, _ = param.to_local().detach().numpy(), offload(model)
    with pytest.raises(RuntimeError, match="are offloaded"):
        loss_of(model, tokens())
    reload(model)
    assert loss_of(model, tokens()).equal(loss_of(seeded(), tokens()))
    assert kept.any()


@on_ranks(2)
def test_gradients_that_wait_for_their_reduction_are_not_lost():
    for set_false in ("set_requires_gradient_sync", "set_is_last_backward"):
        model = shard(seeded())
        getattr(model, set_false)(False)
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
