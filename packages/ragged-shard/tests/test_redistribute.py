"""Every pair of shardings, on 1-D meshes and on each axis of 2-D ones, against the full tensor; and the bytes sent."""

import copy
import io
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import (
    RaggedDTensor,
    RaggedShard,
    StridedRaggedShard,
    distribute_tensor,
    redistribute,
)
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

UNITS = {1: (1,), 2: (1, 3), 3: (3, 0, 1), 4: (1, 0, 2, 1)}
OTHER_UNITS = {1: (1,), 2: (5, 1), 3: (1, 4, 1), 4: (0, 6, 0, 0)}
SHAPES = [(12,), (4, 6), (4, 3, 2), (8, 1, 3)]


def full_of(shape, dtype=torch.float32):
    return (torch.arange(math.prod(shape)) % 120 + 1).view(shape).to(dtype)


def shardings(shape, ranks):
    found = [Replicate(), Partial("sum"), Partial("avg"), Shard(0)]
    found += [Shard(d) for d in range(1, len(shape))]
    for dims in range(1, len(shape) + 1):
        prefix = tuple(range(dims))
        for units in (UNITS[ranks], OTHER_UNITS[ranks], (0,) * (ranks - 1) + (1,)):
            if math.prod(shape[:dims]) % sum(units) == 0:
                found.append(RaggedShard(prefix, units))
    return found


def place(full, mesh, placements):
    """A tensor of any sharding with the values of ``full``, made without the code under test where torch can."""
    start = RaggedDTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, shape=full.shape)
    return start.redistribute(placements=placements)


def check_pairs(mesh_shape, shape, choices):
    mesh = rank_mesh(*mesh_shape)
    full = full_of(shape)
    for source, pairs in itertools.groupby(choices, lambda pair: pair[0]):
        tensor = place(full, mesh, source)
        for _, target in pairs:
            moved = tensor.redistribute(placements=target)
            assert moved.placements == tuple(target)
            assert moved.to_local().is_contiguous()
            got = moved.full_tensor()
            assert torch.equal(got, full), (source, target, got)
        assert torch.equal(tensor.full_tensor(), full), ("the source changed", source)


some_or_every = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "all"]
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@some_or_every
@on_ranks("ranks")
def test_each_pair_of_placements_on_a_1d_mesh_keeps_the_full_tensor(ranks, every):
    for shape in SHAPES:
        placements = list(enumerate(shardings(shape, ranks)))
        pairs = itertools.product(placements, repeat=2)
        check_pairs((ranks,), shape, [([a], [b]) for (i, a), (j, b) in pairs if every or (i + j) % 3 == 0])


