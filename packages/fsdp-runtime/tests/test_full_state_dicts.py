"""Whole, plain tensors out of and into models and optimizers."""

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import Body, loss_of, seeded, shard, tokens

import block_optim
from fsdp_runtime import QuantizationPolicy, get_full_state_dict, set_full_state_dict
from fsdp_runtime.checkpoint import get_full_optimizer_state_dict, set_full_optimizer_state_dict
from fsdp_runtime.quantization import BlockInt8
from ragged_shard.testing import on_ranks


def on_meta():
    with torch.device("meta"):
        return Body()


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(3)
def test_a_full_state_dict_loads_into_a_model_on_meta(rank0_only):
    model, wanted = shard(seeded()), seeded().state_dict()
    found = get_full_state_dict(model, rank0_only=rank0_only, cpu_offload=True)
    if rank0_only and dist.get_rank():
        assert found == {}
    else:
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(value) for name, value in wanted.items())
    other = shard(on_meta())
    with pytest.raises(ValueError, match=r"blocks.0.weight: a tensor of shape"):
        set_full_state_dict(other, {**found, "blocks.0.weight": torch.zeros(2)}, rank0_only=rank0_only)
    with pytest.raises(ValueError, match="more of the state dict is not in the model"):
        set_full_state_dict(other, {**found, "more": torch.zeros(2)}, rank0_only=rank0_only)
    with pytest.raises(ValueError, match="is missing from the state dict"):
        set_full_state_dict(other, {}, rank0_only=rank0_only)
    assert all(param.is_meta for param in other.parameters())
    set_full_state_dict(other, found, rank0_only=rank0_only)
    assert loss_of(other, tokens()).equal(loss_of(model, tokens()))


OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw": lambda params: block_optim.AdamW(params, lr=0.01),
    "adamw8bit": lambda params: block_optim.AdamW8bit(params, lr=0.01),
    "muon": lambda params: block_optim.Muon([p for p in params if p.ndim == 2], lr=0.01),
    "shampoo": lambda params: block_optim.Shampoo(params, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_training_goes_on_from_full_state_dicts(kind):
    rank0_only = kind != "torch"

    def step(model, optimizer, number):
        loss = loss_of(model, tokens(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model = shard(seeded(width=16))
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for number in range(2):
        step(model, optimizer, number)
    weights = get_full_state_dict(model, rank0_only=rank0_only)
    states = get_full_optimizer_state_dict(model, optimizer, rank0_only=rank0_only)
    again = shard(seeded(width=16, seed=1))
    set_full_state_dict(again, weights, rank0_only=rank0_only)
    other = OPTIMIZERS[kind](list(again.parameters()))
    set_full_optimizer_state_dict(again, other, states, rank0_only=rank0_only)
    for number in range(2, 4):
        assert step(model, optimizer, number).equal(step(again, other, number))


@on_ranks(2)
def test_weights_that_are_kept_as_codes_go_as_values():
    quantize = QuantizationPolicy(at_rest=BlockInt8(8))
    model = shard(seeded().requires_grad_(False), quantization_policy=quantize)
    values = get_full_state_dict(model, rank0_only=True)
    other = shard(seeded(seed=1).requires_grad_(False), quantization_policy=quantize)
    set_full_state_dict(other, values, rank0_only=True)
    for name, value in get_full_state_dict(other).items():
        torch.testing.assert_close(value, seeded().state_dict()[name], atol=0.02, rtol=0.02)
