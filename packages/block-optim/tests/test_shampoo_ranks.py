"""Shampoo and SOAP on real ranks: no bytes that the layout made unnecessary, and warnings of those that are sent."""

import pytest
import torch.distributed as dist
from runs import run_of, same
from test_layouts import SHAPES, messages

from ragged_shard.testing import on_ranks, record_collectives, run_ranks


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