def two_axis_shardings(shape, ragged_ranks):
    units = UNITS[ragged_ranks]
    found = []
    for dims in range(1, len(shape)):
        prefix = tuple(range(dims))
        if math.prod(shape[:dims]) % sum(units) == 0:
            ragged = RaggedShard(prefix, units)
            others = [Replicate(), Partial("sum"), Partial("avg")]
            others += [Shard(d) for d in range(dims, len(shape))]
            found += [(ragged, other) for other in others]
    return found


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 1), (1, 3), (4, 1)], ids=str)
@some_or_every
@on_ranks("mesh_shape")
def test_each_pair_of_placements_on_a_2d_mesh_keeps_the_full_tensor(mesh_shape, every):
    shape = (4, 6, 3)
    plain = list(itertools.product([Replicate(), Partial("sum"), Shard(0), Shard(1), Shard(2)], repeat=2))
    for axis in (0, 1):
        ragged = two_axis_shardings(shape, mesh_shape[axis])
        if axis == 1:
            ragged = [(b, a) for a, b in ragged]
        pairs = list(itertools.product(ragged, ragged + plain)) + list(itertools.product(plain, ragged))
        check_pairs(mesh_shape, shape, pairs if every else pairs[axis::7])  # 7 divides none of the lengths


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 3), (1, 4)], ids=str)
@on_ranks("mesh_shape")
def test_strided_ragged_with_shard_0_keeps_the_full_tensor(mesh_shape):
    mesh = rank_mesh(*mesh_shape)
    full = full_of((24, 8))
    ranks, parts = mesh_shape
    ragged = StridedRaggedShard((0,), UNITS[ranks], split_factor=parts)
    tensor = distribute_tensor(full, mesh, [ragged, Shard(0)])
    rank, part = mesh.get_coordinate() or ()
    tp_rows = full.chunk(parts)[part]
    first, last = ragged.unit_range(rank)
    unit = len(tp_rows) // ragged.total_units
    assert torch.equal(tensor.to_local(), tp_rows[first * unit : last * unit])
    assert torch.equal(tensor.full_tensor(), full)
    for target in (
        [Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Shard(0)],
        [Shard(0), Shard(1)], [Shard(1), Shard(1)], [RaggedShard((0,), UNITS[ranks]), Replicate()],
        [RaggedShard((0,), UNITS[ranks]), Shard(1)], [Replicate(), RaggedShard((0,), (1,) * parts)],
        [Partial(), Shard(0)], [StridedRaggedShard((0, 1), UNITS[ranks], split_factor=parts), Shard(0)],
        [StridedRaggedShard((0, 1), UNITS[ranks], split_factor=parts), Shard(1)],
    ):  # fmt: skip
        moved = tensor.redistribute(placements=target)
        assert torch.equal(moved.full_tensor(), full), target
        assert torch.equal(moved.redistribute(placements=tensor.placements).to_local(), tensor.to_local())


@on_ranks(4)
def test_a_ragged_cut_inside_the_slices_of_a_shard_to_its_left_keeps_the_full_tensor():
    shape = (24, 6)
    first = (Shard(0), RaggedShard((0,), (1, 3)))
    others = [
        (Shard(0), RaggedShard((0, 1), (5, 1))), (Replicate(), Replicate()), (Shard(0), Shard(0)), (Shard(1), Shard(0)),
        (Shard(1), RaggedShard((0,), (1, 3))), (Shard(0), Partial()), (Partial(), RaggedShard((0,), (1, 1))),
        (StridedRaggedShard((0,), (1, 1), 2), Shard(0)), (RaggedShard((0,), (1, 1)), Shard(1)),
    ]  # fmt: skip
    pairs = [(first, other) for other in others] + [(other, first) for other in others]
    check_pairs((2, 2), shape, pairs)


