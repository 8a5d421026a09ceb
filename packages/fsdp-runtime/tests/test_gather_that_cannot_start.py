"""An all-gather that could not start is not taken for one under way."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Collectives
from dbuffer._torch_compat import CAN_SWAP
from fsdp_runtime import fully_shard
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, rank_mesh


class FailsOnce(Collectives):
    """Collectives of which one all-gather does not start."""

    remaining = 0

    def all_gather(self, pairs, label):
        """The second call since `remaining` was set to 2 raises."""
        FailsOnce.remaining -= 1
        if FailsOnce.remaining == 0:
            raise RuntimeError("no memory for a connection")
        return super().all_gather(pairs, label)


def by_hand(model):
    model.unshard()


def in_forward(model):
    model(torch.ones(2, 8))


@pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot give a buffer other memory after a failure")
@pytest.mark.parametrize("use", [by_hand, in_forward])
@on_ranks(2)
def test_after_a_gather_that_could_not_start_the_next_one_brings_all_parameters(use):
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
        use(model)
    assert all(hasattr(param, "placements") for param in model.parameters())
    model.unshard()  # type: ignore[operator]
    for name, param in model.named_parameters():
        assert param.equal(wanted[name]), name
    model.reshard()  # type: ignore[operator]
    groups = member_of(model).unit.groups
    assert not any(group.buffer.gathered.present or group.buffer.in_flight is not None for group in groups)
