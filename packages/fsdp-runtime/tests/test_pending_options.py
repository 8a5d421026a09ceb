"""A reduction under way keeps the options that it was launched with."""

import torch
from runtime_helpers import loss_of, seeded, shard, tokens

from ragged_shard.testing import on_ranks, rank_mesh


@on_ranks(4)
def test_options_set_later_do_not_touch_a_reduction_under_way():
    model = shard(seeded(), mesh=rank_mesh(2, 2, names=("replicate", "shard")))
    model.set_is_last_backward(False)
    loss_of(model, tokens()).backward()  # reductions are left under way
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(True)
    loss_of(model, tokens(step=1)).backward()  # only a partial sum: shown after a later all-reduce
    alone = seeded()
    (sum(loss_of(alone, tokens(rank=rank)) for rank in range(4)) / 4).backward()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-7)
