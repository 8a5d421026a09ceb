"""Checkpoints in a key-value store, pulled by other numbers of ranks."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime_helpers import full_values, seeded, shard, step_of

from fsdp_runtime.checkpoint import StoreReader, StoreWriter, snapshot
from ragged_shard.testing import run_ranks


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


def test_other_ranks_get_the_newest_values_states_and_numbers_at_the_time_of_the_snapshot(port):
    for steps in (1, 2):
        (wanted, moments), *_ = run_ranks(3, put, port, steps)
    for number, pulled, values in run_ranks(2, pull, port):
        assert number == 2
        assert pulled.equal(moments)
        assert values.keys() == wanted.keys()
        assert all(values[name].equal(value) for name, value in wanted.items())


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
