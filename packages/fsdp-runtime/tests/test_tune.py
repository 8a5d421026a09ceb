"""Which units stay gathered, by budget: what is chosen fits, is the same on every rank, and changes no value."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from runtime_helpers import Body, loss_of, seeded, shard, tokens
from torch import nn

from fsdp_runtime import BudgetError, StepMeter, fully_shard, gathered_memory, optimizer_in_backward, tune
from fsdp_runtime._schedule.budget import Cost, Mark, best, predictions
from fsdp_runtime.memory.meter import bytes_of_all_tensors
from ragged_shard.testing import run_ranks, simulated_ranks

BLOCK = 4 * 64 * 65  # bytes of a gathered block


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
    return shard(seeded(Deep, blocks=6), **options)


def backward(model, step=0):
    loss = loss_of(model, tokens(step))
    loss.backward()
    return loss.detach()


def measured(model):
    """Live bytes of a step, counted apart from `tune`."""

    def pool():
        found = gathered_memory(model)
        return found.lent_bytes + found.parked_bytes

    meter = StepMeter(torch.device("cpu"), pool)
    backward(model)  # knows the order
    model.zero_grad()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    with meter.step():
        backward(model)
    model.zero_grad()
    return meter.peak


def marks(layers, live):
    """A root around layers of one second each way; `live` bytes in all of a lean step."""
    units = range(1, layers + 1)
    order: list[Any] = [("enter", 0)]
    order += [(what, unit) for unit in units for what in ("enter", "leave")]
    order += [("leave", 0), ("backward", 0)]
    order += [(what, unit) for unit in reversed(units) for what in ("backward", "done")]
    computes = {(what, unit) for unit in units for what in ("enter", "backward")}
    return [Mark(what, unit, live, float((what, unit) in computes)) for what, unit in [*order, ("done", 0)]]


@pytest.mark.parametrize("kept", [0, 1, 3, 6])
def test_as_many_of_the_last_units_are_kept_as_fit_and_one_more_would_not(kept):
    with simulated_ranks(8):
        model = sharded()
        least = tune(model, lambda: backward(model), memory_budget=1 << 30).least
        budget = least + kept * BLOCK + BLOCK // 2
        found = tune(model, lambda: backward(model), memory_budget=budget)
        blocks = [name for name in found.kept if name != "Deep"]
        assert blocks == [f"blocks.{5 - i}" for i in range(len(blocks))]
        assert (
            kept - 1 <= len(blocks) <= kept + 2
        )  # a lean step's peak may be at another moment than the turn
        assert least <= found.peak <= budget
        assert measured(model) <= found.peak
        if len(blocks) < 6:
            model.blocks[5 - len(blocks)].set_reshard_after_forward(False)
            assert measured(model) > budget - BLOCK


def test_an_impossible_budget_names_the_least_that_is_possible_and_changes_nothing():
    with simulated_ranks(8):
        model = sharded(reshard_after_forward=False)
        before = measured(model)
        with pytest.raises(
            ValueError, match=r"memory_budget=1,000: a step takes at least ([\d,]+) bytes"
        ) as error:
            tune(model, lambda: backward(model), memory_budget=1000)
        assert measured(model) == before
        least = int(str(error.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
        assert tune(model, lambda: backward(model), memory_budget=least).peak <= least


@pytest.mark.parametrize("budget", [1 << 30, 1000])
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


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda model: model.blocks[0], "not a root"),
        (lambda model: backward(model) is None or model, "has one; call zero_grad"),
        (
            lambda model: model.set_modules_to_forward_prefetch([model.blocks[0]]) or model,
            "prefetches by hand",
        ),
        (lambda model: optimizer_in_backward(model, torch.optim.SGD) and model, "optimizer in backward"),
    ],
)
def test_what_it_cannot_tune_is_refused_by_name(prepare, message):
    with simulated_ranks(4):
        model = sharded()
        target = prepare(model)
        with pytest.raises(ValueError, match=message):
            tune(target, lambda: backward(model), memory_budget=1 << 30)


def test_slices_kept_among_neighbors_and_a_budget_that_is_not_bytes_are_refused():
    with simulated_ranks(4):
        with pytest.raises(ValueError, match="integer as reshard_after_forward"):
            tune(sharded(reshard_after_forward=2), lambda: None, memory_budget=1 << 30)
        with pytest.raises(ValueError, match="expected a positive number of bytes"):
            tune(sharded(), lambda: None, memory_budget="8GiB")  # type: ignore[arg-type]


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def tuned_and_not():
    plain, model = sharded(), sharded()
    found = [tune(model, lambda: backward(model), memory_budget=1 << 30)]
    budget = found[0].least + 2 * BLOCK
    found.append(tune(model, lambda: backward(model), memory_budget=budget))
    assert measured(model) <= found[1].peak <= budget
    assert train(model).equal(train(plain))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_choice_is_the_same_on_every_rank_fits_and_changes_no_loss(ranks):
    first, *others = run_ranks(ranks, tuned_and_not)
    assert all(other == first for other in others)
    assert len(first[1].kept) < len(first[0].kept) == 7


def different_orders():
    model = sharded()
    order = [0, 1, 2, 3, 4, 5] if torch.distributed.get_rank() else [1, 0, 2, 3, 4, 5]
    with pytest.raises((ValueError, RuntimeError), match=r"different orders|order of collectives"):
        tune(model, lambda: loss_of(model, tokens(), order=order).backward(), memory_budget=1 << 30)


def test_ranks_that_run_units_in_different_orders_are_told():
    """By the first pass, or else by what `tune` compares."""
    run_ranks(2, different_orders)


def model_lives_after_tune():
    def tuned():
        model = sharded()
        tune(model, lambda: loss_of(model, tokens()).backward(), memory_budget=1 << 30)
        return weakref.ref(model)

    known = tuned()
    gc.collect()
    return known() is not None


def test_nothing_keeps_a_model_that_was_tuned():
    assert not any(run_ranks(2, model_lives_after_tune))


def what_one_rank_finds():
    last = torch.distributed.get_world_size() - 1
    alone = torch.distributed.get_rank() == last
    model = sharded()

    def told(message, model=model, budget=1 << 30):
        with pytest.raises(ValueError, match=message):
            tune(model, lambda: pytest.fail("a step ran"), memory_budget=budget)

    if alone:
        param = model.head.weight
        param.grad = torch.zeros_like(param)
    told(rf"tune on rank {last}: gradients are dropped, and head.weight has one")
    model.zero_grad()
    told(rf"tune on rank {last}: Deep is not a root", model=seeded(Deep, blocks=6) if alone else model)
    told(rf"tune on rank {last}: memory_budget=0: expected a positive number", budget=0 if alone else 1 << 30)
    told(
        rf"tune: ranks do not agree on memory_budget: 9000 on ranks? 0.*; 1000 on rank {last}",
        budget=1000 if alone else 9000,
    )
    one = fully_shard(nn.Linear(4, 4))
    told(
        rf"tune: ranks do not agree on the number of units: 7 on ranks? 0.*; 1 on rank {last}",
        model=one if alone else model,
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_one_rank_finds_before_the_first_step_is_the_same_error_on_every_rank(ranks):
    run_ranks(ranks, what_one_rank_finds, timeout=60)


def test_a_unit_of_parameters_that_no_unit_around_has_is_a_root_and_can_be_tuned():
    with simulated_ranks(4):
        model = nn.Linear(8, 8)
        fully_shard(model)
        budget = bytes_of_all_tensors() + (1 << 20)  # on CPU tensors that other tests left count too
        found = tune(model, lambda: model(torch.ones(2, 8)).sum().backward(), memory_budget=budget)
        assert found.kept == ("Linear",)


def test_depth_is_worth_its_memory_only_where_gathers_are_waited_for():
    slow = [Cost(0, 0.0)] + [Cost(10, 0.5)] * 4
    choices = predictions(marks(4, live=100), slow)
    assert best(choices, 99) is None
    lean = best(choices, 100)
    assert lean is not None
    assert (lean.kept, lean.depth) == ((), 0)
    ahead = best(choices, 110)
    assert ahead is not None
    assert (ahead.kept, ahead.depth) == ((), 1)
    everything = best(choices, 1000)
    assert everything is not None
    assert (set(everything.kept), everything.depth) == ({1, 2, 3, 4}, 1)  # the root takes nothing
    assert everything.seconds == pytest.approx(8.5)  # the first gather is all that is waited for


def test_of_units_of_several_sizes_the_search_finds_the_best_that_fits():
    costs = [Cost(0, 0.0), Cost(30, 1.0), Cost(20, 3.0), Cost(30, 1.0), Cost(20, 3.0)]
    choices = predictions(marks(4, live=100), costs)
    for budget in (100, 120, 130, 140, 150, 170, 190, 300):
        chosen = best(choices, budget)
        assert chosen is not None
        fitting = [choice for choice in choices if choice.peak <= budget]
        assert chosen.seconds <= min(choice.seconds for choice in fitting) + 0.02
        assert chosen.peak <= budget


def test_the_search_is_bounded_where_every_unit_has_a_size_of_its_own():
    costs = [Cost(10 + unit, 0.1) for unit in range(41)]
    choices = predictions(marks(40, live=10_000), costs)
    assert len(choices) == 4 * 42
    assert {len(choice.kept) for choice in choices} == set(range(42))
