"""Ragged placements: what they say, how they print, and that published ones are read."""

import copy
import itertools
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ragged_shard import RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives


def test_shares_are_kept_in_lowest_terms_so_equal_placements_are_equal_and_hash_alike():
    a, b = RaggedShard((0,), (2, 4, 0, 2)), RaggedShard([0], [1, 2, 0, 1])
    assert a == b
    assert hash(a) == hash(b)
    assert b.local_units == (1, 2, 0, 1)
    assert a.total_units == 4
    assert [a.unit_range(r) for r in range(4)] == [(0, 1), (1, 3), (3, 3), (3, 4)]


def test_placements_that_differ_are_not_equal():
    a = RaggedShard((0,), (1, 2))
    others = [
        RaggedShard((0,), (2, 1)),
        RaggedShard((0, 1), (1, 2)),
        StridedRaggedShard((0,), (1, 2)),
        Shard(0),
    ]
    assert all(a != other for other in others)
    assert StridedRaggedShard((0,), (1, 2), 2) != StridedRaggedShard((0,), (1, 2), 4)


@pytest.mark.parametrize("placement", [RaggedShard((0, 1), (1, 0, 2)), StridedRaggedShard((0,), (1, 1), 4)])
def test_a_placement_survives_pickle_and_copies(placement):
    for copied in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), copy.copy(placement)):
        assert copied == placement
        assert type(copied) is type(placement)
        assert repr(copied) == repr(placement)


def test_a_placement_is_frozen():
    with pytest.raises(AttributeError, match="frozen"):
        RaggedShard((0,), (1, 1)).dims = (1,)


def test_a_placement_is_no_kind_that_torch_handles():
    placement = RaggedShard((0,), (1, 1))
    assert isinstance(placement, Placement)
    assert [placement.is_shard(), placement.is_replicate(), placement.is_partial()] == [False] * 3


@pytest.mark.parametrize("placement", [RaggedShard((0,), (1, 1)), StridedRaggedShard((0,), (1, 1))])
def test_torch_finds_a_shard_whose_dim_compares_with_none_and_names_the_way_out(placement):
    assert isinstance(
        placement, Shard
    )  # so torch asks for its dim, and does not pass over an unknown placement
    assert "abc"[placement.dim] == "a"
    with pytest.raises(NotImplementedError, match=r"RaggedShard\(.*ragged_shard.distribute_tensor"):
        placement.dim == 0  # noqa: B015


@pytest.mark.parametrize(
    ("dims", "units", "error", "message"),
    [
        ((1,), (1, 1), ValueError, "not a prefix"),
        ((0, 2), (1, 1), ValueError, "not a prefix"),
        ((1, 0), (1, 1), ValueError, "not a prefix"),
        ((-1,), (1, 1), ValueError, "not a prefix"),
        ((0,), (), ValueError, "one share >= 0 for each rank"),
        ((0,), (0, 0), ValueError, "at least one > 0"),
        ((0,), (1, -1), ValueError, "one share >= 0"),
        ((), (1, 1), ValueError, "no dimension to cut"),
        (0, (1, 1), TypeError, "sequence of integers"),
        ((0,), (1.5, 1), TypeError, "sequence of integers"),
    ],
)
def test_bad_dims_and_shares_raise(dims, units, error, message):
    with pytest.raises(error, match=message):
        RaggedShard(dims, units)


def test_a_strided_placement_needs_at_least_two_slices():
    with pytest.raises(ValueError, match="at least 2"):
        StridedRaggedShard((0,), (1, 1), split_factor=1)


def test_torch_load_reads_a_placement_with_weights_only(tmp_path):
    torch.save(RaggedShard((0,), (1, 2)), tmp_path / "placement.pt")
    assert torch.load(tmp_path / "placement.pt") == RaggedShard((0,), (1, 2))


FULL = torch.arange(1.0, 49.0).view(8, 6)
UNEVEN = RaggedShard((0,), (1, 5, 0, 2))


def ragged(placements=(UNEVEN,), full=FULL):
    mesh = rank_mesh()
    return distribute_tensor(full, mesh, placements)


@on_ranks(4)
def test_in_place_add_and_norms_of_all_elements_and_along_each_dim():
    tensor = ragged()
    tensor.add_(tensor)
    assert torch.equal(tensor.full_tensor(), FULL * 2)
    tensor = ragged()
    assert torch.linalg.vector_norm(tensor).item() == pytest.approx(FULL.norm().item())
    for dim in (0, 1):
        got = torch.linalg.vector_norm(tensor, dim=dim).full_tensor()
        torch.testing.assert_close(got, torch.linalg.vector_norm(FULL, dim=dim))


@on_ranks(4)
def test_the_backward_of_ragged_to_replicate_communicates_nothing():
    tensor = ragged().requires_grad_()
    full = tensor.redistribute(placements=[Replicate()])
    local = full.to_local()
    assert torch.equal(local, FULL)
    with record_collectives() as record:
        local.backward(FULL * 3)
    assert record.kinds == []
    assert torch.equal(tensor.grad.full_tensor(), FULL * 3)


