"""Optimizer states in CPU memory, updates on the (simulated) device: the next bucket's copy is in flight.

torch's optimizers update buckets of bytes; block_optim's take block after block, and those that exchange matrices all.
"""

from typing import Any

import pytest
import torch
from runtime_helpers import Ops, device, locals_of, loss_of, same_bits, seeded, step_of, tokens

import block_optim
from fsdp_runtime import fully_shard
from fsdp_runtime.checkpoint import OffloadedOptimizer
from layout_planner import Elements

EIGHT_BIT: dict[str, Any] = {"block": Elements(16), "min_8bit_numel": 64}
TORCH = {
    "torch adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "foreach": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, foreach=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
}
BLOCKS = {
    "adamw": lambda groups: block_optim.AdamW(groups, lr=0.01),
    "adamw8bit": lambda groups: block_optim.AdamW8bit(groups, lr=0.01, **EIGHT_BIT),
    "muon": lambda groups: block_optim.Muon(groups, lr=0.01),
    "shampoo": lambda groups: block_optim.Shampoo(groups, lr=0.01, precondition_frequency=2),
    "soap": lambda groups: block_optim.SOAP(groups, lr=0.01, precondition_frequency=2),
}
KINDS = TORCH | BLOCKS
ALONE = (*TORCH, "adamw", "adamw8bit")
# Of block_optim's one that updates by itself and two that exchange blocks; the others are long.
SOME = (*TORCH, "adamw8bit", "muon", "shampoo")


def device_for(kind):
    """A simulated device; of ranks that exchange matrices there is one, since the others are not there."""
    return device() if kind in ALONE else device(ranks=1, rank=0)


def prepared(kind, offloaded, bucket_bytes=3000):
    """A sharded model and its optimizer, with a group for each unit."""
    model = seeded(width=16, blocks=4)
    policy = block_optim.AdamW8bit.block_policy(**EIGHT_BIT) if kind == "adamw8bit" else None
    for module in (*model.blocks, model):
        fully_shard(module, block_policy=policy)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in unit.parameters() if p.ndim == 2 or kind != "muon"]}
        for unit in (*model.blocks, model.embed, model.head)
    ]
    groups[-1]["lr"] = 0.1
    optimizer = KINDS[kind](groups)
    options = {"bucket_bytes": bucket_bytes} if kind in TORCH else {}
    return model, OffloadedOptimizer(optimizer, **options) if offloaded else optimizer


def train(model, optimizer, steps=range(4)):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in steps:
        step_of(model, optimizer, step)
        scheduler.step()
    return locals_of(model)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def tensors_in(tree):
    return [
        local(value) for value in torch.utils._pytree.tree_leaves(tree) if isinstance(value, torch.Tensor)
    ]


def same_states(one, two):
    assert one["state"].keys() == two["state"].keys()
    for index, state in one["state"].items():
        assert state.keys() == two["state"][index].keys()
        for key, value in state.items():
            other = two["state"][index][key]
            same = local(value).equal(local(other)) if isinstance(value, torch.Tensor) else value == other
            assert same, key


@pytest.mark.parametrize(
    ("kind", "bucket_bytes"),
    [
        *(pytest.param(kind, 700, marks=[pytest.mark.long] * (kind not in SOME)) for kind in KINDS),
        *(pytest.param("foreach", n, marks=pytest.mark.long) for n in (1, 1 << 28)),
    ],
)
def test_values_are_those_of_the_optimizer_with_three_buckets_on_the_device(kind, bucket_bytes, monkeypatch):
    with device_for(kind):
        plain, optimizer = prepared(kind, False)
        model, offloaded = prepared(kind, True, bucket_bytes)
        inner, theirs, most = type(offloaded._inner), type(offloaded._inner).step, []

        def step(self, *args, **named):
            if self is not optimizer:
                buckets = offloaded._offloaded._buckets
                most.append(sum(any(copy.storage.nbytes() for copy in bucket.copies) for bucket in buckets))
            return theirs(self, *args, **named)

        monkeypatch.setattr(inner, "step", step)
        assert same_bits(train(plain, optimizer), train(model, offloaded))
        buckets = offloaded._offloaded._buckets
        assert all(
            copy.storage.nbytes() == 0 for bucket in buckets for copy in bucket.copies
        )  # between steps
        if kind in ("torch adamw", *BLOCKS):
            assert len(buckets) >= 4 if kind in ALONE else len(buckets) == 1
            assert max(most) == (3 if kind in ALONE else 1)
        if kind in TORCH and kind != "plain":  # one storage a bucket, which all states share
            counts = {len(bucket.copies) for bucket in buckets}
            assert counts == ({0, 1} if bucket_bytes == 1 else {1})  # a shard may be empty
            states = [value for value in tensors_in(dict(offloaded._inner.state)) if value.numel() > 1]
            assert all(value.untyped_storage().nbytes() == 0 for value in states)
        same_states(optimizer.state_dict(), offloaded.state_dict())
        theirs_of = dict(zip(model.parameters(), plain.parameters(), strict=True))
        for param, state in offloaded.state.items():
            assert state.keys() == optimizer.state[theirs_of[param]].keys()


