"""Optimizers on parameters that tensor parallelism cuts under FSDP: the bits of one process, and the least traffic."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import BF16, cut_twice, put, run_of, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from block_optim import Muon
from block_optim.muon.assignment import SENT_BYTES as SENT
from layout_planner import Elements, Tile
from ragged_shard import RaggedShard, StridedRaggedShard
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

CASES: dict[str, dict[str, Any]] = {
    "Muon": {},
    "Muon buckets": {"cautious_weight_decay": True},
    "Muon cautious": {"dtype": BF16},
    "Shampoo": {},
    "SOAP": {},
    "AdamW": {},
    "Mixed": {},
}


def cut(tp, dims, units, dim):
    """(the data axis's, the tensor axis's) placements, as `fully_shard` makes them after `parallelize_module`."""
    if tp > 1 and dim in dims:
        return [StridedRaggedShard(dims, units, tp), Shard(dim)]
    return [RaggedShard(dims, units), Shard(dim)]


def layouts(dp, tp):
    """By name: a shape, and placements on (dp, tp)."""
    # An empty rank, and a cut through a row.
    rows = {1: [1], 2: [3, 1], 3: [1, 0, 1], 4: [1, 0, 2, 3]}[dp]
    elements = {1: [1], 2: [5, 3]}.get(dp, rows)
    return {
        "colwise": ((24, 12), cut(tp, (0,), rows, 0)),
        "rowwise": ((24, 12), cut(tp, (0,), rows, 1)),
        "colwise, any cut": ((24, 16 if dp == 2 else 12), cut(tp, (0, 1), elements, 0)),
        "rowwise, any cut": ((24, 16 if dp == 2 else 12), cut(tp, (0, 1), elements, 1)),
        "not divisible, and empty": ((7, 5), [Replicate(), Shard(0)]),
        "not divisible columns": ((5, 7), [Replicate(), Shard(1)]),
        "even on both": ((7, 5), [Shard(0), Shard(1)]),
        "experts' columns": ((6, 6, 12), cut(tp, (0,), [1] * (dp - 1) + [2] if dp == 2 else [1] * dp, 2)),
        "experts' rows": ((6, 12, 6), cut(tp, (0,), [1] * (dp - 1) + [2] if dp == 2 else [1] * dp, 1)),
    }


def pair(case, shape, placements, mesh_shape=(2, 2), **options):
    """Runs of one parameter: with these placements on the last axes, and plain."""

    def layout(mesh, ndim):
        return [Replicate()] * (mesh.ndim - 2) + list(placements)

    options = {"shapes": (shape,), "lr": 0.02, **options}
    return run_of(case, layout, mesh_shape, **options), run_of(case, **options)


def equal(case, *layout, **options):
    """Assert that two steps give the bits of one process; returns the optimizer."""
    ours, theirs = pair(case, *layout, **options)
    same(ours.steps(0, 2).result(), theirs.steps(0, 2).result())
    return ours.optimizer


@cut_twice
@pytest.mark.parametrize(
    ("mesh_shape", "every"),
    [
        ((2, 2), False),
        *(pytest.param(m, True, marks=pytest.mark.long) for m in ((2, 2), (2, 1, 2), (1, 4), (1, 3), (3, 1))),
    ],
)
@on_ranks("mesh_shape", timeout=200)
def test_every_optimizer_gives_the_bits_of_one_process_under_tensor_parallelism(mesh_shape, every):
    for number, (case, options) in enumerate(CASES.items()):
        tensors = list(layouts(*mesh_shape[-2:]).values())
        for shape, placements in tensors if every else tensors[number % 3 :: 3]:
            equal(case, shape, placements, mesh_shape, **options)


def counted(case, shape, placements, options):
    """Collectives of the second step, and the run."""
    run, _ = pair(case, shape, placements, skip_nonfinite=False, **options)
    run.steps(0, 1).give(1)
    with record_collectives() as record:
        run.optimizer.step()
    return record, run


def sent_by_muon(shape, placements, options):
    record, run = counted("Muon", shape, placements, options)
    (assignment,) = run.optimizer.assignment.domains
    return list(record.kinds), sum(e.bytes_sent for e in record.events if e.kind == "all_to_all"), assignment


@pytest.mark.parametrize("dim", [0, 1])
def test_a_matrix_travels_once_to_its_owner_over_both_axes_and_once_back(dim):
    ranks = run_ranks(4, sent_by_muon, (24, 12), cut(2, (0,), [3, 1], dim), {})
    for kinds, _, assignment in ranks:
        assert kinds == ["all_reduce", "all_to_all", "all_to_all"]  # has anyone a gradient; there, and back
        assert assignment.num_ranks == 4
        (matrix,) = assignment.matrices
        assert dict(matrix.holders) == ({0: 108, 1: 108, 2: 36, 3: 36})
        assert matrix.moved == 24 * 12 - 108
    assert sum(sent for _, sent, _ in ranks) == 2 * SENT * (24 * 12 - 108) == ranks[0][2].bytes_moved


def test_heads_that_stay_whole_are_exchanged_along_the_data_axis_only():
    placements = cut(2, (0, 1), [5, 3], 0)
    for kinds, _, assignment in run_ranks(4, sent_by_muon, (24, 16), placements, {"matrices": (6,) * 4}):
        assert assignment.num_ranks == 2
        assert len(assignment.matrices) == 2  # of this rank's half
        assert kinds == ["all_reduce", "all_to_all", "all_to_all"]


def strips(dim):
    options = {"max_preconditioner_dim": 6}
    record, run = counted("Shampoo", (24, 12), cut(2, (0,), [1, 1], dim), options)
    numel = run.optimizer.state[run.params[0]]["exp_avg"].to_local().numel()
    return list(record.kinds), record.bytes_sent, run.optimizer.bytes_per_step, numel


@cut_twice
def test_strips_that_lie_whole_on_a_rank_stay_and_cut_ones_are_shared_evenly():
    for kinds, sent, announced, numel in run_ranks(4, strips, 0):
        assert (kinds, sent, announced, numel) == ([], 0, 0, 72)
    found = run_ranks(4, strips, 1)
    assert [numel for *_, numel in found] == [72] * 4  # four strips of 6 x 12, each cut in two: one a rank
    assert found[0][2] == 2 * 4 * 24 * 12 / 2
    for kinds, *_ in found:
        assert kinds == ["all_reduce", "all_to_all", "all_to_all"]


@on_ranks(4)
def test_blocks_of_8_bit_states_follow_the_slab_that_tensor_parallelism_leaves():
    for block, shape, placements in (
        (Tile(4, 4), (24, 16), cut(2, (0,), [2, 1], 0)),
        (Tile(4, 4), (24, 16), cut(2, (0,), [2, 1], 1)),
        (Tile(4, 8), (24, 16), cut(2, (0, 1), [5, 1], 1)),
        (Elements(8), (24, 16), cut(2, (0, 1), [5, 3], 0)),
        (Tile(4, 4), (3, 16, 8), cut(2, (0,), [2, 1], 2)),
        # Experts: the stack is cut, and between bands inside each part.
        (Tile(4, 16), (4, 16, 32), [Shard(0), RaggedShard((0, 1), (3, 5))]),
        (Elements(128), (4, 16, 32), [Shard(0), RaggedShard((0, 1), (3, 5))]),
    ):
        (state,) = equal("AdamW8bit", shape, placements, block=block).state.values()
        assert state["exp_avg"].dtype == torch.uint8


@on_ranks(4)
def test_experts_that_another_axis_spreads_are_exchanged_among_their_ranks():
    """Experts over one axis, each expert's matrices cut over the other; ragged and even, either axis first."""
    for placements in (
        [Shard(0), RaggedShard((0, 1, 2), (1, 5))],
        [Shard(0), Shard(0)],
        [StridedRaggedShard((0, 1), (3, 1), split_factor=2), Shard(0)],
    ):
        assert len(equal("Muon", (6, 8, 5), placements).assignment.domains[0].matrices) == 3


