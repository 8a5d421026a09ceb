"""Checkpoints without gathering plans: the same metadata as DCP's own, from layouts alone."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime_helpers import loss_of, seeded, shard, tokens
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_runtime import LocalSavePlanner, block_policies, fully_shard
from ragged_shard import chunks_of_ranks
from ragged_shard.testing import run_ranks, simulated_ranks


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def make(kind):
    if kind == "ranks":
        return shard(seeded(), block_policy=block_policies.tiles(4, 4))
    names = ("replicate", "shard") if kind == "hybrid" else ("dp", "tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = seeded(TwoLayers)
    if kind == "tp":
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh if kind == "hybrid" else mesh["dp"])


def chunks(metadata):
    return {
        name: sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
        if hasattr(entry, "chunks")
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def save(folder, kind):
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.ones(2, 8)
    (loss_of(model, tokens()) if kind == "ranks" else model(x).sum()).backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "plain": torch.ones(2),
    }
    mine = dcp.save(state, checkpoint_id=folder / "ours", planner=LocalSavePlanner())
    theirs = dcp.save(state, checkpoint_id=folder / "default")
    if dist.get_rank() == 0:
        assert chunks(mine) == chunks(theirs)
        assert mine.planner_data == theirs.planner_data
        assert mine.storage_data.keys() == theirs.storage_data.keys()
    return {name: t.full_tensor().detach() for name, t in model.state_dict().items()}


@pytest.mark.parametrize(("kind", "ranks"), [("ranks", 3), ("hybrid", 4), ("tp", 4)])
def test_a_checkpoint_is_dcps_and_loads_without_ranks(kind, ranks, tmp_path):
    wanted = run_ranks(ranks, save, tmp_path, kind)[0]
    loaded: dict[str, Any] = {
        "model": {name: torch.empty_like(value) for name, value in wanted.items()},
        "step": 0,
    }
    loaded["plain"] = torch.zeros(2)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert all(loaded["model"][name].equal(value) for name, value in wanted.items())
    assert loaded["step"] == 3
    assert loaded["plain"].equal(torch.ones(2))


def differ(folder):
    state = {"model": shard(seeded()).state_dict()}
    if dist.get_rank() == 1:
        state["more"] = torch.zeros(2)
    with pytest.raises(dcp.api.CheckpointException, match=r"ranks \[1\] \(1 in all\) have other names"):
        dcp.save(state, checkpoint_id=folder, planner=LocalSavePlanner())
    return True


def test_ranks_with_different_state_dicts_raise_on_every_rank(tmp_path):
    assert run_ranks(3, differ, tmp_path) == [True] * 3


# -- thousands of ranks ------------------------------------------------------------------------------------------------


def default_plans(model, ranks):
    """What each rank sends in DCP's own planning: the items of its chunks."""
    plans: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for name, tensor in model.state_dict().items():
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        for (rank,), held in chunks_of_ranks(tensor):
            for chunk in held:
                data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.size())
                index = MetadataIndex(name, chunk.offsets)
                plans[rank].append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return [SavePlan(items) for items in plans]


def test_at_4096_ranks_planning_sends_fingerprints_instead_of_plans():
    ranks = 4096
    with simulated_ranks(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        planner = LocalSavePlanner()
        planner.set_up_planner(model.state_dict(), is_coordinator=True)
        sent = planner.create_local_plan()
        plans, metadata = planner.create_global_plan([sent] * ranks)
        default = default_plans(model, ranks)
    own = next(iter(planner.finish_plan(plans[0]).items)).tensor_data.chunk
    assert own in metadata.state_dict_metadata["0.weight"].chunks
    for name, value in model.state_dict().items():
        entry = metadata.state_dict_metadata[name]
        numels: list[int] = [chunk.sizes.numel() for chunk in entry.chunks]
        assert sum(numels) == value.numel()
    ours = (len(pickle.dumps(sent)) + len(pickle.dumps(plans[0]))) * ranks
    theirs = 2 * sum(len(pickle.dumps(plan)) for plan in default)
    sent_back = f"{2 * ranks} messages to and from rank 0"
    print(f"\n{ranks} ranks, planning, {sent_back}: {ours} bytes in all; with DCP's default {theirs}")
    assert ours < 500 * ranks
    assert ours < theirs / 4
