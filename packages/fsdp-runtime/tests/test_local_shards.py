"""The trainer's side of vLLM's weight transfer, against its classes or their contract: whole tensors, and shards."""

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import full_values, seeded, shard, step_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from vllm_contract import FOLDER, interface

from fsdp_runtime import QuantizationPolicy, block_policies, full_params, fully_shard
from fsdp_runtime.checkpoint import local_shards
from fsdp_runtime.checkpoint.local_shards import Link, transfers
from fsdp_runtime.integrations.vllm import weight_source
from fsdp_runtime.integrations.vllm_shards import trainer_engine, worker_engine
from fsdp_runtime.quantization import BlockNF4
from ragged_shard import Box
from ragged_shard.testing import on_ranks, record_collectives


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
    for part in local_shards(model, dtype=torch.bfloat16):
        assert part.tensor.dtype == torch.bfloat16
        off = part.tensor.float() - whole[part.name][part.box.slices()]
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


def model_with_a_buffer():
    model = seeded(width=16, tied=True)
    model.register_buffer("router_bias", torch.arange(4.0))
    return shard(model)


def values(model, dtype=torch.float32):
    """Whole tensors by names, gathered one by one; of tied parameters the first name."""
    state = full_values(model)
    del state["head.weight"]
    return {name: t.to(dtype, copy=True) for name, t in state.items()}


@on_ranks(3)
def test_each_pass_has_the_tensors_of_the_state_dict_as_metadata_says():
    model = model_with_a_buffer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with interface(), record_collectives() as record:
        source = weight_source(model, dtype=torch.bfloat16, bucket_bytes=2000)
        assert len(source.metadata) == 10
    assert record.kinds == []
    assert source.metadata is source.metadata
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    passes = []
    for number in range(2):
        wanted = values(model, torch.bfloat16)
        passes.append({name: tensor.clone() for name, tensor in source.iter_full()})
        assert list(passes[-1]) == source.owned_names(dist.get_rank()) == [m.name for m in source.metadata]
        for meta in source.metadata:
            tensor = passes[-1][meta.name]
            assert (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
            assert tensor.equal(wanted[meta.name])
        assert wanted.keys() == passes[-1].keys()
        step_of(model, optimizer, number)
    assert not passes[0]["blocks.0.weight"].equal(passes[1]["blocks.0.weight"])


@on_ranks(3)
def test_a_pass_over_weights_that_an_optimizer_or_a_merge_changes_raises():
    model = model_with_a_buffer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interface():
        source = weight_source(model, bucket_bytes=1)

    def merge():
        with full_params(model.blocks[1]):
            model.blocks[1].weight.data += torch.ones(16, 16)

    for change, name in ((lambda: step_of(model, optimizer), r"\S+"), (merge, r"blocks\.1\.\w+")):
        iterator = source.iter_full()
        next(iterator)
        change()
        with pytest.raises(RuntimeError, match=rf"{name} was written to since iter_full was called"):
            list(iterator)
        wanted = values(model)
        assert all(tensor.equal(wanted[name]) for name, tensor in source.iter_full())
    with full_params(model), pytest.raises(RuntimeError, match="full_params"):
        source.iter_full()


@on_ranks(2)
def test_a_model_with_other_tensors_than_metadata_is_refused():
    model = model_with_a_buffer()
    with interface():
        source = weight_source(model)
    assert source.metadata
    model.register_buffer("added", torch.zeros(1))
    with pytest.raises(RuntimeError, match="differ from metadata; make a new weight_source"):
        source.iter_full()


def test_vllms_own_classes_take_it():
    base = pytest.importorskip(f"{FOLDER}.base", reason="vLLM is not installed")
    source = weight_source(seeded())
    assert isinstance(source, base.WeightSource)
    assert all(isinstance(meta, base.ParamMeta) for meta in source.metadata)
