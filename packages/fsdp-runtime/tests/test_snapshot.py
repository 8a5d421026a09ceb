"""Copies of shards while a forward runs: no collective, no reshard, the bits of the parameters. And a store of them."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime_helpers import assert_same_values, full_values, loss_of, on_meta, seeded, shard, step_of, tokens
from torch import nn

from fsdp_runtime import QuantizationPolicy, offload
from fsdp_runtime.checkpoint import StoreReader, StoreWriter, snapshot
from fsdp_runtime.memory import gathered_memory
from fsdp_runtime.quantization import BlockInt8
from ragged_shard.testing import on_ranks, record_collectives, run_ranks


def check(taken, wanted):
    assert_same_values({name: value.full_tensor() for name, value in taken.items()}, wanted)


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
    wanted, during = full_values(model), []

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


@on_ranks(2)
def test_a_snapshot_inside_and_after_a_forward_equals_the_parameters():
    model = shard(seeded())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of(model, optimizer)
    wanted = full_values(model)
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
    assert_same_values(full_values(model), wanted)


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
    wanted = full_values(model)
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
    wanted = full_values(model)
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


# -- checkpoints in a key-value store, pulled by other numbers of ranks ------------------------------------------------


@pytest.fixture
def port():
    """The port of a TCPStore in this process."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def client(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def trained():
    model = shard(seeded(width=16))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def put(port, steps):
    """Step while another thread puts a snapshot; the values at the time of the snapshot."""
    model, optimizer = trained()
    for number in range(steps):
        step_of(model, optimizer, number)
    wanted, taken, group = full_values(model), snapshot(model, optimizer), dist.new_group()
    moments = taken.optimizer["state"][0]["exp_avg"]
    state = {"model": taken.model, "step": steps, "moments": moments}
    named = {
        "storage_writer": StoreWriter(client(port)),
        "checkpoint_id": "job/weights",
        "process_group": group,
    }
    thread = threading.Thread(target=dcp.save, args=(state,), kwargs=named)
    thread.start()
    for number in range(3):
        step_of(model, optimizer, number)
    thread.join()
    assert not full_values(model)["embed.weight"].equal(wanted["embed.weight"])
    return wanted, moments.full_tensor()


def pull(port):
    model, optimizer = trained()
    step_of(model, optimizer)
    moments = optimizer.state[model.embed.weight]["exp_avg"]
    state = {"model": model.state_dict(), "step": 0, "moments": moments}
    dcp.load(state, storage_reader=StoreReader(client(port)), checkpoint_id="job/weights")
    return state["step"], moments.full_tensor(), full_values(model)


def test_other_ranks_get_the_values_and_states_of_the_time_of_the_snapshot(port):
    for steps in (1, 2):
        (wanted, moments), *_ = run_ranks(3, put, port, steps)
    for number, pulled, values in run_ranks(2, pull, port):
        assert number == 2
        assert pulled.equal(moments)
        assert_same_values(values, wanted)


alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


class InProcess:
    """A store in this process."""

    def __init__(self):
        self.content: dict[str, bytes] = {}

    def set(self, key, value):
        self.content[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.content[key]


@alone
def test_tensors_larger_than_a_stores_values_are_put_in_parts():
    store, tensor = InProcess(), torch.randn(3 << 20)
    dcp.save({"x": tensor}, storage_writer=StoreWriter(store, "big"), no_dist=True)
    assert max(map(len, store.content.values())) == 4 << 20
    pulled = {"x": torch.zeros_like(tensor)}
    dcp.load(pulled, storage_reader=StoreReader(store, "big"), no_dist=True)
    assert pulled["x"].equal(tensor)


@alone
def test_a_reader_that_has_begun_keeps_its_checkpoint_while_the_key_is_put_again():
    store = InProcess()
    dcp.save({"x": torch.zeros(4)}, storage_writer=StoreWriter(store, "key"), no_dist=True)

    class Late(StoreReader):
        def read_data(self, plan, planner):
            dcp.save({"x": torch.ones(4)}, storage_writer=StoreWriter(store, "key"), no_dist=True)
            return super().read_data(plan, planner)

    pulled = {"x": torch.full((4,), 7.0)}
    dcp.load(pulled, storage_reader=Late(store, "key"), no_dist=True)
    assert pulled["x"].equal(torch.zeros(4))
