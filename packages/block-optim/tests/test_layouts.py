"""Every optimizer in every layout: the bits of one process, what is sent, and steps that all ranks skip."""

import contextlib
import copy
import io
import logging

import pytest
import torch
import torch.distributed as dist
from runs import NARROW, run_of, same
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from block_optim import local_of
from ragged_shard.testing import accelerator_groups, on_ranks, record_collectives, run_ranks

# A square, odd ones, stacked matrices, a convolution, a single row; and for what is no matrix a vector and a scalar.
MATRICES = ((8, 8), (22, 5), (7, 11), (3, 6, 5), (6, 2, 3, 2), (1, 7))
SHAPES = (*MATRICES, (9,), ())
# Of which parameters there is no gradient, step by step.
COME_AND_GO = ((), (0, 1, 2), (1,), (0, 2), (0, 1, 2, 3, 4, 5, 6, 7), ())

ANY = ("elements", "rows", "whole", "one rank", "shard", "replicate")
BY_ROWS = ("rows", "whole", "one rank", "shard", "replicate")  # NorMuon has numbers for rows
BY_BLOCKS = ("planned", "whole", "one rank", "replicate")  # of 8-bit states
CASES = {
    "AdamW": ANY,
    "AdamW fused": ANY,
    "AdamW8bit": BY_BLOCKS,
    "AdamW8bit tiles": BY_BLOCKS,
    "Muon": ("elements", "planned", "replicas", *ANY[1:]),
    "Muon cautious": ("elements", "rows"),
    "Muon buckets": ANY,
    "NorMuon": (*BY_ROWS, "replicas"),
    "NorMuon buckets": BY_ROWS,
    "Shampoo": (*ANY, "planned", "replicas"),
    "Shampoo sums": ("planned", "shard", "replicas"),
    "SOAP": (*ANY, "planned", "replicas"),
    "SOAP diagonal": ("planned", "elements"),
    "Mixed": (*ANY, "planned"),
    "Mixed 8-bit": BY_BLOCKS,
    **{
        f"{name}, {narrow}": ("elements", "shard")
        for name in ("AdamW", "Muon", "Shampoo", "SOAP")
        for narrow in NARROW
    },
    **{f"AdamW8bit, {narrow}": BY_BLOCKS for narrow in NARROW},
}


def trained(case, layout="plain", mesh_shape=()):
    if dist.is_initialized():  # costs of layouts
        logging.getLogger("block_optim").setLevel(logging.ERROR)
    shapes = MATRICES if "uon" in case or "Mixed" in case else SHAPES
    run = run_of(case, layout, mesh_shape, shapes=shapes)
    for number, without in enumerate(COME_AND_GO):
        run.step(number, without)
    assert not getattr(run.optimizer, "skipped_steps", 0)
    return run.result()


def in_layouts(case, expected, every):
    """Compare in every layout, and on two axes, or in every second layout."""
    for layout in CASES[case] if every else CASES[case][::2]:
        same(trained(case, layout), expected)
    if dist.get_world_size() == 4:
        same(trained(case, CASES[case][0], (2, 2)), expected)


USUAL = (
    "AdamW",
    "AdamW8bit",
    "Muon",
    "NorMuon",
    "Shampoo",
    "SOAP",
    "Mixed 8-bit",
    "Muon, stochastic rounding",
)


@pytest.mark.parametrize(
    ("case", "world_sizes"),
    [
        *((case, (3,)) for case in USUAL),
        *(pytest.param(case, (1, 2, 3, 4), marks=pytest.mark.long) for case in CASES),
    ],
)
def test_layouts_give_the_bits_of_one_process_also_if_gradients_come_and_go(case, world_sizes):
    expected = trained(case)
    for ranks in world_sizes:
        run_ranks(ranks, in_layouts, case, expected, every=len(world_sizes) > 1, timeout=200.0)


OFFLOADED = [
    ("AdamW", "elements"),
    ("AdamW8bit", "planned"),
    ("Muon", "elements"),
    ("Muon", "replicas"),
    ("NorMuon buckets", "rows"),
    ("Shampoo", "elements"),
    ("SOAP", "replicas"),
    ("Mixed", "elements"),
]


@pytest.mark.parametrize(("case", "layout"), OFFLOADED)
@on_ranks(3)
def test_shards_in_cpu_memory_need_no_group_that_moves_it(case, layout):
    expected = trained(case)
    with accelerator_groups():
        same(trained(case, layout), expected)


