"""Norms over any mix of placements and meshes, and torch's clipping with them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from ragged_shard import RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

NO_MIXED_LISTS = pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: a list with a DTensor is DTensor's alone"
)
RAGGED = RaggedShard((0,), (3, 0, 1))
SHAPE = (4, 3, 2)


def plain(shape=SHAPE, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25


def spread(tensor, placements=(RAGGED,), mesh_shape=None):
    mesh = rank_mesh(*(mesh_shape or (dist.get_world_size(),)))
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


@on_ranks(3)
def test_norms_are_right_to_1e_6_and_lists_take_one_collective():
    x, rx = plain(shape=SHAPE) - 0.6, spread(plain(shape=SHAPE) - 0.6)
    for order in (1, 2, 3.5, float("inf"), 0, -1, float("-inf")):
        for got, wanted in [
            (torch.linalg.vector_norm(rx, order), torch.linalg.vector_norm(x, order)),
            (torch.norm(rx, order), torch.norm(x, order)),
        ]:
            assert got.to_local().item() == pytest.approx(wanted.item(), rel=1e-6), order
    for order in (1, 2, float("inf")):
        with record_collectives() as record:
            several = torch._foreach_norm([rx, rx * 2, rx.double().float()], order)
        assert record.kinds == ["all_reduce"]
        wanted = torch.linalg.vector_norm(x, order).item()
        assert [n.item() for n in several] == pytest.approx([wanted, 2 * wanted, wanted], rel=1e-6)
    huge = spread(torch.full(SHAPE, 3.9e18))  # the sum of squares overflows fp32, no rank's own does
    assert torch.linalg.vector_norm(huge).item() == pytest.approx(3.9e18 * 24**0.5, rel=1e-6)


@on_ranks(4)
def test_norms_of_hsdp_tensors_reduce_over_the_ragged_axis_only():
    x = plain()
    tensor = spread(x, (Replicate(), RaggedShard((0,), (1, 3))), (2, 2))
    both = spread(x, (RaggedShard((0,), (1, 3)), Shard(1)), (2, 2))
    strided = spread(x, (StridedRaggedShard((0,), (1, 1), 2), Shard(0)), (2, 2))
    with record_collectives() as record:
        norm = torch._foreach_norm([tensor])[0]
    assert record.kinds == ["all_reduce"]
    assert record.events[0].ranks == 2
    assert record.bytes_sent == 8
    for found in (norm, *torch._foreach_norm([both, strided])):
        assert found.item() == pytest.approx(x.norm().item(), rel=1e-6)
    for dim in (0, 1, 2, (0, 2)):
        for ragged in (tensor, both, strided):
            torch.testing.assert_close(ragged.sum(dim).full_tensor(), x.sum(dim))


def several_meshes():
    """Parameters on meshes of the same ranks, each with a gradient; and the same in one process."""
    dense = rank_mesh(4, names=("fsdp",))
    sparse = rank_mesh(2, 2, names=("efsdp", "ep"))
    copies = rank_mesh(2, 2, names=("replicate", "shard"))
    ragged = RaggedShard((0,), (1, 3))
    grads = [plain(seed=seed) for seed in range(6)]
    held: list[Any] = [
        distribute_tensor(grads[0], dense, [RaggedShard((0,), (1, 2, 0, 1))], src_data_rank=None),
        distribute_tensor(
            grads[1], sparse, [StridedRaggedShard((0,), (1, 1), 2), Shard(0)], src_data_rank=None
        ),
        distribute_tensor(grads[2], copies, [Replicate(), ragged], src_data_rank=None),
        DTensor.from_local(grads[3], sparse, [Replicate()] * 2).redistribute(
            placements=[Replicate(), Shard(1)]
        ),
        grads[4].clone(),
        distribute_tensor(grads[5].double(), dense, [RaggedShard((0,), (1, 2, 0, 1))], src_data_rank=None),
    ]
    grads[5] = grads[5].double()
    return held, grads


def clipped(foreach, order):
    held, grads = several_meshes()
    grad: Any
    params = [torch.empty_like(grad) for grad in held]
    twins = [torch.empty_like(grad) for grad in grads]
    for param, grad in zip([*params, *twins], [*held, *grads], strict=True):
        param.grad = grad
    with record_collectives() as record:
        norm: Any = torch.nn.utils.clip_grad_norm_(params, 0.5, order, foreach=foreach)
    wanted = torch.nn.utils.clip_grad_norm_(twins, 0.5, order, foreach=foreach)
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    for param, twin in zip(params, twins, strict=True):
        grad = param.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(full, twin.grad, rtol=1e-6, atol=1e-7)
    return record.kinds


@NO_MIXED_LISTS
@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
def test_torchs_clipping_takes_any_mix_of_meshes_plain_tensors_and_dtensors(foreach, order):
    kinds = run_ranks(4, clipped, foreach, order)[0]
    assert set(kinds) == {"all_reduce"}
    if foreach is None:  # fp32 over all ranks, and over the pairs of "shard" and "ep"; fp64 over all
        assert len(kinds) == 3


@on_ranks(4)
def test_norms_over_different_ranks_are_not_stacked():
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    both = distribute_tensor(plain(), mesh, [RaggedShard((0,), (1, 3)), Shard(1)], src_data_rank=None)
    one = distribute_tensor(plain(), mesh["dp"], [RaggedShard((0,), (1, 3))], src_data_rank=None)
    with pytest.raises(NotImplementedError, match="copies or other parameters"):
        torch.nn.utils.get_total_norm([both, one])
