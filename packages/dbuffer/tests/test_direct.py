"""Large gathers and reductions over gloo go from rank to rank, with the values of the collectives."""

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import mesh_of

from dbuffer import DBuffer, _direct
from dbuffer._direct import Sends
from dbuffer._peer_memory import connect
from layout_planner import TensorSpec, plan
from ragged_shard.testing import record_collectives, run_ranks


def build(name, **options):
    specs = [TensorSpec(f"{name}.a", (61, 30)), TensorSpec(f"{name}.b", (7,))]
    return DBuffer(plan(specs, dist.get_world_size()), mesh_of(), dtype=torch.float32, **options)


def all_ways(full_dtype, op):
    """Two buffers under way at once, by the collectives and rank to rank: gathered, reduced and added to."""
    found, kinds, usual, group = [], [], _direct.MIN_BYTES, dist.group.WORLD
    connected = connect(group)
    assert connected is not None
    for wire in (None, Sends(group), connected):
        _direct.MIN_BYTES = 1 << 60 if wire is None else 1
        _direct._wires[group] = wire
        one, other = build("one", full_dtype=full_dtype), build("other", full_dtype=full_dtype)
        for number, buffer in enumerate((one, other)):
            buffer.initialize(lambda name, full, generator: full.normal_(generator=generator), seed=number)
        with record_collectives() as record:
            handles = [one.all_gather(), other.all_gather()]
            for handle in handles:
                handle.wait()
            values = [full.clone() for buffer in (one, other) for full in buffer.full]
            for accumulate in (False, True):
                for buffer in (one, other):
                    for view in buffer.views.values():
                        view.copy_(torch.arange(view.numel()).view(view.shape) % 7 + dist.get_rank())
                handles = [b.reduce_scatter(op=op, accumulate=accumulate) for b in (one, other)]
                for handle in handles:
                    handle.wait()
            values += [shard.clone() for buffer in (one, other) for shard in buffer.shard]
        kinds.append(record.kinds)
        found.append(values)
        one.release()
        other.release()
    _direct.MIN_BYTES = usual  # ranks live on
    _direct._wires.clear()
    for way in found[1:]:
        for slow, direct in zip(found[0], way, strict=True):
            torch.testing.assert_close(direct, slow, rtol=0, atol=0)
    return kinds


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_from_rank_to_rank_the_values_are_those_of_the_collectives(ranks):
    for full_dtype in (torch.float32, torch.bfloat16):
        for op in ("sum", "avg") if ranks != 3 else ("sum",):  # a third is rounded at another place
            slow, sent, read = run_ranks(ranks, all_ways, full_dtype, op)[0]
            assert {"all_gather", "reduce_scatter"} <= set(slow)
            assert sent
            assert not {"all_gather", "reduce_scatter"} & {*sent, *read}


def choice(nbytes):
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    return _direct.pays([(tensor, tensor[: nbytes // 2])], dist.group.WORLD)


def test_only_large_exchanges_among_few_ranks_go_directly():
    assert run_ranks(2, choice, 1 << 20) == [True] * 2
    assert run_ranks(2, choice, 1 << 19) == [False] * 2
    assert run_ranks(5, choice, 1 << 20) == [False] * 5
    assert run_ranks(1, choice, 1 << 20) == [False]


def unequal_histories(make):
    """Halves of the ranks exchange different numbers of times before all exchange together."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    full, shard = torch.zeros(8), torch.full((4,), float(dist.get_rank()))
    for group in (mine, dist.group.WORLD):
        _direct._wires[group] = make(group)
    for _ in range(1 + 2 * (dist.get_rank() // 2)):
        _direct.all_gather([(full, shard)], mine).wait()
    whole = torch.zeros(16)
    _direct.all_gather([(whole, shard)], dist.group.WORLD).wait()
    _direct._wires.clear()
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4


@pytest.mark.parametrize("make", [Sends, connect])
def test_groups_of_ranks_with_different_histories_still_find_each_other(make):
    run_ranks(4, unequal_histories, make, timeout=30)


def nobody_answers():
    """A rank that is gone when the others meet for the first large exchange."""
    buffer = build("unit 7")
    usual = _direct.MIN_BYTES, _direct.connect

    def fails(group):
        raise RuntimeError("Connection closed by peer")

    _direct.MIN_BYTES, _direct.connect = 1, fails
    _direct._wires.clear()
    with pytest.raises(RuntimeError) as caught:
        buffer.all_gather()
    _direct.MIN_BYTES, _direct.connect = usual
    return str(caught.value)


def test_an_exchange_that_cannot_start_says_which_and_why():
    assert (
        run_ranks(2, nobody_answers)
        == ["all_gather of unit 7.a could not start: Connection closed by peer"] * 2
    )
