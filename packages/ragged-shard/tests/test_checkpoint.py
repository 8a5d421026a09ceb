"""Distributed checkpoints: from any sharding at 4 ranks into any sharding at 1 to 4, and back, bit by bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import RaggedDTensor, RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import RankError, on_ranks, rank_mesh, record_collectives, run_ranks

SHAPES = {
    "matrix": (24, 5), "vector": (12,), "cube": (4, 6, 3), "scalar": (), "tiny": (1, 3), "empty": (0, 4),
    "odd": (3, 7),
}  # fmt: skip
DTYPES = {"matrix": torch.float32, "vector": torch.bfloat16, "cube": torch.uint8, "odd": torch.float64}


def values():
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.rand(shape, generator=generator) * 200).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def ragged_placements(ranks):
    units = {1: (1,), 2: (1, 3), 3: (3, 0, 1), 4: (2, 0, 1, 1)}[ranks]
    hot = (0,) * (ranks - 1) + (1,)
    return {
        "matrix": RaggedShard((0,), units), "vector": RaggedShard((0,), units[::-1]), "cube": RaggedShard((0,
        1), units),
        "scalar": RaggedShard((), hot), "tiny": RaggedShard((0,), hot), "empty": RaggedShard((0,), units),
        "odd": RaggedShard((0, 1), (0,) * (ranks - 1) + (21,)) if ranks == 1 else
               RaggedShard((0, 1), (11, 10) + (0,) * (ranks - 2)),
    }  # fmt: skip


def state(kind, blank):
    """The values, or zeros of their shapes, laid out in one way over all ranks."""
    ranks, found = dist.get_world_size(), {}
    mesh: Any
    placements: list[Any]
    for name, value in values().items():
        value = torch.zeros_like(value) if blank else value
        if kind == "ragged":
            mesh, placements = rank_mesh(ranks), [ragged_placements(ranks)[name]]
        elif kind == "hsdp":
            mesh, placements = rank_mesh(2, ranks // 2), [Replicate(), ragged_placements(ranks // 2)[name]]
        elif kind == "2d":
            mesh = rank_mesh(ranks // 2, 2)
            ragged = ragged_placements(ranks // 2)[name]
            placements = [ragged, Replicate()]
            if name == "matrix":
                placements = [StridedRaggedShard((0,), ragged.local_units, 2), Shard(0)]
            elif name == "cube":
                placements = [RaggedShard((0, 1), ragged.local_units), Shard(2)]
        elif kind == "shard":
            mesh, placements = rank_mesh(ranks), [Shard(0) if value.ndim and value.numel() else Replicate()]
        if kind != "plain":
            distribute: Any = torch_distribute_tensor if kind == "shard" else distribute_tensor
            value = distribute(value, mesh, placements, src_data_rank=None)
        found[name] = value
    return found


def load(kind, folder):
    loaded = state(kind, True)
    pointers = {k: v.to_local().data_ptr() for k, v in loaded.items() if hasattr(v, "to_local")}
    dcp.load(loaded, checkpoint_id=folder)
    for name, value in values().items():
        got = loaded[name]
        full = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert full.dtype == value.dtype
        assert torch.equal(full, value), (kind, name, folder)
    after = {k: v.to_local().data_ptr() for k, v in loaded.items() if hasattr(v, "to_local")}
    assert pointers == after, (kind, folder)


KINDS = ["ragged", "hsdp", "2d", "shard", "plain"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of each kind, made on 4 ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, save_each, folder)
    return folder


def save_each(folder):
    for kind in KINDS:
        dcp.save(state(kind, False), checkpoint_id=folder / kind)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks("ranks")
def test_what_4_ranks_save_loads_at_any_world_size_with_any_placements(ranks, saved):
    for kind in KINDS:
        for target in KINDS if ranks == 4 else ("ragged", "shard", "plain"):
            load(target, saved / kind)


@on_ranks(4)
def test_offsets_are_computed_without_communication():
    tensors = state("ragged", False)
    with record_collectives() as record:
        items = {name: tensor.__create_write_items__(name, tensor) for name, tensor in tensors.items()}
        chunks = {name: tensor.__create_chunk_list__() for name, tensor in tensors.items()}
    assert record.kinds == []
    for name, tensor in tensors.items():
        assert len(chunks[name]) <= max(1, 2 * len(tensor.placements[0].dims) - 1)
        assert [item.tensor_data.chunk for item in items[name]] == chunks[name]
        if tensor.numel():
            assert sum(chunk.sizes.numel() for chunk in chunks[name]) == tensor.to_local().numel()
        for item in items[name]:
            view = tensor.__get_tensor_shard__(item.index)
            assert view.shape == item.tensor_data.chunk.sizes
            if view.numel():
                assert view.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="is not exactly one of"):
        tensors["matrix"].__get_tensor_shard__(MetadataIndex("matrix", torch.Size([0, 1])))


SHAPES_IN_BUFFER = {"a": (6, 4), "b": (9,), "scalar": (), "c": (3, 2, 5)}


def in_one_buffer(fill):
    """Tensors whose local tensors lie behind one another in one buffer, as a data-parallel runtime holds them."""
    mesh = rank_mesh(3)
    placements = {
        "a": RaggedShard((0,), (1, 2, 0)),
        "b": RaggedShard((0,), (1, 1, 1)),
        "scalar": RaggedShard((), (0, 0, 1)),
        "c": RaggedShard((0, 1), (2, 0, 4)),
    }
    buffer, start, tensors = torch.zeros(100), 7, {}
    for name, shape in SHAPES_IN_BUFFER.items():
        like = distribute_tensor(torch.full(shape, fill), mesh, [placements[name]])
        local = buffer[start : start + like.to_local().numel()].view(like.to_local().shape)
        tensors[name] = RaggedDTensor.from_local(
            local.copy_(like.to_local()), mesh, [placements[name]], shape=shape
        )
        start += local.numel() + 5
    return buffer, tensors


def plain_stager():
    kinds = ("pinned_memory", "shared_memory", "async_staging", "non_blocking_copy")
    return DefaultStager(StagingOptions(**dict.fromkeys([f"use_{kind}" for kind in kinds], False)))


def save_async_twice(folder):
    buffer, tensors = in_one_buffer(2.0)
    stager = plain_stager()
    for step in (1, 2):
        if not SUBCLASSES_DTENSOR:  # torch 2.11, whose stagers stage once
            stager = plain_stager()
        staged = stager.stage(tensors)
        for name, copied in staged.items():
            original = tensors[name]
            assert isinstance(copied, RaggedDTensor)
            assert (copied.shape, copied.placements) == (original.shape, original.placements)
            assert copied.dtype == original.dtype
            assert torch.equal(copied.to_local(), original.to_local())
            if copied.to_local().numel():
                assert copied.data_ptr() != original.data_ptr()
        dcp.save(staged, checkpoint_id=f"{folder}/{step}")
        buffer.mul_(3)
    stager.close()
    stager = None if SUBCLASSES_DTENSOR else plain_stager()
    future = dcp.async_save(tensors, checkpoint_id=f"{folder}/3", async_stager=stager)
    buffer.zero_()  # staging has copied by then
    future.result()


def load_filled(folder):
    for step, fill in ((1, 2.0), (2, 6.0), (3, 18.0)):
        plain = {name: torch.zeros(shape) for name, shape in SHAPES_IN_BUFFER.items()}
        dcp.load(plain, checkpoint_id=f"{folder}/{step}")
        for name, tensor in plain.items():
            assert tensor.eq(fill).all(), (step, name, tensor)


def test_async_save_copies_tensors_that_lie_in_one_buffer(tmp_path):
    run_ranks(3, save_async_twice, tmp_path)
    run_ranks(1, load_filled, tmp_path)


HF_VALUES = {
    "elements": torch.arange(60.0).view(3, 4, 5),  # 5 boxes on one rank
    "rows": torch.arange(24.0).view(6, 4),
    "plain": torch.arange(4.0),
}


def hf_state():
    mesh = rank_mesh(2)
    placements = {"elements": RaggedShard((0, 1, 2), (27, 33)), "rows": RaggedShard((0,), (5, 1))}
    ragged = {
        name: distribute_tensor(HF_VALUES[name], mesh, [placement]) for name, placement in placements.items()
    }
    return {**HF_VALUES, **ragged}


def save_hf(folder):
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(hf_state(), storage_writer=writer)


def test_torchs_hugging_face_writer_refuses_several_boxes_of_a_tensor(tmp_path):
    message = r"elements \(shape \(3, 4, 5\) .*FileSystemWriter"
    with pytest.raises(RankError, match=message):
        run_ranks(2, save_hf, tmp_path)


@on_ranks(2)
def test_several_boxes_are_plain_tensors_in_an_ordinary_checkpoint(tmp_path):
    dcp.save(hf_state(), checkpoint_id=tmp_path)
    if dist.get_rank() == 0:
        dcp.format_utils.dcp_to_torch_save(tmp_path, f"{tmp_path}/full.pt")
        for name, value in torch.load(f"{tmp_path}/full.pt").items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, HF_VALUES[name])


@on_ranks(3)
def test_a_tensor_with_two_names_loads_the_values_of_the_second_apart(tmp_path):
    one = distribute_tensor(torch.arange(16.0).view(8, 2), rank_mesh(3), [RaggedShard((0,), (3, 0, 1))])
    two = (one.detach() + 1).detach()
    dcp.save({"one": one, "two": two}, checkpoint_id=tmp_path)
    target: Any = torch.zeros_like(one)
    first: Any = target.detach()
    second: Any = target.detach()
    second.load_into_copy()
    assert second.loaded is second
    dcp.save({"two": second}, checkpoint_id=f"{tmp_path}/zeros")  # copies nothing
    assert second.loaded is second
    dcp.load({"one": first, "two": second}, checkpoint_id=tmp_path)
    assert first.loaded is first
    assert target.full_tensor().equal(one.full_tensor())
    assert second.loaded.full_tensor().equal(two.full_tensor())