@on_ranks(3)
def test_redistribute_moves_only_bytes_that_change_rank():
    ranks, mesh = 3, rank_mesh(3)
    rank = dist.get_rank()
    full = full_of((12, 5))
    itemsize = full.element_size()
    total = full.numel() * itemsize

    def ranges(units):
        starts = [0, *itertools.accumulate(u * 60 // sum(units) for u in units)]
        return list(itertools.pairwise(starts))

    def overlap(a, b):
        return max(0, min(a[1], b[1]) - max(a[0], b[0]))

    def counted(tensor, target):
        with record_collectives() as record:
            moved = tensor.redistribute(placements=[target])
        assert torch.equal(moved.full_tensor(), full)
        return record.kinds, record.bytes_sent

    one, two = UNITS[ranks], OTHER_UNITS[ranks]
    mine, theirs = ranges(one)[rank], ranges(two)
    tensor = place(full, mesh, [RaggedShard((0,), one)])
    own = tensor.to_local().numel() * itemsize
    leaving = sum(overlap(mine, r) for i, r in enumerate(theirs) if i != rank) * itemsize
    assert counted(tensor, RaggedShard((0,), two)) == (["all_to_all"], leaving)
    assert counted(tensor, RaggedShard((0, 1), one)) == ([], 0)
    rows = -(-12 // ranks)
    shards = [(min(12, r * rows) * 5, min(12, (r + 1) * rows) * 5) for r in range(ranks)]
    leaving = sum(overlap(mine, r) for i, r in enumerate(shards) if i != rank) * itemsize
    assert counted(tensor, Shard(0)) == (["all_to_all"], leaving)
    assert counted(tensor, Replicate()) == (["all_to_all"], (ranks - 1) * own)
    assert counted(tensor, Partial()) == ([], 0)
    replicated = place(full, mesh, [Replicate()])
    assert counted(replicated, RaggedShard((0,), one)) == ([], 0)
    for partial in (Partial("sum"), Partial("avg")):
        pending = place(full, mesh, [partial])
        assert counted(pending, RaggedShard((0,), one)) == (["all_to_all"], total - own)
        even = counted(pending, RaggedShard((0,), (1,) * ranks))
        assert even == (["reduce_scatter"], total - total // ranks)
    even = place(full, mesh, [RaggedShard((0,), (1,) * ranks)])
    assert counted(even, Replicate()) == (["all_gather"], (ranks - 1) * total // ranks)
    one_hot = place(full, mesh, [RaggedShard((0,), (0,) * (ranks - 1) + (1,))])
    assert counted(one_hot, Replicate()) == (["broadcast"], (ranks - 1) * total if rank == ranks - 1 else 0)


@on_ranks(3)
def test_ragged_and_shard_d_exchange_only_bytes_that_change_rank():
    full, rank = full_of((4, 5, 5)), dist.get_rank()
    rows, columns = dict(enumerate(torch.arange(4).split([1, 3, 0]))), torch.arange(5).chunk(3)
    tensor = place(full, rank_mesh(3), [RaggedShard((0,), (1, 3, 0))])
    with record_collectives() as record:
        moved = tensor.redistribute(placements=[Shard(1)])
    elsewhere = sum(len(c) for r, c in enumerate(columns) if r != rank)
    assert record.kinds == ["all_to_all"]
    assert record.bytes_sent == len(rows[rank]) * elsewhere * 5 * 4
    with record_collectives() as record:
        back = moved.redistribute(placements=tensor.placements)
    others = sum(len(rows[r]) for r in rows if r != rank)
    assert record.kinds == ["all_to_all"]
    assert record.bytes_sent == len(columns[rank]) * others * 5 * 4
    assert torch.equal(back.to_local(), tensor.to_local())


@on_ranks(4)
def test_hsdp_reduces_the_shard_over_replicas_and_gathers_over_shards_only():
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))
    full = full_of((8, 5))
    ragged = RaggedShard((0,), (1, 3))
    pending = place(full, mesh, [Partial(), ragged])
    own = pending.to_local().numel() * 4
    with record_collectives() as record:
        settled = pending.redistribute(placements=[Replicate(), ragged])
    assert record.kinds == ["all_reduce"]
    assert record.bytes_sent == 2 * own / 2
    assert torch.equal(settled.full_tensor(), full)
    with record_collectives() as record:
        both = place(full, mesh, [Partial(), Partial()]).redistribute(placements=[Replicate(), ragged])
    assert record.kinds == ["all_to_all", "all_reduce"] or record.kinds == ["all_reduce", "all_to_all"]
    assert torch.equal(both.full_tensor(), full)
    with record_collectives() as record:
        settled.full_tensor()
    assert record.kinds == ["all_to_all"]


@on_ranks(3)
def test_replicate_to_ragged_does_not_keep_the_full_storage():
    mesh = rank_mesh(3)
    full = full_of((6, 4))
    tensor = place(full, mesh, [RaggedShard((0,), (1, 2, 3))])
    local = tensor.to_local()
    assert local.untyped_storage().nbytes() == local.numel() * 4
    assert tensor.redistribute(placements=tensor.placements) is tensor


@on_ranks(3)
def test_async_redistributions_in_flight_together_give_the_same_tensors():
    mesh = rank_mesh(3)
    full = full_of((6, 4)).requires_grad_()
    tensor = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2, 3))])
    handles = [
        tensor.redistribute(placements=[p], async_op=True)
        for p in (Replicate(), RaggedShard((0,), (3, 2, 1)), Shard(1), Partial())
    ]
    for handle in reversed(handles):
        moved = handle.wait()
        assert handle.wait() is moved
        assert torch.equal(moved.full_tensor(), full)
    handles[0].wait().to_local().sum().backward()
    assert torch.equal(tensor.grad.to_local(), torch.ones_like(tensor.to_local()))