@pytest.mark.parametrize("seed", range(4))
@on_ranks(8)
def test_one_hot_tensors_move_on_8_ranks(seed):
    mesh = rank_mesh(8)
    draw = random.Random(seed)
    for ndim in (1, 2, 3):
        shape = [draw.randint(1, 9) for _ in range(ndim)]
        full = torch.arange(float(torch.Size(shape).numel())).view(shape)
        holders = [draw.randrange(8) for _ in range(2)]
        first, second = (RaggedShard((0,), [int(r == h) for r in range(8)]) for h in holders)
        tensor = distribute_tensor(full, mesh, [first])
        assert torch.equal(tensor.redistribute(placements=[second]).full_tensor(), full)
        for dim in range(ndim):
            sharded = tensor.redistribute(placements=[Shard(dim)])
            chunks = full.chunk(8, dim)
            mine = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else full.narrow(dim, 0, 0)
            assert torch.equal(sharded.to_local(), mine)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1), (1, 4), (3, 2)], ids=str)
@on_ranks("mesh_shape")
def test_ragged_beside_shard_0_and_shard_1_on_four_mesh_shapes(mesh_shape):
    mesh = rank_mesh(*mesh_shape)
    full = torch.arange(24.0 * 8).view(24, 8)
    ranks, parts = mesh_shape
    units = [1, 2, 0, 1][:ranks] if ranks > 1 else [1]
    shardings = [(RaggedShard((0,), units), Shard(1))]
    if parts > 1:
        shardings.append((StridedRaggedShard((0,), units, parts), Shard(0)))
    if parts > 1 and ranks > 1:
        with pytest.raises(ValueError, match="use StridedRaggedShard"):
            distribute_tensor(full, mesh, [RaggedShard((0,), [1] * ranks), Shard(0)])
    for placements in shardings:
        tensor = distribute_tensor(full, mesh, placements)
        assert torch.equal(tensor.full_tensor(), full)
        back = tensor.redistribute(placements=[Replicate(), placements[1]]).redistribute(
            placements=placements
        )
        assert torch.equal(back.to_local(), tensor.to_local())


@on_ranks(4)
def test_what_was_silently_wrong_is_right_or_raises():
    tensor = ragged()
    with pytest.raises(ValueError, match="not divisible"):  # kept 42 of 48 elements
        tensor.redistribute(placements=[RaggedShard((0,), (1, 2, 3, 1))])
    for wrong in (
        lambda: tensor.t(),
        lambda: torch.nn.functional.linear(FULL, tensor),
        lambda: torch.cat([tensor, tensor]),
        lambda: torch.stack([tensor, tensor]),
    ):
        with pytest.raises(NotImplementedError, match="has no rule"):
            wrong()
    assert tensor.var().item() == pytest.approx(FULL.var().item())
    assert tensor.mean().item() == FULL.mean().item()  # with uneven units
    assert tensor.max().item() == 48.0  # with an empty shard
    assert torch.equal((torch.zeros_like(tensor) + tensor).full_tensor(), FULL)
    cube = ragged([RaggedShard((0, 1), (1, 2, 0, 1))], torch.ones(4, 2, 3))
    assert torch.equal((cube.new_zeros(cube.shape) + cube).full_tensor(), torch.ones(4, 2, 3))


@on_ranks(4)
def test_what_was_missing_is_there():
    tensor = ragged().requires_grad_()
    (tensor.to_local() * 2).sum().backward()
    assert torch.equal(tensor.grad.full_tensor(), torch.full_like(FULL, 2))
    pending = tensor.detach().redistribute(placements=[Partial()])
    assert torch.equal(pending.full_tensor(), FULL)
    mesh = rank_mesh(2, 2)
    both = distribute_tensor(FULL, mesh, [Partial(), RaggedShard((0,), (1, 3))])
    assert torch.equal((both + both).full_tensor(), FULL * 2)


@on_ranks(4)
def test_nothing_is_sent_or_kept_without_need():
    pending = ragged().redistribute(placements=[Partial()])
    tensor = ragged()
    costs: dict = {}
    for name, (source, target) in {
        "Partial -> Ragged": (pending, UNEVEN),
        "Ragged -> Shard": (tensor, Shard(0)),
        "equal shardings": (tensor, RaggedShard((0,), (2, 10, 0, 4))),
    }.items():
        with record_collectives() as record:
            source.redistribute(placements=[target])
        costs[name] = (record.kinds, record.bytes_sent)
    total, own = 48 * 4, tensor.to_local().numel() * 4
    assert costs["Partial -> Ragged"] == (["all_to_all"], total - own)
    assert costs["Ragged -> Shard"][0] == ["all_to_all"]
    assert costs["Ragged -> Shard"][1] <= own
    assert costs["equal shardings"] == ([], 0)
    replicated = tensor.redistribute(placements=[Replicate()])
    part = replicated.redistribute(placements=[UNEVEN]).to_local()
    assert part.untyped_storage().nbytes() == own
    handle = tensor.redistribute(placements=[Shard(0)], async_op=True)
    assert torch.equal(handle.wait().full_tensor(), FULL)


def test_shares_with_the_same_ratios_are_equal():
    for a, b in itertools.product((1, 2, 3), repeat=2):
        assert RaggedShard((0,), (a, 2 * a)) == RaggedShard((0,), (b, 2 * b))
