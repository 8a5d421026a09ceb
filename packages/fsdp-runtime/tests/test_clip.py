"""`clip_grad_norm_` of this package: a plain norm, also over pipeline stages."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_runtime import clip_grad_norm_, fully_shard
from ragged_shard import distribute_like
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks


def stage(number):
    torch.manual_seed(number)
    return nn.Linear(8, 4 + 3 * number)


def with_gradients(model, scale=1.0):
    for seed, param in enumerate(model.parameters()):
        param.grad = scale * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@on_ranks(4)
def test_the_norm_of_all_pipeline_stages_takes_one_more_all_reduce(order):
    mesh = rank_mesh(2, 2, names=("pp", "dp"))
    mine: Any = stage(mesh.get_local_rank("pp"))
    fully_shard(mine, mesh=mesh["dp"])
    whole = nn.ModuleList(with_gradients(stage(number)) for number in range(2))
    x = torch.zeros(1, 8)
    mine(x).sum().backward()  # gives the gradients their places
    for param, wanted in zip(mine.parameters(), whole[mesh.get_local_rank("pp")].parameters(), strict=True):
        like: Any = param.grad
        full: Any = wanted.grad
        like.copy_(distribute_like(full, like, src_data_rank=None))
    with record_collectives() as record:
        norm = clip_grad_norm_(mine.parameters(), 0.5, order, pp_mesh=mesh["pp"])
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, order)
    assert type(norm) is torch.Tensor
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert record.kinds == ["all_reduce"] * 2
    for param, wanted in zip(mine.parameters(), whole[mesh.get_local_rank("pp")].parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, rtol=1e-6, atol=1e-7)


@on_ranks(4)
def test_a_norm_that_is_not_finite_raises_on_every_stage_and_clips_nothing():
    mesh = rank_mesh(2, 2, names=("pp", "dp"))
    model = with_gradients(stage(0), float("nan") if mesh.get_local_rank("pp") else 1.0)
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="over all pipeline stages is nan: not clipped"):
        clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True, pp_mesh=mesh["pp"])
    for param, kept in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad, kept, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="pp_mesh has 2 axes"):
        clip_grad_norm_(model.parameters(), 0.5, pp_mesh=mesh)


def test_plain_parameters_are_clipped_as_by_torch():
    model, other = with_gradients(stage(1)), with_gradients(stage(1))
    norm = clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad)
    assert clip_grad_norm_([torch.ones(1, requires_grad=True)], 1.0) == 0


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))


def clip_next_to_tensor_parallel(order):
    """Norms lie on dp alone, matrices on dp and tp; the row-wise bias too."""
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    model: Any = parallelize_module(block(), mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    alone = block()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    mine = x[2 * mesh.get_local_rank("dp") :][:2]
    model(mine).square().mean().backward()
    alone(x).square().mean().backward()
    with pytest.raises(NotImplementedError, match="copies or other parameters"):
        clip_grad_norm_(model.parameters(), 0.5, order)
    with record_collectives() as record:
        norm = clip_grad_norm_(model.parameters(), 0.5, order, copies=True)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5, order)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-7)
    return record.kinds


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_copies_count_once_next_to_parameters_that_tensor_parallelism_cuts(order):
    kinds = run_ranks(4, clip_next_to_tensor_parallel, order)[0]
    assert kinds == ["all_reduce"] * 2  # matrices over all ranks; norms and the row-wise bias over dp