@on_ranks(3)
def test_dtensors_of_torch_become_ragged():
    mesh = rank_mesh(3)
    full = full_of((7, 4))
    for placement in (Shard(0), Shard(1), Replicate()):
        theirs = DTensor.from_local(full, mesh, [Replicate()]).redistribute(placements=[placement])
        ours = redistribute(theirs, placements=[RaggedShard((0,), (1, 5, 1))])
        assert torch.equal(ours.full_tensor(), full)


@on_ranks(3)
def test_torchs_distribute_tensor_shards_rows_for_a_ragged_placement():
    mesh = rank_mesh(3)
    ragged = RaggedShard((0,), (1, 2, 3))
    for placements in ([ragged], [ragged, Replicate()], [Shard(1), ragged]):
        on = mesh if len(placements) == 1 else rank_mesh(*((3, 1) if placements[0] is ragged else (1, 3)))
        placed = torch_distribute_tensor(torch.arange(12.0).view(6, 2), on, placements)
        assert placed.placements == tuple(Shard(0) if p is ragged else p for p in placements)
        assert torch.equal(placed.full_tensor(), torch.arange(12.0).view(6, 2))


def dtypes_case(dtype):
    mesh = rank_mesh(3)
    full = full_of((6, 4), dtype) if dtype != torch.bool else full_of((6, 4)) % 3 == 0
    choices = [Replicate(), RaggedShard((0,), (1, 2, 3)), RaggedShard((0, 1), (1, 0, 11))]
    if dtype != torch.int16:  # gloo's all_gather, which torch uses for Shard, does not know it
        choices += [Shard(0), Shard(1)]
    for a, b in (*zip(choices, choices[1:] + choices[:1], strict=True), *itertools.pairwise(choices[::-1])):
        moved = place(full, mesh, [a]).redistribute(placements=[b])
        assert moved.dtype == dtype
        assert torch.equal(moved.full_tensor(), full), (dtype, a, b)


@on_ranks(3)
def test_any_dtype_travels_bit_by_bit():
    for dtype in (
        torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool,
        torch.complex64,
    ):  # fmt: skip
        dtypes_case(dtype)
    mesh = rank_mesh(3)
    bits = torch.arange(24, dtype=torch.uint8).view(6, 4)
    tensor = place(bits.view(torch.float8_e4m3fn), mesh, [RaggedShard((0,), (1, 2, 3))])
    moved = tensor.redistribute(placements=[RaggedShard((0,), (3, 3, 0))])
    assert torch.equal(moved.full_tensor().view(torch.uint8), bits)


@pytest.mark.parametrize("mesh_shape", [(3, 1), (1, 3), (1, 1), (2, 1)], ids=str)
def test_a_mesh_axis_of_size_1_cuts_nothing(mesh_shape):
    """Also not where Shard(d) would cross the ragged cut on a larger axis, as TP of degree 1 does."""
    shape, ragged = (4, 6, 3), []
    others = [Replicate(), Partial("sum"), Shard(0), Shard(1), Shard(2)]
    for axis in (axis for axis in (0, 1) if mesh_shape[1 - axis] == 1):
        for prefix, other in itertools.product(((0,), (0, 1), (0, 1, 2)), others):
            placement = RaggedShard(prefix, UNITS[mesh_shape[axis]])
            if math.prod(shape[: len(prefix)]) % placement.total_units == 0:
                ragged.append((placement, other) if axis == 0 else (other, placement))
    plain = [(Replicate(), Replicate()), (Shard(0), Shard(0)), (Shard(1), Partial("sum"))]
    pairs = [(a, b) for i, a in enumerate(ragged) for b in (*ragged[i % 4 :: 4], *plain)]
    run_ranks(
        math.prod(mesh_shape), check_pairs, mesh_shape, shape, pairs + list(itertools.product(plain, ragged))
    )


