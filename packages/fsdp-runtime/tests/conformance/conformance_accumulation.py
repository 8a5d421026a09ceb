"""Cases: gradients of several backwards, with and without sync."""

import torch.nn as nn
from conformance_models import (
    MLP,
    all_sharded,
    assert_same_gradients,
    backward_both,
    batch,
    check_backward,
    hsdp_mesh,
    inputs,
    mean_square,
    mesh,
    mine,
    pair,
    seeded,
)
from conformance_registry import Raises, case

from ragged_shard.testing import record_collectives

MULTI = "Accumulation and microbatches"


@case(MULTI, "`set_requires_gradient_sync(False)`: gradients add up until it is on again", ranks=3)
def no_sync(fsdp):
    for reshard in (True, False):
        model, reference = pair(fsdp, reshard_after_forward=reshard)
        for step in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                with record_collectives() as record:
                    backward_both(model, reference, 10 * step + micro)
                assert record.kinds.count("reduce_scatter") == (4 if micro == 2 else 0), record.kinds
                if micro < 2 and step == 0:
                    assert all(p.grad is None for p in model.parameters())
                assert all_sharded(model)
            assert_same_gradients(model, reference)
            for one in (model, reference):
                one.zero_grad()


@case(MULTI, "`set_requires_gradient_sync(False, recurse=False)` holds for this unit alone")
def no_sync_here(fsdp):
    model, reference = pair(fsdp)
    model.set_requires_gradient_sync(False, recurse=False)
    backward_both(model, reference)
    assert model.head.weight.grad is None
    assert_same_gradients(model.blocks, reference.blocks)
    model.set_requires_gradient_sync(True)
    check_backward(model, reference)


@case(MULTI, "`set_reshard_after_backward(False)` between microbatches saves gathers")
def no_sync_no_reshard(fsdp):
    model, reference = pair(fsdp, reshard_after_forward=False)
    for micro in range(3):
        last = micro == 2
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        with record_collectives() as record:
            backward_both(model, reference, micro)
        assert record.kinds.count("all_gather") == (4 if micro == 0 else 0), record.kinds
    assert_same_gradients(model, reference)
    assert all_sharded(model)


@case(
    MULTI, "HSDP: a reduce-scatter and an all-reduce over the replicas per unit; `set_requires_all_reduce(False)`: "
    "reduce-scattered and added up, all-reduced at the last", ranks=4,
)  # fmt: skip
def no_all_reduce(fsdp):
    model, reference = pair(fsdp, mesh=hsdp_mesh())
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        with record_collectives() as record:
            backward_both(model, reference, micro)
        assert record.kinds.count("reduce_scatter") == 4, record.kinds
        replicated = [e for e in record.events if e.kind == "all_reduce" and e.bytes_sent >= 64]
        assert len(replicated) == (4 if micro == 2 else 0), record.kinds
        assert {event.ranks for event in record.events} == {2}
    assert_same_gradients(model, reference)


@case(MULTI, "`set_is_last_backward(False)` between microbatches (1F1B)", ranks=3)
def last_backward(fsdp):
    model, reference = pair(fsdp)
    wholes = [batch(i) for i in range(3)]
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    losses = [mean_square(model, mine(whole)) for whole in wholes[:2]]
    losses[0].backward()
    losses.append(mean_square(model, mine(wholes[2])))
    losses[1].backward()
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    losses[2].backward()
    for whole in wholes:
        mean_square(reference, whole).backward()
    assert_same_gradients(model, reference)


@case(MULTI, "a chunked loss: the last module of a list unit is called several times")
def chunked_loss(fsdp):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = MLP(), nn.LayerNorm(8), nn.Linear(8, 5)

        def forward(self, x):
            return self.norm(self.body(x))

    model, reference = seeded(Model), seeded(Model)
    fsdp.fully_shard(model.body, mesh=mesh())
    fsdp.fully_shard([model.norm, model.head], mesh=mesh(), reshard_after_forward=False)
    fsdp.fully_shard(model, mesh=mesh())
    for _step in range(2):
        for one, x in inputs(model, reference):
            hidden = one(x)
            leaf = hidden.detach().requires_grad_()
            for chunk in leaf.chunk(2):
                (one.head(chunk).square().mean() / 2).backward()
            hidden.backward(leaf.grad)
        assert_same_gradients(model, reference)


@case(
    MULTI, "`set_manual_backward_finalization(True)`: `finalize_backward` reduces once after several backwards",
    ranks=3, new=(2, 15),
)  # fmt: skip
def finalized_by_hand(fsdp):
    for async_op in (False, True):
        model, reference = pair(fsdp)
        model.set_manual_backward_finalization(True)
        model.finalize_backward()  # no step has begun
        model.set_requires_gradient_sync(False)
        with record_collectives() as record:
            for micro in range(3):
                backward_both(model, reference, micro)
        assert "reduce_scatter" not in record.kinds
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        with record_collectives() as record:
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                assert isinstance(handle, fsdp.GradientReductionHandle)
                handle.wait()
        assert record.kinds.count("reduce_scatter") == 4, record.kinds
        assert_same_gradients(model, reference)


@case(
    MULTI, "`GradientReductionHandle.wait` after `reset_iter_state`", new=(2, 15),
    fsdp2=Raises(RuntimeError, "invalidated|reset_iter_state"),
)  # fmt: skip
def waited_after_a_reset(fsdp):
    model, reference = pair(fsdp)
    model.set_manual_backward_finalization(True)
    backward_both(model, reference)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()
