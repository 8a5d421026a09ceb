"""What can be exchanged from outside: the planner, when gradients are copied; and a transport that fails."""

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import loss_of, same_bits, seeded, shard, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Collectives
from dbuffer._torch_compat import CAN_SWAP
from fsdp_runtime import fully_shard
from layout_planner import plan
from ragged_shard.testing import on_ranks, rank_mesh


@on_ranks(2)
def test_a_planner_of_the_callers_packs_every_group():
    seen = []

    def planner(tensors, world_size, *, align):
        seen.append([spec.name for spec in tensors])
        return plan(tensors, world_size, align=4 * align)

    model = shard(seeded(blocks=2), planner=planner)  # of equal blocks too
    loss_of(model, tokens()).backward()
    assert seen == [["weight", "bias"]] * 2 + [["embed.weight", "norm.weight", "norm.bias", "head.weight"]]


@on_ranks(2)
def test_gradients_that_are_copied_late_are_the_same():
    for microbatches in (1, 3):
        gradients = []
        for enable in (True, False):
            model = shard(seeded())
            model.set_copy_gradients_late(enable)
            for number in range(microbatches):
                model.set_requires_gradient_sync(number == microbatches - 1)
                loss_of(model, tokens(step=number)).backward()
            gradients.append([p.grad.full_tensor() for p in model.parameters()])
        assert same_bits(*gradients)


# -- a gather that cannot start ----------------------------------------------------------------------------------------


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
