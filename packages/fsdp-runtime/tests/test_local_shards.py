"""Shards go to an engine's processes as they lie, and arrive as one process has them."""

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import seeded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from vllm_contract import interface

from fsdp_runtime import QuantizationPolicy, block_policies, fully_shard
from fsdp_runtime.checkpoint import local_shards
from fsdp_runtime.checkpoint.local_shards import Link, transfers
from fsdp_runtime.integrations.vllm import weight_source
from fsdp_runtime.integrations.vllm_shards import trainer_engine, worker_engine
from fsdp_runtime.quantization import BlockNF4
from ragged_shard import Box
from ragged_shard.testing import on_ranks


def build():
    model = seeded(width=16, tied=True)
    model.register_buffer("bias", torch.arange(7.0))
    return model


def hybrid(model, ranks):
    mesh = DeviceMesh("cpu", torch.tensor(ranks).view(2, -1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def by_elements(model, ranks):
    """Cut within rows, so that a rank has several boxes of a matrix."""
    return fully_shard(model, mesh=DeviceMesh("cpu", ranks), block_policy=block_policies.elements(5))


def cut(model, ranks):
    """Two ranks have half of the rows each, as of tensor or expert parallelism, and share nothing else."""
    mesh = DeviceMesh("cpu", ranks)
    weight = model.blocks[0].weight
    model.blocks[0].weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(1)]))
    return model


class Client:
    """Calls a method of each worker, through a store."""

    def __init__(self, store, workers):
        self.store, self.workers, self.calls = store, workers, 0

    def __getattr__(self, method):
        def call(*args):
            self.store.set(f"call {self.calls}", json.dumps([method, args]))
            for worker in range(self.workers):
                self.store.get(f"done {self.calls} {worker}")
            self.calls += 1

        return call


def serve(store, engine, worker, calls):
    for number in range(calls):
        method, args = json.loads(store.get(f"call {number}"))
        if method == "init_weight_transfer_engine":
            method, args = "init_transfer_engine", [engine.init_info_cls(**args[0])]
        getattr(engine, method)(*args)
        store.set(f"done {number} {worker}", "")


@pytest.mark.parametrize(
    ("build_on", "trainers"), [(hybrid, 4), (by_elements, 3), (cut, 2)], ids=["hybrid", "elements", "cut"]
)
@on_ranks(6)
def test_workers_get_their_parts_of_the_values_at_each_send_and_each_byte_is_sent_once(build_on, trainers):
    """Ranks 0 to `trainers` - 1 train, the others are workers, which cut every tensor along its last dimension."""
    rank, workers = dist.get_rank(), 6 - trainers
    port = dist.TCPStore("localhost", 0, is_master=True).port if rank == 0 else 0
    ports = [port, 0]
    if rank == 0:
        control = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ports[1] = control.port
    dist.broadcast_object_list(ports)
    if rank != 0:
        control = dist.TCPStore("localhost", ports[1], timeout=timedelta(seconds=60))
    wanted = build().state_dict()
    del wanted["head.weight"]
    if rank < trainers:
        model = build_on(build(), list(range(trainers)))
        with interface():
            source = weight_source(model)
            engine_of: Any = trainer_engine()
        info = engine_of.init_info_cls(
            master_address="localhost",
            master_port=ports[0],
            trainers=trainers,
            workers=workers,
            device="cpu",
            rank=rank,
        )
        engine = engine_of.trainer_init(None, info, client=Client(control, workers), source=source)
        sent = torch.zeros(2)
        for number in range(2):
            engine.send_weights()
            sent[number] = engine.sent_bytes
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.mul_(2)
    else:
        got = []

        with interface():
            base: Any = worker_engine()

            class Engine(base):
                def wanted(self, shapes):
                    boxes = {}
                    for name, shape in shapes.items():
                        first = shape[-1] * (rank - trainers) // workers
                        last = shape[-1] * (rank - trainers + 1) // workers
                        boxes[name] = [Box((0,) * (len(shape) - 1) + (first,), (*shape[:-1], last - first))]
                    return {name: those for name, those in boxes.items() if those[0].numel}

                def load(self, name, box, values):
                    got.append((name, box, values))

        parallel = SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank - trainers)
        engine = Engine(None, SimpleNamespace(parallel_config=parallel), torch.device("cpu"), None)
        serve(control, engine, rank - trainers, 1 + 2 * 3)
        for number in range(2):
            part = got[number * len(got) // 2 :][: len(got) // 2]
            assert [name for name, *_ in part] == sorted(wanted)
            for name, box, values in part:
                assert values.equal(wanted[name][box.slices()] * 2**number), name
        sent = torch.zeros(2)
    dist.all_reduce(sent)
    assert sent.tolist() == [sum(tensor.nbytes for tensor in wanted.values())] * 2


@on_ranks(3)
def test_boxes_of_codes_and_of_another_dtype_are_copies_with_the_values():
    model = seeded(width=16)
    model.requires_grad_(False)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, quantization_policy=QuantizationPolicy(at_rest=BlockNF4(64)))
    for shard in local_shards(model, dtype=torch.bfloat16):
        assert shard.tensor.dtype == torch.bfloat16
        off = shard.tensor.float() - whole[shard.name][shard.box.slices()]
        assert float(off.abs().max()) < 0.2


def test_what_ranks_do_not_hold_is_named():
    held = [{"w": [Box((0, 0), (2, 4))]}, {"w": [Box((3, 0), (1, 4))]}]
    with pytest.raises(ValueError, match=r"w: engine 1 wants 16 elements at \(0, 0\); ranks hold 12"):
        transfers(held, [{}, {"w": [Box((0, 0), (4, 4))]}])


def test_shards_that_are_others_than_those_listed_are_refused_by_name():
    model = seeded()
    link = Link(("localhost", 0), 1, 0, 0, torch.device("cpu"), 20.0)
    link.hold(local_shards(model))
    assert link.send(local_shards(model)) == 0
    with pytest.raises(RuntimeError, match=r"blocks\.0\.bias: other boxes or another dtype"):
        link.send(local_shards(model, dtype=torch.bfloat16))
    del model.head
    with pytest.raises(RuntimeError, match=r"head\.weight: it was listed"):
        link.send(local_shards(model))


@on_ranks(2)
def test_senders_that_differ_in_dtype_are_refused_on_each_by_name():
    rank = dist.get_rank()
    ports = [dist.TCPStore("localhost", 0, is_master=True).port if rank == 0 else 0]
    dist.broadcast_object_list(ports)
    link = Link(("localhost", ports[0]), 2, 0, rank, torch.device("cpu"), 20.0)
    with pytest.raises(ValueError, match=r"blocks\.0\.bias: sender 1 has .*bfloat16"):
        link.hold(local_shards(seeded(), dtype=(torch.float32, torch.bfloat16)[rank]))
