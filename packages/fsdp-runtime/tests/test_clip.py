"""Clipping as in one process: any parameters, pipeline stages, and gradients that are not as backward left them."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import Ops, assert_same_gradients, loss_of, plain_backward, seeded, shard, tokens
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_runtime import clip_grad_norm_, fully_shard
from ragged_shard import RaggedDTensor, RaggedShard, distribute_like
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, simulated_ranks

WIDTH = 7  # odd, so that there is padding


def plain(**options):
    """The same model in one process, with the gradient of all ranks' batches."""
    return plain_backward(seeded(width=WIDTH, **options))


def after_backward(**options):
    model = shard(seeded(width=WIDTH), **options)
    loss_of(model, tokens()).backward()
    return model


def same(model, whole, norm, max_norm, order):
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, order)
    assert type(norm) is torch.Tensor
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(model, whole, atol=1e-7)


def poison_padding(model):
    """Write NaN wherever the memory of gradients belongs to none of them. Returns how many elements."""
    storages: dict[int, Any] = {}
    for param in model.parameters():
        local = param.grad.to_local()
        where = local.untyped_storage()
        _, held = storages.setdefault(
            where.data_ptr(), (local, torch.zeros(where.nbytes() // 4, dtype=torch.bool))
        )
        held[local.storage_offset() : local.storage_offset() + local.numel()] = True
    for local, held in storages.values():
        local.as_strided(held.shape, (1,), 0)[~held] = torch.nan
    return sum(int((~held).sum()) for _, held in storages.values())


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)], ids=str)
@on_ranks("shape")
def test_gradients_are_clipped_as_in_one_process_without_padding_and_copies(shape):
    mesh = rank_mesh(*shape, names=("replica", "shard")[-len(shape) :])
    for order in (2.0, 1.0, float("inf")):
        model = after_backward(mesh=mesh)
        padding = torch.tensor(float(poison_padding(model)))
        dist.all_reduce(padding)
        assert padding > 0
        with record_collectives() as record:
            norm = model.clip_grad_norm_(0.05, order)
        assert record.kinds == ["all_reduce"]
        same(model, plain(), norm, 0.05, order)


@on_ranks(3)
def test_gradients_that_a_rank_does_not_have_do_not_count_and_no_rank_waits():
    """Rank 0 drops some gradients, rank 1 all."""
    model, whole = after_backward(), plain()
    rank = dist.get_rank()
    for number, param in enumerate(model.parameters()):
        if rank == 1 or (rank == 0 and number % 2):
            param.grad = None
    squares = [
        param.grad.to_local().double().square().sum()
        for param in model.parameters()
        if param.grad is not None
    ]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum()
    dist.all_reduce(total)
    before = [None if param.grad is None else param.grad.to_local().clone() for param in model.parameters()]
    norm = model.clip_grad_norm_(0.01)
    assert norm.item() == pytest.approx(total.sqrt().item(), rel=1e-5)
    assert norm < nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    for param, kept in zip(model.parameters(), before, strict=True):
        if kept is not None:
            torch.testing.assert_close(param.grad.to_local(), kept * (0.01 / (norm + 1e-6)))


@on_ranks(3)
def test_gradients_that_the_user_replaced_are_clipped_where_they_are():
    """By others of the same layout, in memory of their own; by one of another layout; by nothing and back."""
    model = after_backward()
    params = list(model.parameters())
    for number, param in enumerate(params):
        if number % 3 == 0:
            param.grad = param.grad.clone()
        elif number == 1:
            units = (0,) * (dist.get_world_size() - 1) + (1,)
            param.grad = param.grad.redistribute(placements=[RaggedShard((0,), units)])
            assert isinstance(param.grad, RaggedDTensor)
    norm = model.clip_grad_norm_(0.05)
    same(model, plain(), norm, 0.05, 2.0)


@on_ranks(2)
def test_parameters_that_are_not_sharded_count_once():
    model, whole = seeded(width=WIDTH), plain()
    fully_shard(model, ignored_params={model.norm.weight, model.norm.bias})
    loss_of(model, tokens()).backward()
    for param in (model.norm.weight, model.norm.bias):
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    norm = model.clip_grad_norm_(0.05)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(model.norm.weight.grad, whole.norm.weight.grad)
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), whole.head.weight.grad)


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))


