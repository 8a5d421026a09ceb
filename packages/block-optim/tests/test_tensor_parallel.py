"""Optimizers on parameters that tensor parallelism cuts under FSDP: the bits of one process, and the least traffic."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import full, put, same
from torch.distributed.tensor import Replicate, Shard

from block_optim import SOAP, AdamW, AdamW8bit, Mixed, Muon, Shampoo, qk_clip_
from block_optim.muon.assignment import SENT_BYTES as SENT
from layout_planner import Elements, Tile
from ragged_shard import RaggedShard, StridedRaggedShard
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (Muon, {}),
    "Muon in buckets": (
        Muon,
        {"cautious_weight_decay": True, "nesterov": False, "bucket_bytes": 300, "matrices": "heads:1"},
    ),
    "Muon, bf16": (Muon, {"momentum_dtype": torch.float32, "dtype": torch.bfloat16}),
    "Shampoo": (Shampoo, {"max_preconditioner_dim": 4}),
    "SOAP": (SOAP, {"max_preconditioner_dim": 4}),
    "AdamW": (AdamW, {}),
    "Mixed": (Mixed, {}),
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


class Pair:
    """A parameter in a layout and its plain twin, each with an optimizer."""

    def __init__(self, kind, mesh, shape, placements, dtype=torch.float32, **options):
        self.shape, self.mesh, self.dtype = shape, mesh, dtype
        self.placements = [Replicate()] * (mesh.ndim - 2) + list(placements)
        self.generator = torch.Generator().manual_seed(0)
        weight = self.random()
        self.plain = torch.nn.Parameter(weight.clone())
        self.param = torch.nn.Parameter(self.put(weight))
        groups: list[Any] = [[("w", self.plain)], [("w", self.param)]]
        if kind is Mixed:
            groups = [[{"params": named, "algorithm": "muon"}] for named in groups]
        self.theirs, self.ours = (kind(group, lr=0.02, **options) for group in groups)

    def random(self):
        return torch.randn(self.shape, generator=self.generator).to(self.dtype)

    def put(self, value):
        return put(value, self.mesh, self.placements)

    def step(self):
        grad = self.random()
        self.plain.grad, self.param.grad = grad.clone(), self.put(grad)
        self.theirs.step()
        self.ours.step()

    def check(self):
        found = {"w": full(self.param.detach())}
        wanted = {"w": self.plain.detach()}
        for key, value in self.theirs.state[self.plain].items():
            wanted[key], found[key] = value, full(self.ours.state[self.param][key])
        same(found, wanted)


def every_layout(mesh_shape, names):
    mesh = rank_mesh(*mesh_shape, names=("replicate", "dp", "tp")[-len(mesh_shape) :])
    for name in names:
        kind, options = KINDS[name]
        for shape, placements in layouts(*mesh_shape[-2:]).values():
            pair = Pair(kind, mesh, shape, placements, **options)
            for _ in range(2):
                pair.step()
            pair.check()


_LONG = [pytest.param(shape, marks=pytest.mark.long) for shape in ((1, 4), (1, 3), (3, 1))]


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 1, 2), *_LONG])
def test_every_optimizer_gives_the_bits_of_one_process_under_tensor_parallelism(mesh_shape):
    run_ranks(math.prod(mesh_shape), every_layout, mesh_shape, list(KINDS), timeout=200)


def counted(placements, shape, units_of_mesh):
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    pair = Pair(Muon, mesh, shape, placements, skip_nonfinite=False, **units_of_mesh)
    pair.step()
    with record_collectives() as record:
        pair.ours.step()
    (assignment,) = pair.ours.assignment.domains
    return list(record.kinds), sum(e.bytes_sent for e in record.events if e.kind == "all_to_all"), assignment


@pytest.mark.parametrize("dim", [0, 1])
def test_a_matrix_travels_once_to_its_owner_over_both_axes_and_once_back(dim):
    found = run_ranks(4, counted, cut(2, (0,), [3, 1], dim), (24, 12), {})
    for kinds, _, assignment in found:
        assert kinds == [
            "all_reduce",
            "all_to_all",
            "all_to_all",
        ]  # a byte: has anyone a gradient; there, and back
        assert assignment.num_ranks == 4
        (matrix,) = assignment.matrices
        assert dict(matrix.held) == ({0: 108, 1: 108, 2: 36, 3: 36})
        assert matrix.moved == 24 * 12 - 108
    assert sum(sent for _, sent, _ in found) == 2 * SENT * (24 * 12 - 108) == found[0][2].bytes_moved


def test_heads_that_tensor_parallelism_leaves_whole_are_exchanged_along_the_data_axis_only():
    for kinds, _, assignment in run_ranks(
        4, counted, cut(2, (0, 1), [5, 3], 0), (24, 16), {"matrices": "heads:4"}
    ):
        assert assignment.num_ranks == 2
        assert len(assignment.matrices) == 2  # of this rank's half
        assert kinds == ["all_reduce", "all_to_all", "all_to_all"]


def strips(dim):
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    options = {"max_preconditioner_dim": 6, "skip_nonfinite": False}
    pair = Pair(Shampoo, mesh, (24, 12), cut(2, (0,), [1, 1], dim), **options)
    pair.step()
    with record_collectives() as record:
        pair.ours.step()
    state = pair.ours.state[pair.param]
    return (
        list(record.kinds),
        record.bytes_sent,
        pair.ours.bytes_per_step,
        state["exp_avg"].to_local().numel(),
    )


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
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    cases = [
        (Tile(4, 4), (24, 16), cut(2, (0,), [2, 1], 0)),
        (Tile(4, 4), (24, 16), cut(2, (0,), [2, 1], 1)),
        (Tile(4, 8), (24, 16), cut(2, (0, 1), [5, 1], 1)),
        (Elements(8), (24, 16), cut(2, (0, 1), [5, 3], 0)),
        (Tile(4, 4), (3, 16, 8), cut(2, (0,), [2, 1], 2)),
        # Experts: the stack is cut, and between bands inside each part.
        (Tile(4, 16), (4, 16, 32), [Shard(0), RaggedShard((0, 1), (3, 5))]),
        (Elements(128), (4, 16, 32), [Shard(0), RaggedShard((0, 1), (3, 5))]),
    ]
    for block, shape, placements in cases:
        pair = Pair(AdamW8bit, mesh, shape, placements, block=block, min_8bit_numel=1)
        assert pair.ours.state[pair.param]["exp_avg"].dtype == torch.uint8
        for _ in range(2):
            pair.step()
        pair.check()


@on_ranks(4)
def test_experts_that_another_axis_spreads_are_exchanged_among_their_ranks():
    """Experts over one axis, each expert's matrices cut over the other; ragged and even, either axis first."""
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    for placements in (
        [Shard(0), RaggedShard((0, 1, 2), (1, 5))],
        [Shard(0), Shard(0)],
        [StridedRaggedShard((0, 1), (3, 1), split_factor=2), Shard(0)],
    ):
        pair = Pair(Muon, mesh, (6, 8, 5), placements)
        assert len(pair.ours.assignment.domains[0].matrices) == 3
        pair.step()
        pair.check()


