"""Copies of shards while a forward runs: no collective, no reshard, bit-equal to the parameters."""

import gc
import threading

import pytest
import torch
from runtime_helpers import full_values, loss_of, on_meta, seeded, shard, step_of, tokens
from torch import nn

from fsdp_runtime import QuantizationPolicy, offload
from fsdp_runtime.checkpoint import snapshot
from fsdp_runtime.memory import gathered_memory
from fsdp_runtime.quantization import BlockInt8
from ragged_shard.testing import on_ranks, record_collectives


def values(model):
    return {name: value.clone() for name, value in full_values(model).items()}


def check(taken, wanted):
    assert taken.keys() == wanted.keys()
    assert all(taken[name].full_tensor().equal(wanted[name]) for name in wanted)


def quietly(model, take):
    """What `take` returns, which neither communicates nor frees gathered memory."""
    gc.collect()  # else gathered memory of another test's model may go in between
    before = gathered_memory(model)
    with record_collectives() as record:
        taken = take()
    assert (record.kinds, gathered_memory(model)) == ([], before)
    return taken


@on_ranks(2)
def test_a_state_dict_in_a_pass_has_the_sharded_parameters_and_reshards_nothing():
    model = shard(seeded())
    wanted, during = values(model), []

    def look(*_):
        during.append(quietly(model, lambda: (model.state_dict(), model.state_dict(keep_vars=True))))

    handle = model.blocks[1].register_forward_hook(look)
    loss = loss_of(model, tokens())
    handle.remove()
    look()
    assert gathered_memory(model).lent_bytes > 0  # until backward
    assert model.embed.weight is dict(model.state_dict(keep_vars=True))["embed.weight"]
    loss.backward()
    look()
    params = dict(model.named_parameters())
    for plain, kept in during:
        check(plain, wanted)
        assert all(kept[name] is params[name] for name in wanted)
    loss_of(model, tokens())
    with torch.no_grad():
        model.embed.weight.add_(1)
    with pytest.raises(RuntimeError, match="gathered parameters were changed in place"):
        model.state_dict()


@on_ranks(2)
def test_a_snapshot_inside_and_after_a_forward_equals_the_parameters():
    model = shard(seeded())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of(model, optimizer)
    wanted = values(model)
    moments = [optimizer.state[p]["exp_avg"].to_local().clone() for p in model.parameters()]
    model.set_reshard_after_forward(False)
    inside, take = [], lambda: snapshot(model, optimizer)
    handle = model.blocks[1].register_forward_hook(lambda *_: inside.append(quietly(model, take)))
    loss = loss_of(model, tokens(1))
    handle.remove()
    after = quietly(model, take)
    loss.backward()
    optimizer.step()  # what was taken does not follow
    for taken in (*inside, after):
        check(taken.model, wanted)
        for state, moment in zip(taken.optimizer["state"].values(), moments, strict=True):
            assert state["exp_avg"].to_local().equal(moment)
            assert state["step"] == 1
    model.load_state_dict(after.model)
    optimizer.load_state_dict(after.optimizer)
    assert all(value.equal(wanted[name]) for name, value in values(model).items())


class Waiting(nn.Module):
    """Stops a forward until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def forward(self, x):
        self.reached.set()
        assert self.go.wait(60)
        return x


@on_ranks(2)
def test_another_thread_takes_one_while_a_forward_runs():
    model = seeded()
    waiting = Waiting()
    model.norm = nn.Sequential(waiting, model.norm)
    shard(model)
    wanted = values(model)
    found = []

    def take():
        assert waiting.reached.wait(60)
        try:
            found.append(snapshot(model, device="cpu"))
        finally:
            waiting.go.set()

    thread = threading.Thread(target=take)
    thread.start()
    loss_of(model, tokens()).backward()
    thread.join()
    check(found[0].model, wanted)


@on_ranks(2)
def test_codes_are_copied_as_codes():
    model = shard(
        seeded().requires_grad_(False), quantization_policy=QuantizationPolicy(at_rest=BlockInt8(8))
    )
    loss_of(model, tokens())
    wanted = values(model)
    assert "blocks.0.weight.codes" in wanted
    check(snapshot(model).model, wanted)


class Busy(torch.optim.SGD):
    """Its state changes whenever it is looked at."""

    def state_dict(self):
        next(iter(self.state.values()))["momentum_buffer"].detach().add_(1)
        return super().state_dict()


@on_ranks(1)
def test_a_snapshot_that_would_not_be_consistent_is_refused_by_name():
    model = shard(seeded())
    optimizer = Busy(model.parameters(), momentum=0.9)
    loss_of(model, tokens()).backward()
    optimizer.step()
    with pytest.raises(
        RuntimeError, match="optimizer 0 state 0 momentum_buffer was written to while it was copied"
    ):
        snapshot(model, optimizer)
    offload(model)
    with pytest.raises(RuntimeError, match="are offloaded"):
        snapshot(model)
    with pytest.raises(ValueError, match=r"model embed\.weight is on meta"):
        snapshot(shard(on_meta()))
