"""Between passes a user finds the sharded parameters in the modules, whatever stays gathered."""

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import assert_same_gradients, loss_of, seeded, shard, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Collectives
from dbuffer._torch_compat import CAN_SWAP
from fsdp_runtime import block_policies, fully_shard
from ragged_shard.testing import on_ranks, rank_mesh


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


@pytest.mark.parametrize("change", ["in place", "data"])
@on_ranks(2)
def test_changes_after_a_failed_backward_that_would_be_lost_raise_once(change):
    def fail(_):
        raise ZeroDivisionError

    model, alone = shard(seeded()), seeded()
    loss = loss_of(model, tokens())
    model.head.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    with torch.no_grad():
        LOST[change](model.head.weight)
    del loss
    with pytest.raises(RuntimeError, match=r"reset_iter_state\(\) after a failure"):
        model(tokens())
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, tokens()), loss_of(alone, tokens()))


class FailsOnce(Collectives):
    """Collectives of which one all-gather does not start."""

    remaining = 0

    def all_gather(self, pairs, label):
        """The second call since `remaining` was set to 2 raises."""
        FailsOnce.remaining -= 1
        if FailsOnce.remaining == 0:
            raise RuntimeError("no memory for a connection")
        return super().all_gather(pairs, label)


@pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot give a buffer other memory after a failure")
@pytest.mark.parametrize("by_hand", [True, False])
@on_ranks(2)
def test_after_a_gather_that_could_not_start_the_next_one_brings_all_parameters(by_hand):
    first = rank_mesh()
    second = DeviceMesh.from_group(dist.new_group(), "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(
        model,
        mesh=first,
        shard_placement_fn=lambda param: second if param.ndim == 1 else None,
        transport=FailsOnce,
    )
    FailsOnce.remaining = 2
    with pytest.raises(RuntimeError, match="could not start: no memory for a connection"):
        model.unshard() if by_hand else model(torch.ones(2, 8))  # type: ignore[operator]
    assert all(hasattr(param, "placements") for param in model.parameters())
    model.unshard()  # type: ignore[operator]
    for name, param in model.named_parameters():
        assert param.equal(wanted[name]), name
