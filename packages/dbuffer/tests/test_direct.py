"""Large gathers and reductions over gloo go from rank to rank, with the values of the collectives."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import load, mesh_of, transport_lines

from dbuffer import Collectives, DBuffer, Gather, ReduceScatter
from dbuffer.transport import choice, direct, sums, transport_of
from dbuffer.transport.sums import PIECE_BYTES
from layout_planner import TensorSpec, plan
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

LARGE = 1 << 18  # elements of fp32: a MiB


def build(name, rows=16384, **options):
    specs = [TensorSpec(f"{name}.a", (rows, 61)), TensorSpec(f"{name}.b", (7,))]
    return DBuffer(plan(specs, dist.get_world_size()), mesh_of(), dtype=torch.float32, **options)


def fill(buffer, seed):
    generator = torch.Generator().manual_seed(seed)
    names = {spec.name: torch.randn(spec.shape, generator=generator) for spec in buffer.layout.tensors}
    load(buffer, names)


def all_ways(full_dtype, op):
    """Two buffers under way at once, by each transport: gathered, reduced and added to."""
    found, kinds = [], []
    for transport in ("collectives", "peer_memory", "auto"):
        one, other = (build(n, full_dtype=full_dtype, transport=transport) for n in ("one", "other"))
        for number, buffer in enumerate((one, other)):
            fill(buffer, number)
        Gather([one]).start().wait()  # connects
        with record_collectives() as record:
            handles = [Gather([one]).start(), Gather([other]).start()]
            for handle in handles:
                handle.wait()
            values = [full.clone() for buffer in (one, other) for full in buffer.full]
            for accumulate in (False, True):
                for buffer in (one, other):
                    for view in buffer.views.values():
                        view.copy_(torch.arange(view.numel()).view(view.shape) % 7 + dist.get_rank())
                handles = [ReduceScatter([b], op=op).start(accumulate=accumulate) for b in (one, other)]
                for handle in handles:
                    handle.wait()
            values += [shard.clone() for buffer in (one, other) for shard in buffer.shard]
        kinds.append(record.kinds)
        found.append(values)
        one.release()
        other.release()
    for way in found[1:]:
        for slow, fast in zip(found[0], way, strict=True):
            torch.testing.assert_close(fast, slow, rtol=0, atol=0)
    return kinds


def test_from_rank_to_rank_the_values_are_those_of_the_collectives():
    for full_dtype in (torch.float32, torch.bfloat16):
        for op in ("sum", "avg"):  # a third would be rounded at another place
            slow, read, auto = run_ranks(4, all_ways, full_dtype, op)[0]
            assert {"all_gather", "reduce_scatter"} <= set(slow)
            assert not {"all_gather", "reduce_scatter"} & set(read)
            assert auto == read


def collective_kinds(rows, transport):
    buffer = build("x", rows, transport=transport)
    Gather([buffer]).start().wait()
    with record_collectives() as record:
        Gather([buffer]).start().wait()
    buffer.release()
    return record.kinds


@pytest.mark.parametrize(
    ("ranks", "rows", "transport", "kinds"),
    [
        (2, 16384, "auto", []),
        (2, 512, "auto", ["all_gather"]),  # small
        (2, 16384, "collectives", ["all_gather"]),
        pytest.param(8, 16384, "auto", [], marks=pytest.mark.long),
    ],
)
def test_only_large_exchanges_go_directly(ranks, rows, transport, kinds):
    assert run_ranks(ranks, collective_kinds, rows, transport) == [kinds] * ranks


def by_variable(value):
    with mock.patch.dict("os.environ", DBUFFER_TRANSPORT=value):
        return collective_kinds(16384, None)


def test_the_environment_variable_chooses_where_no_argument_does():
    assert run_ranks(2, by_variable, "collectives") == [["all_gather"]] * 2
    assert run_ranks(2, by_variable, "peer_memory") == [[]] * 2


@on_ranks(2)
def test_a_transport_of_the_callers_is_made_once_for_a_process_group():
    made = []

    def make(group):
        made.append(group.size())
        return Collectives(group)

    buffers = [build(name, transport=make) for name in ("a", "b")]
    for buffer in buffers:
        Gather([buffer]).start().wait()
    assert made == [2]


@on_ranks(2)
def test_a_prepared_call_may_have_a_transport_and_a_group_of_its_own():
    """Prepared calls take a transport and a group that are not the buffers'."""
    made = []

    def make(group):
        made.append(group)
        return Collectives(group)

    buffer = build("x", 512)
    fill(buffer, 0)
    Gather([buffer], transport=make).start().wait()
    expected = {name: view.clone() for name, view in buffer.views.items()}
    Gather([buffer]).start().wait()
    for name, view in buffer.views.items():
        assert torch.equal(view, expected[name])
    own = dist.new_group()
    ReduceScatter([buffer], op="sum", transport=make, group=own).start().wait()
    assert made == [buffer.mesh_view.group, own]
    half = dist.new_group([0])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"group has ranks \[0\], the shard axis \[0, 1\]"):
            ReduceScatter([buffer], group=half)


