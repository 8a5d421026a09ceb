"""Which units stay gathered, by budget: what is chosen fits, is the same on every rank, and changes no value."""

import contextlib
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from runtime_helpers import Body, loss_of, seeded, shard, step_of, tokens
from torch import nn

from fsdp_runtime import fully_shard, optimizer_in_backward
from fsdp_runtime.memory import BudgetError, StepMeter, gathered_memory, tune
from ragged_shard import gather_from_ranks
from ragged_shard.testing import on_ranks, simulated_ranks

BLOCKS, BLOCK = 4, 4 * 64 * 65  # and the bytes of a gathered one
PLENTY = 1 << 30


class Deep(Body):
    """Blocks whose output is no view."""

    def __init__(self, **options):
        super().__init__(width=64, vocab=32, **options)

    def forward(self, tokens, order=None):
        x = self.embed(tokens)
        for index in order or range(len(self.blocks)):
            x = self.blocks[index](x.flatten(0, 1)).tanh().view_as(x) + x
        return self.head(self.norm(x))


def sharded(**options):
    return shard(seeded(Deep, blocks=BLOCKS), **options)


def backward(model, step=0):
    loss = loss_of(model, tokens(step))
    loss.backward()
    return loss.detach()


def measured(model):
    """Live bytes of a step, counted apart from `tune`."""

    def pool():
        stats = gathered_memory(model)
        return stats.lent_bytes + stats.parked_bytes

    backward(model)  # knows the order
    model.zero_grad()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    others = pool()
    storages = {param.to_local().untyped_storage() for param in model.parameters()}
    shards = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    meter = StepMeter(torch.device("cpu"), lambda: pool() - others, lambda: shards)
    with meter.step():
        backward(model)
    model.zero_grad()
    return meter.peak