@on_ranks(4)
def test_ranks_may_have_been_in_different_numbers_of_process_groups_before():
    mesh = init_device_mesh("cpu", (2, 2))  # first: from torch 2.15 on it waits for ranks with as many groups
    for _ in range(dist.get_rank()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    weights, grads = (torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(2))
    params: list[Any] = [torch.nn.Parameter(weights.clone())]
    params.append(torch.nn.Parameter(put(weights, mesh, [Shard(0), Shard(1)])))
    for p, grad in zip(params, (grads, put(grads, mesh, [Shard(0), Shard(1)])), strict=True):
        p.grad = grad
        Muon([p]).step()
    assert torch.equal(params[1].full_tensor(), params[0])


@on_ranks(4)
def test_numbers_for_rows_follow_rows_that_tensor_parallelism_leaves_whole():
    for dims, units in (((0,), [3, 1]), ((0, 1), [2, 1])):
        equal("NorMuon", (24, 8), cut(2, dims, units, 0))


@on_ranks(4)
def test_ranks_that_hold_nothing_need_no_gradient():
    """No rank has one; all but two, which hold nothing, have one."""
    for case in ("Muon", "Shampoo", "SOAP"):
        ours, theirs = pair(case, (24, 16), cut(2, (0,), [1, 0], 1))
        for run in (ours, theirs):
            run.step(0)
            run.step(1, without=(0,))
        theirs.step(2)
        ours.step(2, without=(0,) if dist.get_rank() >= 2 else ())
        same(ours.result(), theirs.result())