@pytest.mark.parametrize("kind", ["torch adamw", "adamw"])
def test_the_host_waits_for_the_copies_and_the_updates_before_it_reads_states(kind, monkeypatch):
    with device() as simulated:
        model, optimizer = prepared(kind, True)
        train(model, optimizer, range(1))
        waited = []
        monkeypatch.setattr(simulated, "wait_on_host", lambda event: waited.append(event is not None))
        optimizer.state_dict()
        assert waited == [True, True]


@pytest.mark.parametrize("kind", ["torch adamw", "adamw"])
def test_parameters_that_begin_to_train_and_groups_that_are_added_are_offloaded_too(kind):
    with device():
        found = []
        for with_it in (False, True):
            model, optimizer = prepared(kind, with_it)
            model.embed.weight.requires_grad_(False)
            train(model, optimizer, range(1))
            model.embed.weight.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.norm.parameters()), "lr": 0.5})
            found.append(train(model, optimizer, range(1, 3)))
        assert same_bits(*found)
        for param, state in optimizer._inner.state.items():
            assert local(state["exp_avg"]).untyped_storage().nbytes() == 0
            assert optimizer.state[param]["exp_avg"].shape == param.shape


# -- torch's: buckets of bytes -----------------------------------------------------------------------------------------


def test_a_bucket_is_one_copy_each_way_and_the_next_one_is_queued_before_an_update():
    def note(op, args):
        if op is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8 and args[0].ndim == 1:
            events.append("c")
            assert simulated.current_stream() is not computing
        elif "addcdiv" in str(op) and events[-1] != "u":  # an update is several ops
            events.append("u")

    with device() as simulated:
        computing = simulated.current_stream()
        events: list[str] = []
        model, optimizer = prepared("torch adamw", True, 700)
        train(model, optimizer, range(2))
        loss_of(model, tokens(2)).backward()
        with Ops(note):
            optimizer.step()
        buckets = len(optimizer._offloaded._buckets)
        assert buckets >= 4
        assert "".join(events) == "cc" + "ucc" * (buckets - 2) + "uc" + "uc"


def test_what_does_not_apply_is_refused_and_on_the_cpu_it_is_the_optimizer_itself():
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"LBFGS may look at several parameters at a time"):
        OffloadedOptimizer(torch.optim.LBFGS([param]))
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        OffloadedOptimizer(torch.optim.SGD([param]), bucket_bytes=0)
    with pytest.raises(ValueError, match="bucket_bytes does not apply to AdamW of block_optim"):
        OffloadedOptimizer(block_optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))]), bucket_bytes=1 << 20)
    optimizer = OffloadedOptimizer(torch.optim.SGD([param], lr=0.5))
    with pytest.raises(TypeError, match="step got grad_norm, which SGD of torch does not take"):
        optimizer.step(grad_norm=1.0)
    optimizer.add_param_group({"params": [other := torch.nn.Parameter(torch.ones(2))]})

    def closure():
        loss = param.sum() + other.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert param.eq(0.5).all()
    assert other.eq(0.5).all()


# -- block_optim's: states that are replaced ------------------------------------------------------------------------


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
    with device_for("renewing"):
        plain, optimizer = prepared("renewing", False)
        model, offloaded = prepared("renewing", True)
        for step in range(4):
            assert same_bits(train(plain, optimizer, (step,)), train(model, offloaded, (step,)))
            same_states(optimizer.state_dict(), offloaded.state_dict())
            held = [block_optim.local_of(state["momentum"]) for state in offloaded._inner.state.values()]
            assert not any(tensor.untyped_storage().nbytes() for tensor in held)
