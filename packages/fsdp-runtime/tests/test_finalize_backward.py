"""A step that is ended by hand, as torch's pipelining ends it from 2.15 on."""

import pytest
import torch
from runtime_helpers import loss_of, seeded, shard, tokens

from ragged_shard.testing import on_ranks, record_collectives


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(3)
def test_a_step_ended_by_hand_reduces_once_and_has_the_gradients_of_one_process(async_op):
    model = shard(seeded())
    units = sum(isinstance(module, type(model).__mro__[1]) for module in model.modules())
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    with record_collectives() as record:
        for step in range(3):
            loss_of(model, tokens(step=step)).backward()
    assert "reduce_scatter" not in record.kinds
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    with record_collectives() as record:
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
    assert record.kinds.count("reduce_scatter") == units
    alone = seeded()
    for rank in range(3):
        for step in range(3):
            (loss_of(alone, tokens(rank=rank, step=step)) / 3).backward()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_ending_a_step_by_hand_is_asked_for_on_the_root_and_before():
    model = shard(seeded())
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\) before forward"):
        model.finalize_backward()
    inner = next(module for module in model.modules() if module is not model and hasattr(module, "unshard"))
    with pytest.raises(RuntimeError, match="must be called on the root module"):
        inner.set_manual_backward_finalization(True)


@on_ranks(2)
def test_ending_a_step_that_has_not_begun_does_nothing():
    model = shard(seeded())
    model.set_manual_backward_finalization(True)
    with record_collectives() as record:
        model.finalize_backward()
    assert record.kinds == []
    assert all(p.grad is None for p in model.parameters())
