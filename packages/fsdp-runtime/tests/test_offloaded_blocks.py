"""block_optim's optimizers with states in CPU memory: each block comes to the (simulated) device for its update."""

from typing import Any

import pytest
import torch
from runtime_helpers import device, loss_of, seeded, tokens

import block_optim
from fsdp_runtime import fully_shard
from fsdp_runtime.checkpoint import OffloadedOptimizer
from layout_planner import Elements
from ragged_shard.testing import RaceError

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view")  # F.linear does under a mode
EIGHT_BIT: dict[str, Any] = {"block": Elements(16), "min_8bit_numel": 64}
KINDS = {
    "adamw": lambda groups: block_optim.AdamW(groups, lr=0.01),
    "adamw8bit": lambda groups: block_optim.AdamW8bit(groups, lr=0.01, **EIGHT_BIT),
    "muon": lambda groups: block_optim.Muon(groups, lr=0.01),
    "shampoo": lambda groups: block_optim.Shampoo(groups, lr=0.01, precondition_frequency=2),
    "overlapped": lambda groups: block_optim.Shampoo(groups, lr=0.01, precondition_frequency=1, overlap=True),
    "soap": lambda groups: block_optim.SOAP(groups, lr=0.01, precondition_frequency=2),
}
ALONE = ("adamw", "adamw8bit")


def alone_or_one(kind):
    """A simulated device; of ranks that exchange matrices there is one, since the others are not there."""
    return device() if kind in ALONE else device(ranks=1, rank=0)


def prepared(kind, offloaded):
    """A sharded model and its optimizer, with a group for each unit."""
    model = seeded(width=16, blocks=4)
    policy = block_optim.AdamW8bit.block_policy(**EIGHT_BIT) if kind == "adamw8bit" else None
    for block in model.blocks:
        fully_shard(block, block_policy=policy)
    fully_shard(model, block_policy=policy)
    units = [*model.blocks, model.embed, model.head]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in unit.parameters() if p.ndim == 2 or kind != "muon"]} for unit in units
    ]
    groups[-1]["lr"] = 0.1
    optimizer = KINDS[kind](groups)
    return model, OffloadedOptimizer(optimizer) if offloaded else optimizer