@on_ranks(4)
def test_matrices_that_tensor_parallelism_cuts_count_on_all_ranks_and_copies_once():
    """Norms are on dp alone, matrices on dp and tp; the row-wise bias too. By the method and by the function."""
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for of_model, order in ((True, 2.0), (False, float("inf"))):
        model: Any = parallelize_module(block(), mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        alone = block()
        model(x[2 * mesh.get_local_rank("dp") :][:2]).square().mean().backward()
        alone(x).square().mean().backward()
        clip = model.clip_grad_norm_ if of_model else partial(clip_grad_norm_, list(model.parameters()))
        ranks = "clip_grad_norm_: parameters are on different ranks"
        with pytest.raises(NotImplementedError, match=rf"{ranks}(?s:.*)copies or other parameters"):
            clip(0.5, order)
        with record_collectives() as record:
            norm = clip(0.5, order, copies=True)
        same(model, alone, norm, 0.5, order)
        # Matrices over all ranks; norms and the row-wise bias over dp.
        assert record.kinds == ["all_reduce"] * 2


def test_gradients_next_to_each_other_are_read_and_scaled_as_one():
    with simulated_ranks(1):
        model: Any = fully_shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))))
        model(torch.ones(2, 8)).sum().backward()
        seen = []
        with Ops(lambda op, args: seen.append((str(op), args))):
            model.clip_grad_norm_(1.0)
    assert [[t.numel() for t in args[0]] for op, args in seen if "_foreach" in op] == [[3600], [3600]]


def test_half_precision_is_summed_in_fp32():
    with simulated_ranks(1):
        model: Any = fully_shard(nn.Linear(64, 64, dtype=torch.bfloat16))
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx((64 * 64 + 64) ** 0.5, rel=1e-6)


def stage(number):
    torch.manual_seed(number)
    return nn.Linear(8, 4 + 3 * number)


def with_gradients(model, scale=1.0):
    for seed, param in enumerate(model.parameters()):
        param.grad = scale * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    return model


@on_ranks(4)
def test_the_norm_of_pipeline_stages_takes_one_all_reduce_and_raises_if_not_finite():
    mesh = rank_mesh(2, 2, names=("pp", "dp"))
    number = mesh.get_local_rank("pp")
    for order in (2.0, 1.0, float("inf")):
        mine: Any = fully_shard(stage(number), mesh=mesh["dp"])
        whole = nn.ModuleList(with_gradients(stage(index)) for index in range(2))
        mine(torch.zeros(1, 8)).sum().backward()  # gives the gradients their places
        for param, wanted in zip(mine.parameters(), whole[number].parameters(), strict=True):
            like: Any = param.grad
            full: Any = wanted.grad
            like.copy_(distribute_like(full, like, src_data_rank=None))
        with record_collectives() as record:
            norm = clip_grad_norm_(mine.parameters(), 0.5, order, pp_mesh=mesh["pp"])
        assert record.kinds == ["all_reduce"] * 2
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, order)
        assert type(norm) is torch.Tensor
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        assert_same_gradients(mine, whole[number], rtol=1e-6, atol=1e-7)
    model = with_gradients(stage(0), float("nan") if number else 1.0)
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
    long = nn.Parameter(torch.zeros(3_000_000))
    long.grad = torch.full((3_000_000,), 0.1)  # which one sum in fp32 would round by 4e-4
    assert clip_grad_norm_(long, 1.0).item() == pytest.approx(0.1 * 3_000_000**0.5, rel=5e-5)


def test_gradients_of_a_subclass_without_memory_are_clipped_one_by_one():
    params = [nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4))) for _ in range(2)]
    for number, param in enumerate(params):
        full = torch.full((4, 4), number + 1.0)
        param.grad = TwoTensor(full, full.clone())
    norm: Any = clip_grad_norm_(params, 1.0)
    assert norm.a.item() == pytest.approx((16 + 64) ** 0.5)
    assert params[0].grad.a.sum().item() == pytest.approx(16 / 80**0.5, rel=1e-5)