def odd_sums(transport, op, dtype, piece=PIECE_BYTES):
    """Slices of more than two pieces and of less than one, in one call; added in the order of ranks before this one."""
    group, rank, size = dist.new_group(), dist.get_rank(), dist.get_world_size()
    usual, sums.PIECE_BYTES = sums.PIECE_BYTES, piece
    numels = (2 * piece // dtype.itemsize + 13, 7, 1)
    generator = torch.Generator().manual_seed(rank)
    sends = [torch.randn(size * n, generator=generator).to(dtype) for n in numels]
    everyones = [[torch.empty_like(send) for _ in range(size)] for send in sends]
    for into, send in zip(everyones, sends, strict=True):
        dist.all_gather(into, send)
    expected = []
    for given, n in zip(everyones, numels, strict=True):
        rows = [one[rank * n : (rank + 1) * n] for one in given]
        total = rows[rank].clone()
        for step in range(1, size):
            total += rows[(rank - step) % size]
        expected.append(total / size if op == "avg" else total)
    receives = [send.chunk(size)[rank] for send in sends[:2]] + [
        torch.empty(1, dtype=dtype)
    ]  # in place, and not
    transport_of(group, transport).reduce_scatter(list(zip(receives, sends, strict=True)), op, "odd").wait()
    sums.PIECE_BYTES = usual
    return [torch.equal(mine, right) for mine, right in zip(receives, expected, strict=True)]


@pytest.mark.parametrize(("ranks", "op", "dtype"), [(2, "avg", torch.bfloat16), (3, "sum", torch.float32)])
def test_slices_of_any_length_are_added_in_one_order_to_the_bit(ranks, op, dtype):
    assert run_ranks(ranks, odd_sums, "peer_memory", op, dtype) == [[True] * 3] * ranks


@pytest.mark.long
@pytest.mark.parametrize("ranks", [8, 16])
def test_many_ranks_read_and_add_in_that_order_too(ranks):
    assert run_ranks(ranks, odd_sums, "auto", "avg", torch.float32, 1 << 16) == [[True] * 3] * ranks


def logged(transport, most=choice.MAX_RANKS):
    group = dist.new_group()
    full, mine = torch.zeros(LARGE * dist.get_world_size()), torch.ones(LARGE)
    with transport_lines() as lines, mock.patch.object(choice, "MAX_RANKS", most):
        for _ in range(2):
            transport_of(group, transport).all_gather([(full, mine)], "x").wait()
    return lines


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["auto"], "peer_memory for large exchanges"),
        (["peer_memory"], "peer_memory for large exchanges, as chosen"),
        (["auto", 1], "collectives; no peer memory: it has 2 ranks, more than 1"),
    ],
)
def test_the_choice_is_one_log_line_that_says_why_not_the_better_one(given, line):
    assert run_ranks(2, logged, *given) == [[line]] * 2


@on_ranks(4)
def test_groups_of_ranks_with_different_histories_still_find_each_other():
    """Halves of the ranks exchange different numbers of times before all exchange together."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    full, shard = torch.zeros(2 * LARGE), torch.full((LARGE,), float(dist.get_rank()))
    for _ in range(1 + 2 * (dist.get_rank() // 2)):
        transport_of(mine, "peer_memory").all_gather([(full, shard)], "half").wait()
    gathered = torch.zeros(4 * LARGE)
    transport_of(dist.group.WORLD, "peer_memory").all_gather([(gathered, shard)], "all").wait()  # type: ignore[arg-type]
    assert torch.equal(gathered, torch.arange(4.0).repeat_interleave(LARGE))


@on_ranks(2)
def test_an_exchange_that_cannot_start_says_which_and_why():
    """A rank that is gone when the others meet for the first large exchange."""

    def fails(group):
        raise RuntimeError("Connection closed by peer")

    group = dist.new_group()
    choice._chosen[group] = {"auto": direct.Direct(group, "auto", fails)}
    buffer = build("unit 7")
    choice._chosen[buffer.mesh_view.group] = choice._chosen[group]
    try:
        with pytest.raises(RuntimeError) as caught:
            Gather([buffer]).start()
    finally:
        del choice._chosen[buffer.mesh_view.group]
    assert buffer.in_flight is None
    assert str(caught.value) == "all_gather of unit 7.a could not start: Connection closed by peer"