def test_as_many_of_the_last_units_are_kept_as_fit():
    with simulated_ranks(8):
        model, calls = sharded(reshard_after_forward=False), []

        def step():
            calls.append(0)
            backward(model)

        before = measured(model)
        with pytest.raises(
            ValueError, match=r"memory_budget=1,000: a step takes at least [\d,]+ bytes"
        ) as error:
            tune(model, step, memory_budget=1000)
        assert measured(model) == before  # and nothing has changed
        least = int(str(error.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
        model = sharded()
        calls.clear()
        assert tune(model, step, memory_budget=PLENTY).least == least
        assert len(calls) == 4
        for kept in (0, 1, BLOCKS):
            calls.clear()
            budget = least + kept * BLOCK + (BLOCK // 2 if kept else 0)
            tuning = tune(model, step, memory_budget=budget)
            assert len(calls) <= 4 + 7
            blocks = [name for name in tuning.kept if name != "Deep"]
            assert blocks == [f"blocks.{BLOCKS - 1 - i}" for i in range(len(blocks))]
            # A lean step's peak may be at another moment than the turn.
            assert kept - 1 <= len(blocks) <= kept + 2
            assert least <= tuning.peak <= budget
            assert measured(model) <= tuning.peak
            if len(blocks) < BLOCKS:
                model.blocks[BLOCKS - 1 - len(blocks)].set_reshard_after_forward(False)
                assert measured(model) > budget - BLOCK
        meter = StepMeter(torch.device("cpu"), lambda: 0, lambda: 1 << 40)  # the caller's is used
        with pytest.raises(BudgetError):
            tune(model, step, memory_budget=PLENTY, meter=meter)


@pytest.mark.parametrize("budget", [PLENTY, 1000])
def test_generators_buffers_and_gradients_are_as_before_also_where_nothing_fits(budget):
    fits = budget > 1000
    with simulated_ranks(2):
        model = seeded(Deep, blocks=2)
        model.norm.register_buffer("seen", torch.zeros(()))
        model.norm.register_forward_pre_hook(lambda module, inputs: module.seen.add_(1) and None)
        shard(model)
        torch.manual_seed(3)

        def step():
            torch.rand(1)
            backward(model)

        with contextlib.nullcontext() if fits else pytest.raises(BudgetError):
            tune(model, step, memory_budget=budget)
        assert torch.rand(1).equal(torch.rand(1, generator=torch.Generator().manual_seed(3)))
        assert model.norm.seen == 0
        assert all(param.grad is None for param in model.parameters())


REFUSALS: Any = (
    (lambda model: model.blocks[0], "not a root"),
    (lambda model: backward(model) is None or model, "has one; call zero_grad"),
    (lambda model: model.set_modules_to_forward_prefetch([model.blocks[0]]) or model, "prefetches by hand"),
    (lambda model: optimizer_in_backward(model, torch.optim.SGD) and model, "optimizer in backward"),
    (lambda model: sharded(reshard_after_forward=2), "integer as reshard_after_forward"),
)


def test_what_it_cannot_tune_is_refused_by_name():
    with simulated_ranks(4):
        for prepare, message in REFUSALS:
            model = sharded()
            target = prepare(model)
            with pytest.raises(ValueError, match=message):
                tune(target, partial(backward, model), memory_budget=PLENTY)
        with pytest.raises(ValueError, match="expected a positive number of bytes"):
            tune(sharded(), lambda: None, memory_budget="8GiB")  # type: ignore[arg-type]


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.stack([step_of(model, optimizer, step) for step in range(2)])


@on_ranks(3)
def test_the_choice_is_the_same_on_every_rank_fits_and_changes_no_loss():
    plain, model = sharded(), sharded()
    tuning = [tune(model, partial(backward, model), memory_budget=PLENTY)]
    budget = tuning[0].least + 2 * BLOCK
    tuning.append(tune(model, partial(backward, model), memory_budget=budget))
    assert measured(model) <= tuning[1].peak <= budget
    assert train(model).equal(train(plain))
    assert gather_from_ranks(tuning) == [tuning] * 3
    assert len(tuning[1].kept) < len(tuning[0].kept) == BLOCKS + 1
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


@on_ranks(2)
def test_ranks_that_run_units_in_different_orders_are_told():
    """By the first pass, or else by what `tune` compares."""
    model = sharded()
    order = [0, 1, 2, 3] if torch.distributed.get_rank() else [1, 0, 2, 3]
    with pytest.raises((ValueError, RuntimeError), match=r"do not agree on the order of (units|collectives)"):
        tune(model, lambda: loss_of(model, tokens(), order=order).backward(), memory_budget=PLENTY)


@on_ranks(3)
def test_what_one_rank_finds_before_the_first_step_is_the_same_error_on_every_rank():
    alone, model, one = torch.distributed.get_rank() == 2, sharded(), fully_shard(nn.Linear(4, 4))

    def told(message, target=model, budget=PLENTY):
        with pytest.raises(ValueError, match=f"^tune{message}"):
            tune(target, lambda: pytest.fail("a step ran"), memory_budget=budget)

    if alone:
        model.head.weight.grad = torch.zeros_like(model.head.weight)
    told(" on rank 2: gradients are dropped, and head.weight has one")
    model.zero_grad()
    told(" on rank 2: Deep is not a root", seeded(Deep) if alone else model)
    told(" on rank 2: memory_budget=0: expected a positive number", budget=0 if alone else PLENTY)
    disagree = ": ranks do not agree on"
    told(rf"{disagree} memory_budget: 9000 on ranks 0, 1; 1000 on rank 2", budget=1000 if alone else 9000)
    told(rf"{disagree} the number of units: 5 on ranks 0, 1; 1 on rank 2", one if alone else model)


def test_a_unit_of_parameters_that_no_unit_around_has_is_a_root_and_can_be_tuned():
    with simulated_ranks(4):
        model = nn.Linear(8, 8)
        fully_shard(model)
        tuning = tune(model, lambda: model(torch.ones(2, 8)).sum().backward(), memory_budget=1 << 20)
        assert tuning.kept == ("Linear",)


def test_other_tensors_models_and_garbage_do_not_count():
    with simulated_ranks(8):
        model, other = sharded(), sharded(reshard_after_forward=False)
        model.set_prefetch_depth(2)
        whole = tune(model, lambda: backward(model), memory_budget=PLENTY)
        assert (whole.prefetch_depth, len(whole.kept)) == (2, BLOCKS + 1)
        large = torch.zeros(1 << 20)
        loss_of(other, tokens())  # holds gathered memory until backward
        assert gathered_memory(other).lent_bytes > 0
        gone = sharded()
        gone.unshard()
        gone.itself = [gone]  # a cycle, which holds its gathered memory until the collector runs
        del gone
        calls = []

        def step():
            calls.append(0)
            if len(calls) == 2:  # the first that is measured
                gc.collect()
            backward(model)

        gc.disable()
        try:
            lean = tune(model, step, memory_budget=whole.least)
        finally:
            gc.enable()
        assert (lean.prefetch_depth, lean.peak, lean.least) == (0, whole.least, whole.least)
        assert large.sum() == 0
