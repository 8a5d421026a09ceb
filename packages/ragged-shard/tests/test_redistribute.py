"""Random chains of placements, on meshes of one and two axes, against the full tensor; and the bytes sent."""

import copy
import io
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import RaggedDTensor, RaggedShard, StridedRaggedShard, distribute_tensor, redistribute
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

UNITS = {1: (1,), 2: (1, 3), 3: (3, 0, 1), 4: (1, 0, 2, 1)}
OTHER_UNITS = {1: (1,), 2: (5, 1), 3: (1, 4, 1), 4: (0, 6, 0, 0)}
DTYPES = (
    torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64,
)  # fmt: skip
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 1), (4, 1), (1, 4), (1, 2), (2, 1)]
RANKS = settings(
    deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck), database=None
)
EVERY = pytest.mark.parametrize("examples", [30, pytest.param(600, marks=pytest.mark.long)])


def full_of(shape, dtype=torch.float32):
    flat = torch.arange(math.prod(shape)) % 100 + 1
    return (flat % 3 == 0 if dtype == torch.bool else flat.to(dtype)).view(shape)


def place(full, mesh, placements):
    """A tensor of any sharding with the values of ``full``."""
    coordinate = mesh.get_coordinate() or ()
    first = all(at == 0 for at, p in zip(coordinate, placements, strict=True) if p == Partial("sum"))
    start = [p if isinstance(p, Partial) else Replicate() for p in placements]
    local = full if first else torch.zeros_like(full)
    return RaggedDTensor.from_local(local, mesh, start, shape=full.shape).redistribute(placements=placements)


def units_for(draw, prefix_numel, ranks):
    """Shares, zeros among them, whose sum divides the prefix."""
    totals = [d for d in range(1, min(prefix_numel, 12) + 1) if prefix_numel % d == 0] or [1, 2, 3]
    total = draw(st.sampled_from(totals))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    ends = [0, *cuts, total]
    return tuple(b - a for a, b in itertools.pairwise(ends))