def train(model, optimizer, steps=range(4)):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in steps:
        loss_of(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [param.to_local().detach().clone() for param in model.parameters()]


def same(one, two):
    return len(one) == len(two) and all(a.equal(b) for a, b in zip(one, two, strict=True))


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same_states(one, two):
    assert one["state"].keys() == two["state"].keys()
    for index, state in one["state"].items():
        assert state.keys() == two["state"][index].keys()
        for key, value in state.items():
            other = two["state"][index][key]
            assert local(value).equal(local(other)) if isinstance(value, torch.Tensor) else value == other, (
                key
            )


# Those that update alone, that exchange matrices, and that work next to the step; the others are long.
some_kinds = pytest.mark.parametrize(
    "kind",
    [
        k if k in ("adamw8bit", "muon", "overlapped") else pytest.param(k, marks=pytest.mark.long)
        for k in KINDS
    ],
)


@some_kinds
def test_values_are_those_of_the_optimizer_itself_and_no_access_is_a_race(kind):
    with alone_or_one(kind):
        plain, optimizer = prepared(kind, False)
        model, offloaded = prepared(kind, True)
        assert same(train(plain, optimizer), train(model, offloaded))
        same_states(optimizer.state_dict(), offloaded.state_dict())
        for param, state in offloaded.state.items():
            assert state.keys() == optimizer.state[list(plain.parameters())[index_of(model, param)]].keys()


def index_of(model, param):
    return next(i for i, one in enumerate(model.parameters()) if one is param)


@some_kinds
def test_between_steps_no_states_are_on_the_device_and_in_a_step_three_blocks_at_most(kind, monkeypatch):
    with alone_or_one(kind) as simulated:
        model, optimizer = prepared(kind, True)
        blocks = optimizer._offloaded._buckets
        assert len(blocks) >= 5 if kind in ALONE else len(blocks) == 1
        most, theirs = [], type(optimizer._inner).step

        def step(self, *args, **named):
            most.append(sum(any(copy.storage.nbytes() for copy in block.copies) for block in blocks))
            return theirs(self, *args, **named)

        monkeypatch.setattr(type(optimizer._inner), "step", step)
        train(model, optimizer, range(1))
        assert max(most) == (3 if kind in ALONE else 1)
        assert all(copy.storage.nbytes() == 0 for block in blocks for copy in block.copies)
        assert simulated.accesses


@some_kinds
def test_an_update_that_does_not_wait_for_its_states_is_a_race(kind, monkeypatch):
    with alone_or_one(kind) as simulated:
        model, optimizer = prepared(kind, True)
        train(model, optimizer, range(1))
        loss_of(model, tokens(2)).backward()
        monkeypatch.setattr(simulated, "wait", lambda *_: None)
        with pytest.raises(RaceError):
            optimizer.step()
        monkeypatch.undo()


def test_an_optimizer_that_works_next_to_its_steps_may_be_given_after_some():
    with alone_or_one("overlapped"):
        found = []
        for with_it in (False, True):
            model, optimizer = prepared("overlapped", False)
            train(model, optimizer, range(2))
            found.append(train(model, OffloadedOptimizer(optimizer) if with_it else optimizer, range(2, 4)))
        assert same(*found)


def test_work_next_to_the_steps_has_ended_before_its_states_move(monkeypatch):
    with alone_or_one("overlapped"):
        model, optimizer = prepared("overlapped", False)
        train(model, optimizer, range(2))
        sizes, theirs = [], type(optimizer).synchronize

        def synchronize(self):
            states = [local(value) for state in self.state.values() for value in tensors_in(state)]
            sizes.append(min(value.untyped_storage().nbytes() for value in states if value.numel() > 1))
            theirs(self)

        monkeypatch.setattr(type(optimizer), "synchronize", synchronize)
        OffloadedOptimizer(optimizer)
        assert sizes
        assert sizes[0] > 0


def tensors_in(tree):
    return [value for value in torch.utils._pytree.tree_leaves(tree) if isinstance(value, torch.Tensor)]


def test_the_host_waits_for_the_copies_and_the_updates_before_it_reads_states(monkeypatch):
    with device() as simulated:
        model, optimizer = prepared("adamw", True)
        train(model, optimizer, range(1))
        waited = []
        monkeypatch.setattr(simulated, "wait_on_host", lambda event: waited.append(event is not None))
        optimizer.state_dict()
        assert waited == [True, True]


def test_parameters_that_begin_to_train_and_groups_that_are_added_are_offloaded_too():
    with device():
        found = []
        for with_it in (False, True):
            model, optimizer = prepared("adamw", with_it)
            model.embed.weight.requires_grad_(False)
            train(model, optimizer, range(1))
            model.embed.weight.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.norm.parameters()), "lr": 0.5})
            found.append(train(model, optimizer, range(1, 3)))
        assert same(*found)
        for param, state in optimizer._inner.state.items():
            assert state["exp_avg"].to_local().untyped_storage().nbytes() == 0
            assert optimizer.state[param]["exp_avg"].shape == param.shape


def test_what_does_not_apply_is_refused():
    param = [torch.nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ValueError, match="bucket_bytes does not apply to AdamW of block_optim"):
        OffloadedOptimizer(block_optim.AdamW(param), bucket_bytes=1 << 20)
    with pytest.raises(TypeError, match="step got grad_norm, which SGD of torch does not take"):
        OffloadedOptimizer(torch.optim.SGD(param)).step(grad_norm=1.0)


class Renewing(block_optim.BlockOptimizer):
    """Momentum, in another tensor after each step."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def init_states(self, group, params):
        for p in params:
            self.state[p.tensor] = {"momentum": p.zeros()}

    def update(self, active):
        for p, grad in active:
            state = self.state[p.tensor]
            momentum = block_optim.local_of(state["momentum"]) * 0.9 + grad
            del state["momentum"]  # the next tensor may get its address
            state["momentum"] = p.zeros()
            block_optim.local_of(state["momentum"]).copy_(momentum)
            p.local.sub_(p.group["lr"] * momentum)


def test_a_state_that_an_optimizer_replaces_is_offloaded_and_saved(monkeypatch):
    monkeypatch.setitem(KINDS, "renewing", Renewing)
    with alone_or_one("renewing"):
        plain, optimizer = prepared("renewing", False)
        model, offloaded = prepared("renewing", True)
        for step in range(4):
            assert same(train(plain, optimizer, (step,)), train(model, offloaded, (step,)))
            same_states(optimizer.state_dict(), offloaded.state_dict())
            held = [block_optim.local_of(state["momentum"]) for state in offloaded._inner.state.values()]
            assert not any(local.untyped_storage().nbytes() for local in held)
