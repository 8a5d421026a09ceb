"""Parameters that only some ranks use: `.grad` is None on every rank if no rank used one, else set on every rank."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from partial_steps import WIDTH, alone, check, inputs, same_on_all_ranks, trained
from runtime_helpers import device
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import fully_shard
from fsdp_runtime._grads import missing
from fsdp_runtime.block_policies import whole
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

BRANCHES = 4


class Layer(nn.Module):
    """Branches of which each batch chooses some; a bias of one element leaves most ranks without any of it."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.scalars = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(BRANCHES))

    def forward(self, x, chosen):
        h = self.always(x)
        for i in chosen:
            h = h + self.scalars[i] * self.branches[i](x).tanh()
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, chosen):
        for layer in self.layers:
            x = layer(x, chosen)
        return self.head(x)


def made():
    torch.manual_seed(0)
    return Model()


def sharded(**options) -> Any:
    model = made()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# Branches that each rank uses, step by step: by one rank, by none, by all but one, by all.
STEPS: list[list[tuple[int, ...]]] = [
    [(0,), (), (1,), ()],
    [(0,), (0, 1), (0, 1, 2), (2,)],
    [(), (), (), ()],
    [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1)],
    [(3,), (3,), (3,), (3,)],
    [(0, 1, 2, 3), (0, 1, 2, 3), (2,), (0, 1, 2, 3)],
]
EVERY = tuple(range(len(STEPS)))
KINDS = [("branches", ".weight"), ("branches", ".bias"), ("scalars", "")]


def run(ends=EVERY, *, partial_sums=False, reduce_each=False, mesh_shape=None, **options):
    if mesh_shape:
        options["mesh"] = rank_mesh(*mesh_shape, names=("replicate", "shard"))
    model = sharded(**options)
    sync = model.set_requires_all_reduce if partial_sums else model.set_requires_gradient_sync
    return trained(model, STEPS, ends, (lambda last: None) if reduce_each else sync)


def check_runs(world, ends=EVERY, **options):
    check(run_ranks(world, run, ends, **options), alone(made(), STEPS, ends, world))


CASES: dict[str, dict[str, Any]] = {
    "": {},
    "collectives": {"transport": "collectives"},
    "sums in float64": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "tensors whole on one rank": {"block_policy": whole()},
    "accumulated": {"ends": (1, 3, 5)},
    "reduced in each microbatch": {"ends": (1, 3, 5), "reduce_each": True},
}


@pytest.mark.parametrize("case", CASES)
def test_adamw_with_weight_decay_is_that_of_one_process(case):
    check_runs(3, **CASES[case])


@pytest.mark.parametrize(
    "options",
    [
        {"ends": (2, 3, 5)},
        {"ends": (2, 3, 5), "partial_sums": True},
        pytest.param({}, marks=pytest.mark.long),
    ],
    ids=["accumulated", "partial", ""],
)
def test_with_hsdp_the_replicas_count_too(options):
    check_runs(4, mesh_shape=(2, 2), **options)


@pytest.mark.long
@pytest.mark.parametrize(("world", "mesh_shape"), [(1, None), (4, None), (4, (4, 1)), (4, (1, 4))])
def test_at_other_world_sizes_and_with_hsdp_of_other_shapes(world, mesh_shape):
    check_runs(world, mesh_shape=mesh_shape)


def backward(model, chosen, step=0):
    model(inputs(step, dist.get_rank()), chosen).square().mean().backward()


@on_ranks(3)
def test_ranks_that_use_different_parameters_send_the_same_collectives():
    model = sharded()
    backward(model, range(BRANCHES))
    records = []
    for chosen in (range(BRANCHES), (dist.get_rank(),), ()):
        with record_collectives() as record:
            backward(model, chosen)
        records.append(record.events)
    assert records[0]
    assert records[1] == records[2] == records[0]


def keys_of_store(mesh_shape=None):
    """Number of keys after each of 24 steps; with HSDP replicas are summed in every second one."""
    store = dist.group.WORLD.get_group_store()
    options = {"mesh": rank_mesh(*mesh_shape, names=("replicate", "shard"))} if mesh_shape else {}
    model, counts = sharded(**options), []
    for step in range(24):
        model.set_requires_all_reduce(step % 2 == 1)
        chosen = STEPS[step % len(STEPS)][dist.get_rank()]
        backward(model, chosen, step)
        model.zero_grad()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


@pytest.mark.parametrize(
    ("ranks", "mesh_shape"), [pytest.param(3, None, marks=pytest.mark.long), (4, (2, 2))]
)
def test_the_store_does_not_grow(ranks, mesh_shape):
    for counts in run_ranks(ranks, keys_of_store, mesh_shape):
        assert len(set(counts[8:])) == 1


@pytest.mark.parametrize(("chosen", "waits"), [(range(BRANCHES), 0), ((0,), 2)])
def test_the_host_waits_only_for_reductions_in_which_it_misses_something(chosen, waits):
    with device("late") as found:
        model = sharded(mesh=rank_mesh(4))
        model(torch.ones(2, WIDTH), chosen).sum().backward()
        with mock.patch.object(found, "wait_on_host", wraps=found.wait_on_host) as wait:
            model(torch.ones(2, WIDTH), chosen).sum().backward()
        assert wait.call_count == waits


@on_ranks(3)
def test_an_earlier_gradient_stays_and_a_hook_that_adds_to_sums_sets_all():
    model = sharded()
    for chosen in ((0,), (1,)):
        backward(model, chosen if dist.get_rank() == 0 else ())
        assert same_on_all_ranks(model)
    none = {n for n, p in model.layers[0].named_parameters() if p.grad is None}
    assert none == {f"{kind}.{i}{part}" for kind, part in KINDS for i in (2, 3)}
    for unit in (*model.layers, model):  # as a hook that adds what ranks outside the mesh have
        unit.set_all_reduce_hook(lambda flat: flat.add_(1))
    backward(model, ())
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(3)
def test_a_store_that_does_not_answer_is_an_error_that_names_the_parameters():
    model = sharded()
    with (
        mock.patch.object(missing.Ledger, "read", side_effect=RuntimeError("no answer")),
        pytest.raises(
            RuntimeError, match=r"scalars.3 of layers.1 got no gradient on .*: no answer.*_unused_params"
        ),
    ):
        backward(model, (0, 1, 2))