@on_ranks(2)
def test_nothing_is_sent_along_a_mesh_axis_of_size_1():
    full = full_of((4, 6))
    param = distribute_tensor(full, rank_mesh(2, 1), [RaggedShard((0,), (3, 1)), Shard(0)])
    with record_collectives() as record:
        rows = param.sum(dim=1)
        assert rows.placements == (RaggedShard((0,), (3, 1)), Shard(0))
        sums = param.mean(dim=1, keepdim=True) * 6
        assert sums.placements == rows.placements
        doubled = (param + param).redistribute(placements=[RaggedShard((0,), (3, 1)), Replicate()])
        columns = distribute_tensor(
            full, param.device_mesh, [RaggedShard((0,), (3, 1)), Shard(1)], src_data_rank=None
        )
        by_row = columns.amax(dim=1)
        assert by_row.placements == (RaggedShard((0,), (3, 1)), Replicate())
    assert record.events == []
    assert torch.equal(rows.full_tensor(), full.sum(1))
    assert torch.equal(sums.full_tensor(), full.sum(1, keepdim=True))
    assert torch.equal(doubled.full_tensor(), 2 * full)
    assert torch.equal(by_row.full_tensor(), full.amax(1))
    assert torch.equal(param.sum(dim=0).full_tensor(), full.sum(0))


def carrier_ops(tensor):
    rows = Shard(0)
    return {
        "add": lambda: tensor + 1,
        "sum": lambda: tensor.sum(),
        "detach": lambda: tensor.detach(),
        "clone": lambda: tensor.clone(),
        "copy_": lambda: tensor.copy_(tensor),
        "zero_": lambda: tensor.zero_(),
        "zeros_like": lambda: torch.zeros_like(tensor),
        "first row": lambda: tensor[0],
        "transposed": lambda: tensor.t(),
        "double": lambda: tensor.double(),
        "deepcopy": lambda: copy.deepcopy(tensor),
        "foreach": lambda: torch._foreach_add_([tensor, tensor], 1),
        "norm": lambda: torch.nn.utils.get_total_norm([tensor]),
        "full": lambda: tensor.full_tensor(),
        "to rows": lambda: tensor.redistribute(placements=[rows]),
        "to columns": lambda: tensor.redistribute(placements=[Shard(1)]),
        "to replicas": lambda: tensor.redistribute(placements=[Replicate()]),
        "from rows": lambda: torch_distribute_tensor(torch.ones(6, 4), tensor.device_mesh, [rows]) + tensor,
        "to it": lambda: torch_distribute_tensor(torch.ones(6, 4), tensor.device_mesh, [rows]).redistribute(
            placements=tensor.placements
        ),
        "parameter": lambda: torch.nn.Parameter(tensor),
        "saved": lambda: saved_and_loaded(tensor) + 1,
        "compiled": lambda: torch.compile(lambda x: x * 2, backend="eager")(tensor),
    }


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.skipif(not SUBCLASSES_DTENSOR, reason="torch < 2.12: torch's full-state-dict helper makes none")
@on_ranks(3)
def test_a_plain_dtensor_with_a_meta_tensors_placement_computes_nothing():
    mesh, ragged = rank_mesh(3), RaggedShard((0,), (0, 1, 5))
    meta = distribute_tensor(torch.empty(6, 4, device="meta"), mesh, [ragged])
    assert meta.placements == (ragged,)
    assert meta.placements != (Shard(0),)
    full = torch.arange(24.0).view(6, 4)
    like = distribute_tensor(full, mesh, meta.placements, src_data_rank=None)
    carrier = DTensor.from_local(like.local, mesh, meta.placements, shape=full.shape, stride=full.stride())
    for name, op in carrier_ops(carrier).items():
        with pytest.raises(NotImplementedError, match="can only be loaded"):
            pytest.fail(f"{name}: {op()}")
    adopted = redistribute(carrier, placements=carrier.placements)
    assert torch.equal(adopted.full_tensor(), full)
    assert torch.equal(redistribute(carrier, placements=[Replicate()]).to_local(), full)
