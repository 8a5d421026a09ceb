"""Optimizers on parameters that tensor parallelism cuts under FSDP: the bits of one process, and the least traffic."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import BF16, Mix, Run, cut_twice, full, put, run_of, same
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from block_optim import AdamW8bit, Muon, local_of
from block_optim.muon.assignment import SENT_BYTES as SENT
from layout_planner import Elements, Tile
from ragged_shard import RaggedShard, StridedRaggedShard, distribute_like
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


# Columns of real matrices, and the largest block of at most 256 that divides the share of 2 and of 4 ranks. As many
# of these are in a row as blocks of 256, which "auto" takes where nothing cuts columns.
SHARED_BLOCK = {2880: 240, 896: 224, 960: 240, 1856: 232, 1024: 256}
IN_MIXED = Mix(("adamw8bit", {"min_8bit_numel": 1}))


def columns_over(ranks, columns, block, kind=AdamW8bit):
    """A run of one matrix of which each of ``ranks`` ranks has a part of the columns; 4 ranks in all."""

    def layout(mesh, ndim):
        return [Replicate(), Shard(1)]

    return Run(
        kind, layout, (4 // ranks, ranks), shapes=((4, columns),), lr=0.1, block=block, min_8bit_numel=1
    )


def full_dict(run):
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["state"] = {i: {k: full(v).clone() for k, v in s.items()} for i, s in saved["state"].items()}
    return saved


def in_memory(old, new, folder):
    new.optimizer.load_state_dict(full_dict(old))


def through_dcp(flat, old, new, folder):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp_save(get_optimizer_state_dict(old.module, old.optimizer, options=options), checkpoint_id=folder)
    state = get_optimizer_state_dict(new.module, new.optimizer, options=options)
    dcp_load(state, checkpoint_id=folder)
    set_optimizer_state_dict(new.module, new.optimizer, state, options=options)


def go_on_as(old, new):
    """Assert that a run with the states of another one goes on with its bits."""
    for own, value in zip(new.params, old.params, strict=True):
        local_of(own).detach().copy_(local_of(distribute_like(full(value.detach()), own, src_data_rank=None)))
    same(new.steps(2, 4).result(), old.steps(2, 4).result())


@pytest.mark.parametrize("kind", [AdamW8bit, pytest.param(IN_MIXED, marks=pytest.mark.long, id="Mixed")])
@pytest.mark.parametrize("columns", [2880, *(pytest.param(c, marks=pytest.mark.long) for c in SHARED_BLOCK)])
@on_ranks(4)
def test_codes_are_loaded_in_the_blocks_that_they_were_saved_in_or_refused_by_name(columns, kind, tmp_path):
    ways = (in_memory, functools.partial(through_dcp, False), functools.partial(through_dcp, True))
    blocks: tuple[Any, ...] = ("auto", Tile(1, 256), Tile(1, SHARED_BLOCK[columns]))
    number = 0
    for before, after, block, other in itertools.product((1, 2, 4), (1, 2, 4), blocks, blocks):
        chosen = Tile(1, 256 if before == 1 else SHARED_BLOCK[columns]) if block == "auto" else block
        if any(
            b != "auto" and columns % (n * b.columns) and n > 1 for n, b in ((before, block), (after, other))
        ):
            continue  # the optimizer refuses the block itself
        fits = after == 1 or columns % (after * chosen.columns) == 0
        number += 1
        old, new = columns_over(before, columns, block, kind), columns_over(after, columns, other, kind)
        old.steps(0, 2)
        load = functools.partial(ways[number % 3], old, new, tmp_path / str(number))
        if fits and other in ("auto", chosen):
            load()
            go_on_as(old, new)
        else:
            reason = "this optimizer has block=" if other != "auto" else "which ranks cut here"
            with pytest.raises(
                ValueError, match=f"^p0: its saved 8-bit states have blocks of {chosen}, {reason}"
            ):
                load()
    assert number > 20


@on_ranks(4)
def test_states_without_a_record_of_their_blocks_are_loaded_if_they_can_have_had_one_only():
    def load(columns, *, before=2, block="auto", record=None, to="auto"):
        old, new = columns_over(before, columns, block).steps(0, 2), columns_over(1, columns, to)
        saved = full_dict(old)
        del saved["state"][0]["format"]
        if record is not None:
            saved["state"][0]["format"] = record
        new.optimizer.load_state_dict(saved)
        go_on_as(old, new)

    for columns in (1024, 4096):  # no number of ranks gives "auto" another block with as many scales
        load(columns)
        load(columns, to=Tile(1, 256))
    load(2880, block=Tile(1, 240))
    load(2880, block=Tile(1, 240), to=Tile(1, 240))
    for before, right in ((1, "tile:1x256"), (2, "tile:1x240")):
        with pytest.raises(
            ValueError, match=r"p0: .* may be 'tile:1x240' or 'tile:1x256'\. Set .*entry 'format'"
        ):
            load(2880, before=before)
        load(2880, before=before, record=right)
    with pytest.raises(
        ValueError, match="p0: its saved 8-bit states have blocks of tile:1x240, this optimizer has"
    ):
        load(2880, block=Tile(1, 240), to=Tile(1, 256))


@on_ranks(4)
def test_a_distributed_checkpoint_without_records_is_loaded_into_states_without_them(tmp_path):
    def without_records(run):
        state: Any = get_optimizer_state_dict(run.module, run.optimizer)
        state["state"] = {
            name: {k: v for k, v in own.items() if k != "format"} for name, own in state["state"].items()
        }
        return state

    for columns in (1024, 2880):
        old, new = columns_over(2, columns, "auto").steps(0, 2), columns_over(4, columns, "auto")
        dcp_save(without_records(old), checkpoint_id=tmp_path / str(columns))
        state = without_records(new)
        dcp_load(state, checkpoint_id=tmp_path / str(columns))
        if columns == 2880:
            with pytest.raises(ValueError, match="p0: its saved 8-bit states do not record their blocks"):
                set_optimizer_state_dict(new.module, new.optimizer, state)
            state["state"]["p0"]["format"] = "tile:1x240"
        set_optimizer_state_dict(new.module, new.optimizer, state)
        go_on_as(old, new)


@on_ranks(4)
def test_codes_of_another_table_are_refused_by_name():
    old, new = (columns_over(2, 1024, "auto") for _ in range(2))
    saved = full_dict(old)
    saved["state"][0]["format"] += 10**18
    with pytest.raises(
        ValueError, match=r"p0: its 8-bit states have codes of version 2, this release .* version 1"
    ):
        new.optimizer.load_state_dict(saved)


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