@on_ranks(4)
def test_what_tensor_parallelism_cuts_through_is_refused_on_every_rank_by_name():
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    found = []
    for kind, options, placements in (
        (AdamW8bit, {"block": Tile(4, 16), "min_8bit_numel": 1}, cut(2, (0,), [2, 1], 1)),
        (AdamW8bit, {"block": Elements(8), "min_8bit_numel": 1}, cut(2, (0,), [2, 1], 1)),
        (Muon, {"normuon": True}, cut(2, (0,), [2, 1], 1)),
    ):
        with pytest.raises(ValueError, match=r"^w: ") as error:
            Pair(kind, mesh, (24, 16), placements, **options)
        found.append(str(error.value))
    assert all("cut through blocks" in text for text in found[:2])
    assert all("cut inside rows" in text for text in found[2:])


@on_ranks(4)
def test_numbers_for_rows_follow_rows_that_tensor_parallelism_leaves_whole():
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    for dims, units in (((0,), [3, 1]), ((0, 1), [2, 1])):
        pair = Pair(Muon, mesh, (24, 8), cut(2, dims, units, 0), normuon=True)
        for _ in range(2):
            pair.step()
        pair.check()


@on_ranks(4)
def test_ranks_that_hold_nothing_need_no_gradient():
    """Nobody has one; all but one rank have one; a parameter that is frozen until later."""
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    for kind, options in (KINDS["Muon"], KINDS["Shampoo"], KINDS["SOAP"]):
        pair = Pair(kind, mesh, (24, 16), cut(2, (0,), [1, 0], 1), **options)
        pair.step()
        pair.param.grad = pair.plain.grad = None
        pair.ours.step()
        pair.theirs.step()
        grad = pair.random()
        pair.plain.grad, pair.param.grad = grad.clone(), pair.put(grad)
        if dist.get_rank() >= 2:  # these hold nothing
            pair.param.grad = None
        pair.ours.step()
        pair.theirs.step()
        pair.check()


@on_ranks(4)
def test_heads_are_clipped_wherever_tensor_parallelism_cuts_them():
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    logits = torch.tensor([50.0, 150.0, 300.0, 20.0])
    for placements in layouts(2, 2).values():
        shape, placed = placements
        if shape != (24, 16) and shape != (24, 12):
            continue
        pair = Pair(AdamW, mesh, shape, placed)
        with torch.no_grad():
            qk_clip_(pair.plain, None, logits)
            qk_clip_(pair.param, None, logits)
        pair.check()
