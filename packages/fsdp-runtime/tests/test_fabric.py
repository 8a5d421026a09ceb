"""Lightning Fabric on models that we have sharded, on CPU ranks; checks/trainers compares it with FSDP2."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import (
    Body,
    assert_same_parameters,
    assert_same_values,
    example_script,
    loss_of,
    seeded,
    tokens,
    with_examples,
)
from torch import nn
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

from fsdp_runtime import block_policies
from fsdp_runtime.integrations import fabric as ours
from ragged_shard.state_dict import full_state_dict
from ragged_shard.testing import on_ranks, record_collectives

pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed (the extra `fabric`)")


def shard_by_torch(model, mesh):
    for block in model.blocks:
        fully_shard_of_torch(block, mesh=mesh["data_parallel"])
    return fully_shard_of_torch(model, mesh=mesh["data_parallel"])


def fabric_for(system, parallelize_fn=None, **options):
    """A launched Fabric; the ranks are there already, as under torchrun."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy

    size, rank = dist.get_world_size(), dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    options = {"data_parallel_size": size, "tensor_parallel_size": 1, **options}
    if system == "ours":
        chosen = ours.strategy(parallelize_fn or ours.parallelize(nn.Linear), **options)
    else:
        chosen = ModelParallelStrategy(parallelize_fn or shard_by_torch, **options)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=chosen, plugins=[LightningEnvironment()])
    fabric.launch()
    return fabric


def prepared(system, seed=0, width=8, **options):
    fabric = fabric_for(system, **options)
    model = fabric.setup_module(seeded(Body, seed, width=width))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fabric, model, optimizer


def train(made, steps=range(4), accumulate=1):
    """Losses and norms, and how many reduce-scatters each microbatch took."""
    fabric, model, optimizer = made
    found, reductions = [], []
    for step in steps:
        last = (step + 1) % accumulate == 0
        with record_collectives() as record, fabric.no_backward_sync(model, enabled=not last):
            loss = loss_of(model, tokens(step))
            fabric.backward(loss)
        reductions.append(sum("reduce_scatter" in kind for kind in record.kinds))
        norm: Any = 0.0
        if last:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
            norm = norm if type(norm) is torch.Tensor else norm.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
        found += [float(loss.detach()), float(norm)]
    return found, reductions


@on_ranks(3)
def test_files_of_one_process_load_and_load_raw_sends_no_parameter(tmp_path):
    plain = seeded(seed=3, width=64)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loss_of(plain, tokens(rank=0)).backward()
    optimizer.step()
    path = tmp_path / "plain.pt"
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), tmp_path / "raw.pt")
        torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    fabric, model, _ = prepared("ours", width=64)
    with record_collectives() as record:
        fabric.load_raw(tmp_path / "raw.pt", model)
    assert record.bytes_sent < sum(param.nbytes for param in plain.parameters()) / 20
    assert_same_values(full_state_dict(model._forward_module), plain.state_dict())
    fabric, model, mine = prepared("ours", width=64)
    fabric.load(path, {"model": model, "optimizer": mine})
    for step in range(1, 3):  # every rank has the same batch, so that one process computes the same
        for module, steps in ((plain, optimizer), (model, mine)):
            steps.zero_grad()
            loss_of(module, tokens(step, rank=0)).backward()
            steps.step()
    assert_same_parameters(model._forward_module, plain)


@on_ranks(2)
def test_a_model_on_meta_gets_its_file_and_wrong_names_and_axes_are_refused(tmp_path):
    expected = seeded(seed=3).state_dict()
    if dist.get_rank() == 0:
        torch.save(expected, tmp_path / "raw.pt")
        torch.save({**expected, "extra": torch.zeros(1)}, tmp_path / "other.pt")
        torch.save({"model": expected}, tmp_path / "model.pt")
    dist.barrier()
    fabric = fabric_for("ours", ours.parallelize(nn.Linear, block_policy=block_policies.rows(4)))
    with fabric.init_module(empty_init=True):
        model = Body()
    assert model.embed.weight.is_meta
    model = fabric.setup_module(model)
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert_same_values(full_state_dict(model._forward_module), expected)
    with pytest.raises(ValueError, match="extra of the state dict is not in the model"):
        fabric.load_raw(tmp_path / "other.pt", model)
    fabric.load_raw(tmp_path / "other.pt", model, strict=False)
    fabric, model, optimizer = prepared("ours")
    with pytest.raises(KeyError, match="optimizer"):
        fabric.load(tmp_path / "model.pt", {"model": model, "optimizer": optimizer})
    fabric.load(tmp_path / "model.pt", {"model": model})
    fabric = fabric_for("ours", data_parallel_size=1, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="2 ranks on its axis tensor_parallel"):
        fabric.setup_module(seeded())


@on_ranks(2)
def test_with_tensor_parallelism_the_norm_is_that_of_one_process():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def by_columns_and_rows(model, mesh):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x = torch.randn(3, 8)
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    expected = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    shard = ours.parallelize(tensor_parallel=by_columns_and_rows)
    fabric = fabric_for("ours", shard, data_parallel_size=1, tensor_parallel_size=2)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(x).square().mean())
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert type(norm) is torch.Tensor
    torch.testing.assert_close(norm, expected)


@with_examples
@on_ranks(2)
def test_the_example_trains(tmp_path):
    script = example_script("train_fabric")
    from lightning_fabric import Fabric

    fabric_for("ours")  # sets what Fabric reads of the environment
    size = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=size, strategy=script.make_strategy(size))
    fabric.launch()
    losses = script.train(fabric, str(tmp_path))
    assert len(losses) == 8
    assert losses[-1] < losses[0]