COUNTING = ("AdamW", "AdamW, stochastic rounding", "AdamW8bit", "Mixed 8-bit")


def saved_by_holders(case, folder):
    run = run_of(case, "one rank")
    for number in range(3):
        has_elements = run.params[0].to_local().numel() > 0
        run.step(number, without=() if has_elements else range(len(run.params)))
    dcp_save(get_optimizer_state_dict(run.module, run.optimizer), checkpoint_id=folder)
    return {name: value.full_tensor() for name, value in run.module.named_parameters()}


def loaded_anywhere(case, folder, weights, expected):
    for layout in ("one rank", "whole"):
        run = run_of(case, layout, cuts=1).steps(50, 51)
        state = get_optimizer_state_dict(run.module, run.optimizer)
        dcp_load(state, checkpoint_id=folder)
        set_optimizer_state_dict(run.module, run.optimizer, state)
        for own, value in zip(run.params, run.put(list(weights.values())), strict=True):
            local_of(own).detach().copy_(local_of(value))
        same(run.steps(3, 5).result(), expected)


@pytest.mark.parametrize("case", COUNTING)
def test_checkpoints_take_the_steps_that_ranks_with_elements_have_counted(case, tmp_path):
    expected = run_of(case).steps(0, 5).result()
    weights = run_ranks(3, saved_by_holders, case, str(tmp_path))[0]
    run_ranks(2, loaded_anywhere, case, str(tmp_path), weights, expected)


@on_ranks(3)
def test_a_state_dict_of_a_rank_without_elements_is_copied_and_pickled_as_plain_numbers():
    run = run_of("AdamW", "one rank").steps(0, 2)
    saved, file = run.optimizer.state_dict(), io.BytesIO()
    copied = copy.deepcopy(saved)
    torch.save({i: state["step"] for i, state in copied["state"].items()}, file)
    file.seek(0)
    steps = torch.load(file, weights_only=True)
    assert all(type(step) is torch.Tensor and step == 2 for step in steps.values())
    run.steps(2, 3).optimizer.load_state_dict(copied)
    assert all(state["step"] == 2 for state in run.optimizer.state.values())


@contextlib.contextmanager
def messages():
    """The messages that are logged inside a ``with``."""
    logger, handler, logged = logging.getLogger("block_optim"), logging.Handler(), []
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logged
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


BAD: list[tuple[str, str, float]] = [
    *((case, "planned", torch.nan) for case in ("AdamW fused", "AdamW8bit", "AdamW8bit tiles")),
    *(
        (case, "elements", -torch.inf)
        for case in ("AdamW", "AdamW fused", "Muon", "Shampoo", "SOAP", "Mixed")
    ),
    *(("AdamW", "elements", torch.nan), ("AdamW8bit", "planned", -torch.inf)),
    *((case, "replicas", torch.nan) for case in ("Muon", "SOAP")),
]


@pytest.mark.parametrize(("case", "layout", "bad"), BAD)
@on_ranks(3)
def test_one_ranks_bad_gradient_skips_the_step_on_every_rank_and_is_told_once(case, layout, bad):
    run = run_of(case, layout).steps(0, 2)
    before = run.result()
    run.give(2)
    local = local_of(run.params[1].grad).view(-1)
    holds = local.numel() > 0 and (layout != "replicas" or dist.get_rank() == 1)
    if holds:
        local[-1] = bad
    with messages() as found:
        for _ in range(2):
            run.optimizer.step()
        run.optimizer.step(grad_norm=bad)
    same(run.result(), before)
    assert run.optimizer.skipped_steps == len(found) == 3
    assert ("p1" in found[0]) == holds
    assert "3 skipped" in found[2]
    same(run.steps(3, 5).result(), run_of(case).steps(0, 2).steps(3, 5).result())
    held = torch.tensor(float(holds))
    dist.all_reduce(held)
    assert held > 0


