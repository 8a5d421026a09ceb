"""Between passes a user finds the sharded parameters in the modules, whatever stays gathered."""

import pytest
import torch
from runtime_helpers import assert_same_gradients, loss_of, seeded, shard, tokens
from torch import nn

from fsdp_runtime import QuantizationPolicy, block_policies, fully_shard
from fsdp_runtime.quantization import BlockNF4
from ragged_shard import RaggedDTensor
from ragged_shard.testing import on_ranks, record_collectives


def all_sharded(model):
    return all(isinstance(param, RaggedDTensor) for param in model.parameters())


def gathers_of(call):
    with record_collectives() as record:
        call()
    return record.kinds.count("all_gather")


@on_ranks(2)
def test_what_stays_gathered_serves_the_next_forward_unless_it_was_written_to():
    model = shard(seeded())
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    loss_of(model, tokens()).backward()
    again = gathers_of(lambda: loss_of(model, tokens()).backward())
    with torch.no_grad():
        model.blocks[0].weight.add_(1)
    assert again == 0
    assert gathers_of(lambda: loss_of(model, tokens()).backward()) == 1
    with torch.no_grad():
        model.head.weight.fill_(2)
    model.unshard()
    assert model.head.weight.eq(2).all()


class ThroughPointers(torch.optim.Optimizer):
    """Writes where torch does not count it, and skips what has no elements on this rank, as fused kernels do."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            local, grad = param.to_local(), param.grad.to_local()
            if local.numel():
                local.detach().numpy()[...] -= grad.numpy()


@on_ranks(3)
def test_after_a_step_that_torch_does_not_count_every_rank_gathers_what_was_kept():
    model, alone = (
        seeded(nn.Linear, in_features=3, out_features=2),
        seeded(nn.Linear, in_features=3, out_features=2),
    )
    fully_shard(model, block_policy=block_policies.whole())
    model.set_reshard_after_backward(False)
    optimizers = [ThroughPointers(model.parameters()), torch.optim.SGD(alone.parameters(), lr=1.0)]
    for _ in range(3):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            each(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model(torch.ones(1, 3)), alone(torch.ones(1, 3)))


@pytest.mark.parametrize("way", ["no backward", "unshard"])
@on_ranks(2)
def test_an_edit_of_gathered_parameters_is_an_error_when_they_are_freed(way):
    model = shard(seeded())
    if way == "no backward":
        kept = loss_of(model, tokens())  # noqa: F841  a backward may come
    else:
        model.unshard()
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(
        RuntimeError, match=r"gathered parameters were changed in place.*model.reshard\(\) first"
    ):
        model.reshard() if way == "unshard" else loss_of(model, tokens()).backward()
    model.reshard()
    assert all_sharded(model)
    with torch.no_grad():
        model.head.weight.mul_(2)
    loss_of(model, tokens()).backward()


@pytest.mark.parametrize("holds", ["the loss", "nothing"])
@on_ranks(2)
def test_settings_made_after_a_forward_without_backward_are_kept(holds):
    """Freezing, unfreezing and attributes, set through the module while it may hold gathered parameters."""
    model, alone = seeded(), seeded()
    for each in (model, alone):
        each.embed.requires_grad_(False)
    shard(model)
    loss = loss_of(model, tokens(rank=0))
    if holds == "nothing":
        del loss
    for each in (model, alone):
        each.requires_grad_(True)
        each.head.weight.requires_grad_(False)
        each.head.weight.scale = 2
    for _ in range(2):
        for each in (model, alone):
            each.zero_grad()
            loss_of(each, tokens(rank=0)).backward()
        assert_same_gradients(model, alone)
    assert all_sharded(model)
    assert model.head.weight.scale == 2
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in alone.parameters()]


def set_data(param):
    param.data = param.data * 2


LOST = {
    "in place": lambda param: param.mul_(2),
    "data": set_data,
    "grad": lambda param: setattr(param, "grad", torch.zeros_like(param)),
    "hook": lambda param: param.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("then", ["state_dict", "forward"])
@pytest.mark.parametrize("change", LOST)
@on_ranks(2)
def test_changes_of_gathered_parameters_that_would_be_lost_raise(change, then):
    model, alone = shard(seeded()), seeded()
    loss = loss_of(model, tokens())
    with torch.no_grad():
        LOST[change](model.head.weight)
    with pytest.raises(RuntimeError, match=r"model.reshard\(\) first"):
        model.state_dict() if then == "state_dict" else model(tokens())
    del loss
    for each in (model, alone):
        loss_of(each, tokens(rank=0)).backward()
    assert_same_gradients(model, alone)


@on_ranks(2)
def test_codes_that_are_unfrozen_while_gathered_raise_in_the_next_forward():
    model = seeded(nn.Linear, in_features=64, out_features=64)
    model.weight.requires_grad_(False)
    at_rest = QuantizationPolicy(at_rest=BlockNF4(64), select=lambda name, *_: name == "weight")
    fully_shard(model, quantization_policy=at_rest)
    loss = model(torch.ones(1, 64)).sum()
    model.requires_grad_(True)
    del loss
    with pytest.raises(ValueError, match=r"weight requires a gradient .*requires_grad_\(False\)"):
        model(torch.ones(1, 64))
    model(torch.ones(1, 64)).sum().backward()
    assert not model.weight.requires_grad
    assert model.bias.grad is not None
