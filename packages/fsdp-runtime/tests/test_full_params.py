"""Whole parameters in the modules for a while."""

import pytest
import torch
from runtime_helpers import loss_of, seeded, shard, tokens
from torch import nn

from fsdp_runtime import MixedPrecisionPolicy, full_params, offload
from ragged_shard.testing import record_collectives, run_ranks


def write():
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, wanted = shard(seeded(tied=True), mp_policy=bf16), seeded(tied=True)
    params = list(model.parameters())
    with record_collectives() as record, full_params(model):
        for one, two in zip(model.parameters(), wanted.parameters(), strict=True):
            assert type(one.data) is torch.Tensor
            assert one.equal(two)
        assert model.head.weight is model.embed.weight
        with pytest.raises(RuntimeError, match="are whole inside of full_params"):
            loss_of(model, tokens())
        with pytest.raises(RuntimeError, match="are whole inside of full_params"):
            model.state_dict()
        model.blocks[0].weight.data += 1
        model.norm.weight.data = torch.full((8,), 2.0)
    wanted.blocks[0].weight.data += 1
    wanted.norm.weight.data.fill_(2)
    assert len(record.kinds) == 4  # of a group each
    assert all(one is two for one, two in zip(params, model.parameters(), strict=True))
    assert all(p.full_tensor().equal(dict(wanted.named_parameters())[n]) for n, p in model.named_parameters())
    loss_of(model, tokens()).backward()


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_written_goes_into_the_shards_without_rounding(ranks):
    if ranks > 1:
        run_ranks(ranks, write)
    else:
        run_ranks(ranks, only_reading)


def broken_off(model):
    with full_params(model):
        model.head.weight.data.zero_()
        raise KeyError


def reshaped(model):
    with full_params(model):
        model.head.weight = nn.Parameter(torch.zeros(2))


def only_reading():
    model = shard(seeded())
    with full_params(model, writeback=False):
        model.head.weight.data.zero_()
    with pytest.raises(KeyError):
        broken_off(model)
    with pytest.raises(ValueError, match=r"head.weight is \(2,\) now; expected a tensor of shape \(12, 8\)"):
        reshaped(model)
    assert loss_of(model, tokens()).equal(loss_of(seeded(), tokens()))
    offload(model)
    with pytest.raises(RuntimeError, match="are offloaded"), full_params(model):
        pass