@pytest.mark.parametrize("case", ["AdamW", "AdamW fused", "AdamW8bit", "Shampoo", "SOAP"])
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_where_blocks_are_whole_a_step_sends_four_bytes_for_its_check(case, world_size):
    with record_collectives() as building, messages() as found:
        run = run_of(case, "planned")
    assert building.kinds == found == []
    assert getattr(run.optimizer, "bytes_per_step", 0) == 0
    run.give(0)
    with record_collectives() as record:
        run.optimizer.step()
    norm = torch.nn.utils.clip_grad_norm_(run.params, 1.0)
    with record_collectives() as known:
        run.optimizer.step(grad_norm=norm)
    unchecked = run_of(case, "planned", skip_nonfinite=False)
    unchecked.give(0)
    with record_collectives() as without:
        unchecked.optimizer.step()
    assert record.kinds == (["all_reduce"] if world_size > 1 else [])
    assert record.bytes_sent == pytest.approx(2 * 4 * (world_size - 1) / world_size)
    assert known.kinds == without.kinds == []


@on_ranks(4)
def test_replicas_are_not_asked_whether_gradients_are_finite():
    run = run_of("AdamW", "elements", (2, 2))
    run.give(0)
    with record_collectives() as record:
        run.optimizer.step()
    assert [(e.kind, e.ranks) for e in record.events] == [("all_reduce", 2)]


@on_ranks(3)
def test_mixed_asks_once_about_bad_numbers_and_once_for_each_exchange():
    run = run_of("Mixed", "shard").steps(0, 1)
    run.give(1)
    with record_collectives() as record:
        run.optimizer.step()
    assert record.kinds.count("all_reduce") == 3  # Muon and SOAP ask which gradients there are


@on_ranks(3)
def test_a_rank_without_gradients_does_not_count_and_loads_full_states_alone():
    def states(run):
        return {key: value for key, value in run.result().items() if " " in key}

    for case in ("AdamW", "AdamW fused", "AdamW8bit", "AdamW8bit tiles"):
        plain, run = run_of(case).steps(0, 1), run_of(case, "planned")
        run.step(0, without=range(3) if dist.get_rank() == 1 else ())
        for p in run.params:
            assert run.optimizer.state[p]["step"] == (0 if dist.get_rank() == 1 else 1)
        with record_collectives() as record:
            run.optimizer.load_state_dict(plain.optimizer.state_dict())
        assert record.kinds == []
        same(states(run), states(plain))


def collectives_of(kind, layout, options, step_options):
    """Kinds and bytes of the collectives of a step, what the optimizer says it sends, and its warnings."""
    with messages() as found:
        run = run_of(kind, layout, **{"shapes": SHAPES, **options})
    run.step(0, **step_options)
    with record_collectives() as record:
        run.step(1, **step_options)
    sent = sum(e.bytes_sent for e in record.events if e.kind == "all_to_all")
    return record.kinds, sent, run.optimizer.bytes_per_step, found


@pytest.mark.parametrize("kind", ["Shampoo", "SOAP"])
def test_blocks_that_are_not_local_cost_what_the_optimizer_announces(kind):
    ranks = run_ranks(3, collectives_of, kind, "shard", {}, {"grad_norm": 1.0})
    promised = ranks[0][2]
    assert promised > 0
    for kinds, _, says, _ in ranks:
        assert kinds == ["all_reduce", "all_to_all", "all_to_all"]
        assert says == promised
    (message,), *others = (found for *_, found in ranks)
    assert f"{promised / 1e6:.3g} MB" in message
    assert f"block_policy={kind}.block_policy(max_preconditioner_dim=4)" in message
    assert others == [[], []]  # the first rank speaks for all
    assert sum(sent for _, sent, _, _ in ranks) == promised


def test_bytes_are_twice_what_owners_do_not_hold():
    """(8, 8) on 3 ranks: rows 0-3, 3-6, 6-8; strips 0-4, 4-8. One row each way for the first, two for the second."""
    ranks = run_ranks(3, collectives_of, "Shampoo", "shard", {"shapes": ((8, 8),)}, {"grad_norm": 1.0})
    assert ranks[0][2] == 2 * (8 + 2 * 8) * 4


@pytest.mark.parametrize("kind", ["SOAP", "Muon"])
@on_ranks(3)
def test_a_moving_gradient_that_is_missing_on_some_ranks_counts_as_zero_there(kind):
    single, run = (run_of(kind, layout, shapes=((9, 4), (6, 5))) for layout in ("plain", "shard"))
    for number in range(4):
        run.step(number, without=(1,) if dist.get_rank() else (), grad_norm=1.0)
        single.give(number)
        assert single.params[1].grad is not None
        single.params[1].grad[2:] = 0  # what ranks 1 and 2 hold
        single.optimizer.step()
    same(run.result(), single.result())