@st.composite
def ragged(draw, shape, ranks, slices=1):
    """A placement of a tensor whose first dimension another axis has cut into that many slices."""
    k = draw(st.integers(0 if slices == 1 else 1, len(shape)))
    if k == 0:
        hot = draw(st.integers(0, ranks - 1))
        return RaggedShard((), [int(r == hot) for r in range(ranks)])
    return RaggedShard(tuple(range(k)), units_for(draw, math.prod(shape[:k]) // slices, ranks))


@st.composite
def placements_of(draw, shape, mesh_shape, pending):
    """Placements of any kind; `pending` are those of summands."""
    every = [Replicate(), *pending, *(Shard(d) for d in range(len(shape)))]
    if len(mesh_shape) == 1:
        return [draw(st.one_of(ragged(shape, mesh_shape[0]), st.sampled_from(every)))]
    if draw(st.integers(0, 3)) == 0:
        return [draw(st.sampled_from(every)) for _ in mesh_shape]
    axis = draw(st.integers(0, 1))
    ranks, others = mesh_shape[axis], mesh_shape[1 - axis]
    if others > 1 and shape and shape[0] and shape[0] % others == 0 and draw(st.booleans()):
        inside = draw(ragged(shape, ranks, others))  # another axis cuts the first dimension too
        strided = StridedRaggedShard(inside.dims, inside.local_units, others)
        return [strided, Shard(0)] if axis == 0 else [Shard(0), inside]
    placement = draw(ragged(shape, ranks))
    k = len(placement.dims) if others > 1 else 0
    beside = draw(st.sampled_from([Replicate(), *pending, *(Shard(d) for d in range(k, len(shape)))]))
    return [placement, beside] if axis == 0 else [beside, placement]


@st.composite
def chains(draw):
    """A tensor and the placements that it passes through; summands are pending in the first ones only."""
    mesh_shape = draw(st.sampled_from(MESHES))
    sizes = [0, 1, 1, 2, 3, 4, 6, 12] if len(mesh_shape) == 1 else [1, 2, 4, 6, 12]
    shape = tuple(draw(st.lists(st.sampled_from(sizes), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    pending = [] if dtype == torch.bool else [Partial("sum")]
    pending += [Partial("avg")] if dtype.is_floating_point else []
    first = draw(placements_of(shape, mesh_shape, pending))
    steps = draw(st.lists(placements_of(shape, mesh_shape, []), min_size=1, max_size=4))
    return shape, dtype, mesh_shape, [first, *steps]


def follow(shape, dtype, mesh_shape, steps):
    mesh, full = rank_mesh(*mesh_shape), full_of(shape, dtype)
    start = tensor = place(full, mesh, steps[0])
    assert torch.equal(start.full_tensor(), full)
    for placements in steps[1:]:
        before, tensor = tensor, tensor.redistribute(placements=placements)
        assert tensor.dtype == dtype
        assert tensor.placements == tuple(placements)
        assert tensor.to_local().is_contiguous()
        assert torch.equal(tensor.full_tensor(), full), placements
        if not any(isinstance(p, Partial) for p in before.placements):
            back = tensor.redistribute(placements=before.placements)
            assert torch.equal(back.to_local(), before.to_local()), placements
    direct = start.redistribute(placements=steps[-1])
    assert torch.equal(direct.to_local(), tensor.to_local())
    assert torch.equal(start.full_tensor(), full), "the source changed"


@EVERY
def test_any_chain_of_redistributions_ends_where_a_direct_one_does(examples):
    @settings(RANKS, max_examples=examples)
    @given(chains())
    def each(case):
        run_ranks(math.prod(case[2]), follow, *case)

    each()


def is_ragged(placements):
    return any(isinstance(p, RaggedShard) for p in placements)


REDUCTIONS = ("sum", "amax", "amin", "mean", "any", "all")


def arithmetic(shape, dtype, mesh_shape, steps):
    x = full_of(shape, dtype)
    tensor = place(x, rank_mesh(*mesh_shape), steps[-1])
    assert torch.equal((tensor * tensor).full_tensor(), x * x)
    assert torch.equal((tensor == tensor.clone()).full_tensor(), x == x)
    assert torch.equal(tensor.to(torch.float64).full_tensor(), x.to(torch.float64))
    assert tensor.to(torch.float64).sum().item() == x.to(torch.float64).sum().item()
    assert tensor.any().item() == x.any().item()
    assert tensor.all().item() == x.all().item()
    if x.numel():
        assert tensor.max().item() == x.max().item()
        assert tensor.min().item() == x.min().item()
    dims = [(dim,) for dim in range(x.ndim)] + list(itertools.combinations(range(x.ndim), 2))
    for name, dim, keepdim in itertools.product(REDUCTIONS, dims, (False, True)):
        if not x.numel() or (name == "mean" and not x.is_floating_point()):
            continue
        with record_collectives() as record:
            got = getattr(torch, name)(tensor, dim, keepdim=keepdim)
        wanted = getattr(torch, name)(x, dim, keepdim=keepdim)
        if len(mesh_shape) == 1:
            assert len(record.kinds) == (mesh_shape > (1,) and dim[0] < len(steps[-1][0].dims)), (name, dim)
        torch.testing.assert_close(got.full_tensor(), wanted, msg=f"{name} {dim} {keepdim}")


@EVERY
def test_ops_and_reductions_of_any_ragged_tensor_are_those_of_the_unsharded_tensor(examples):
    @settings(RANKS, max_examples=examples)
    @given(chains().filter(lambda case: not case[1].is_complex and is_ragged(case[3][-1])))
    def each(case):
        run_ranks(math.prod(case[2]), arithmetic, *case)

    each()


@on_ranks(3)
def test_numbers_that_no_backend_knows_travel_as_bytes():
    bits = torch.arange(24, dtype=torch.uint8).view(6, 4)
    tensor = place(bits.view(torch.float8_e4m3fn), rank_mesh(3), [RaggedShard((0,), (1, 2, 3))])
    moved = tensor.redistribute(placements=[RaggedShard((0,), (3, 3, 0))])
    assert torch.equal(moved.full_tensor().view(torch.uint8), bits)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 3), (1, 4)], ids=str)
@on_ranks("mesh_shape")
def test_strided_ragged_holds_a_run_of_each_ranks_slice(mesh_shape):
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
        for p in (Replicate(), RaggedShard((0,), (3, 2, 1)), Shard(1))
    ]
    for handle in reversed(handles):
        moved = handle.wait()
        assert handle.wait() is moved
        assert torch.equal(moved.full_tensor(), full)
    handles[0].wait().to_local().sum().backward()
    assert torch.equal(tensor.grad.to_local(), torch.ones_like(tensor.to_local()))


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


@pytest.mark.parametrize("experts", [1, 2])
@on_ranks(2)
def test_a_split_factor_is_the_size_of_an_axis_also_of_one_rank(experts):
    mesh, full = rank_mesh(2 // experts, experts, names=("shard", "ep")), full_of((4, 6))
    units = (3, 1) if experts == 1 else (1,)
    strided = StridedRaggedShard((0,), units, split_factor=mesh["ep"].size())
    tensor = distribute_tensor(full, mesh, [strided, Shard(0)])
    assert tensor.placements == ((RaggedShard((0,), units) if experts == 1 else strided), Shard(0))
    assert torch.equal(tensor.full_tensor(), full)
    gathered = tensor.redistribute(placements=[Replicate()] * 2)
    assert torch.equal(gathered.redistribute(placements=[strided, Shard(0)]).to_local(), tensor.to_local())


def carrier_ops(tensor):
    rows = Shard(0)
    return {
        "add": lambda: tensor + 1,
        "detach": lambda: tensor.detach(),
        "zero_": lambda: tensor.zero_(),
        "first row": lambda: tensor[0],
        "deepcopy": lambda: copy.deepcopy(tensor),
        "foreach": lambda: torch._foreach_add_([tensor, tensor], 1),
        "full": lambda: tensor.full_tensor(),
        "to rows": lambda: tensor.redistribute(placements=[rows]),
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
        with pytest.raises(NotImplementedError, match="only be loaded"):
            pytest.fail(f"{name}: {op()}")
    adopted = redistribute(carrier, placements=carrier.placements)
    assert torch.equal(adopted.full_tensor(), full)
    assert torch.equal(redistribute(carrier, placements=[Replicate()]).to_local(), full)
