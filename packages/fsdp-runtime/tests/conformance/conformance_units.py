"""Cases: which parameters are registered when, gathers and prefetch."""

from typing import Any

import torch
import torch.nn as nn
from conformance_models import (
    MLP,
    Stack,
    adamw,
    all_sharded,
    assert_same,
    assert_same_gradients,
    backward_both,
    batch,
    check_training,
    close,
    full,
    inputs,
    mean_square,
    mesh,
    mine,
    none_sharded,
    pair,
    seeded,
    shard_stack,
    stack_of,
    train,
    train_plain,
    world,
)
from conformance_registry import IMPLEMENTATIONS, Raises, Wrong, case, refusal

from ragged_shard.testing import record_collectives

UNITS = "Gathering: what is registered when"


def run(model, x=None):
    return model(torch.randn(4, 8) if x is None else x)


def gathers(record):
    return record.kinds.count("all_gather")


def forward_backward_kinds(model):
    """The collectives of a forward and of a backward, after two steps: what follows is known then."""
    for _ in range(2):
        mean_square(model, torch.randn(4, 8)).backward()
    with record_collectives() as forward:
        out = mean_square(model, torch.randn(4, 8))
    with record_collectives() as backward:
        out.backward()
    return forward.kinds, backward.kinds


@case(
    UNITS, "`reshard_after_forward`: True or the number of ranks shards after forward, False or 1 after backward, None "
    "only the root after backward", ranks=3,
)  # fmt: skip
def reshard_after_forward(fsdp):
    for reshard, blocks, root in (
        (True, True, True), (False, False, False), (None, True, False), (1, False, False), (world(), True, True),
    ):  # fmt: skip
        model = shard_stack(fsdp, seeded(Stack), reshard_after_forward=reshard)
        assert all_sharded(model), reshard
        out = run(model)
        for part, sharded in ((model.blocks, blocks), (model.head, root)):
            assert all_sharded(part) if sharded else none_sharded(part), reshard
        out.sum().backward()
        assert all_sharded(model), reshard
        if isinstance(reshard, bool):
            check_training(Stack, lambda m, r=reshard: shard_stack(fsdp, m, reshard_after_forward=r))


@case(
    UNITS, "`reshard_after_forward=2` of 4, also on a mesh of 1 x 4: kept on groups of two, where backward gathers",
    ranks=4,
)  # fmt: skip
def reshard_int(fsdp):
    for over in (mesh(), mesh(1, 4, names=("r", "s"))):
        options = {"reshard_after_forward": 2, "mesh": over}
        model = check_training(Stack, lambda m, o=options: shard_stack(fsdp, m, **o))
        sharded = {name: p.to_local().numel() for name, p in model.named_parameters()}
        assert sum(sharded.values()) < sum(p.numel() for p in model.parameters())
        with record_collectives() as forward:
            out = mean_square(model, torch.randn(4, 8))
        assert all(p.numel() > 0 for p in model.blocks.parameters())
        with record_collectives() as backward:
            out.backward()
        assert {e.ranks for e in forward.events if e.kind == "all_gather"} == {4}
        assert {e.ranks for e in backward.events if e.kind == "all_gather"} == {2}
        assert all_sharded(model)
        assert {name: p.to_local().numel() for name, p in model.named_parameters()} == sharded


@case(UNITS, "`set_reshard_after_forward`, on all units below or on this one alone")
def set_reshard_after_forward(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    model.set_reshard_after_forward(False)
    out = run(model)
    assert none_sharded(model)
    out.sum().backward()
    model.set_reshard_after_forward(True, recurse=False)
    out = run(model)
    assert all_sharded(model.head)
    assert none_sharded(model.blocks)
    out.sum().backward()
    model.set_reshard_after_forward(True)
    run(model).sum().backward()
    assert all_sharded(model)


refusal(
    UNITS, "`set_reshard_after_forward` takes a bool",
    lambda fsdp: fsdp.fully_shard(MLP(), mesh=mesh()).set_reshard_after_forward(2),
    Raises(ValueError, "reshard_after_forward"),
)  # fmt: skip
refusal(
    UNITS, "prefetch lists take wrapped modules only",
    lambda fsdp: fsdp.fully_shard(MLP(), mesh=mesh()).set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
    Raises(ValueError, "FSDPModule"),
)  # fmt: skip


@case(
    UNITS,
    "`set_reshard_after_backward(False)`: the next forward gathers nothing",
    better="modules hold the sharded parameters meanwhile, FSDP2's hold copies",
)
def set_reshard_after_backward(fsdp):
    model, reference = pair(fsdp)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    whole = batch()
    mean_square(model, mine(whole)).backward()
    assert none_sharded(model) if fsdp.__name__ == IMPLEMENTATIONS["fsdp2"] else all_sharded(model)
    with record_collectives() as record:
        mean_square(model, mine(whole)).backward()
    assert gathers(record) == 0, record.kinds
    model.set_reshard_after_backward(True)
    mean_square(model, mine(whole)).backward()
    assert all_sharded(model)
    (3 * mean_square(reference, whole)).backward()
    assert_same_gradients(model, reference)


@case(
    UNITS, "`set_keep_unsharded_storage(True)`: unsharded parameters keep their addresses from step to step", ranks=3,
    new=(2, 15),
)  # fmt: skip
def set_keep_unsharded_storage(fsdp):
    model, reference = pair(fsdp)
    model.set_keep_unsharded_storage(True)
    seen: list[set[int]] = [set() for _ in model.blocks]
    for block, addresses in zip(model.blocks, seen, strict=True):
        block.up.register_forward_hook(lambda module, *_, to=addresses: to.add(module.weight.data_ptr()))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, adamw(model), steps=3)
    model.load_state_dict(start)
    train(model, adamw(model), steps=1)
    assert [len(addresses) for addresses in seen] == [1, 1, 1], seen
    train_plain(reference, adamw(reference), steps=1)
    assert_same(model, reference)


@case(UNITS, "`unshard()` and `reshard()`: full values, then sharded again; neither recurses", ranks=3)
def unshard(fsdp):
    reference = seeded(Stack)
    model = shard_stack(fsdp, seeded(Stack))
    assert model.unshard() is None
    assert none_sharded(model.head)
    assert all_sharded(model.blocks)
    assert torch.equal(model.head.weight, reference.head.weight)
    model.unshard()
    model.reshard()
    model.reshard()
    assert all_sharded(model)
    assert torch.equal(full(model.head.weight), reference.head.weight)


@case(
    UNITS, "`unshard(async_op=True)` gives an `UnshardHandle`: `wait()`, or the next forward, waits for the parameters",
    ranks=3,
)  # fmt: skip
def unshard_async(fsdp):
    model, reference = pair(fsdp)
    handles = [block.unshard(async_op=True) for block in model.blocks]
    assert all(isinstance(handle, fsdp.UnshardHandle) for handle in handles)
    for handle, block, wanted in zip(handles[:2], model.blocks, reference.blocks, strict=False):
        handle.wait()
        handle.wait()
        assert none_sharded(block)
        assert torch.equal(block.up.weight, wanted.up.weight)
    x = torch.randn(4, 8)
    with record_collectives() as record:
        close(run(model, x), reference(x), "output")
    assert gathers(record) == 1, record.kinds


@case(UNITS, "values written to the sharded parameter after `unshard()` are in the next gather")
def write_sharded(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    run(model).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    model.unshard()
    assert (model.head.weight == 0.25).all()
    model.reshard()


@case(
    UNITS,
    "collectives: a gather per unit in forward and per resharded unit in backward, a reduce-scatter per unit",
    note="parameters of any number",
)
def counts(fsdp):
    for reshard, forward, backward in ((None, 4, 3), (True, 4, 4), (False, 4, 0)):
        model = shard_stack(fsdp, seeded(Stack), reshard_after_forward=reshard)
        ahead, behind = forward_backward_kinds(model)
        assert ahead == ["all_gather"] * forward, (reshard, ahead)
        assert behind.count("all_gather") <= backward, (reshard, behind)
        assert behind.count("reduce_scatter") == 4, (reshard, behind)
        assert behind.count("all_reduce") <= 1, (reshard, behind)  # which parameters were used


@case(UNITS, "`set_modules_to_forward_prefetch`: gathers of the listed units begin before this one computes")
def forward_prefetch(fsdp):
    begun: dict = {}
    records: list = []

    class Spy(MLP):
        index: int

        def forward(self, x):
            begun[self.index] = gathers(records[-1])
            return super().forward(x)

    model: Any = stack_of(Spy)
    for i, spy in enumerate(model.blocks):
        spy.index = i
    shard_stack(fsdp, model)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    for step in range(3):
        with record_collectives() as record:
            records.append(record)
            out = run(model)
        assert gathers(record) == 4, (step, record.kinds)
        assert begun[0] == 4, (step, begun)
        out.sum().backward()


@case(
    UNITS, "`set_modules_to_backward_prefetch`: gathers of the listed units begin before this one's backward"
)
def backward_prefetch(fsdp):
    begun: dict = {}
    records: list = []

    class Spy(MLP):
        index: int

        def forward(self, x):
            hidden = torch.tanh(self.up(x))
            if hidden.requires_grad and records:
                hidden.register_hook(lambda gradient: begun.update({self.index: gathers(records[-1])}))
            return self.down(hidden)

    def build():
        model = stack_of(Spy)
        for i, spy in enumerate(model.blocks):
            spy.index = i
        return model

    def wrap(model):
        shard_stack(fsdp, model, reshard_after_forward=True)
        model.set_modules_to_backward_prefetch([model.blocks[2], model.blocks[1]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])

    model = check_training(build, wrap)
    for _ in range(2):
        records.append(None)
        out = run(model).sum()
        with record_collectives() as record:
            records.append(record)
            out.backward()
        assert gathers(record) <= 4, record.kinds
        assert begun[2] == gathers(record), (begun, record.kinds)
        assert record.kinds.count("reduce_scatter") == 4


@case(UNITS, "`set_unshard_in_backward(False)`: the unit is not gathered in backward")
def unshard_in_backward(fsdp):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.block = nn.Embedding(11, 8), MLP()

        def forward(self, x):
            return self.block(self.embed(x))

    model = seeded(Model)
    for part in (model.embed, model.block):
        fsdp.fully_shard(part, mesh=mesh())
    fsdp.fully_shard(model, mesh=mesh())
    model.embed.set_unshard_in_backward(False)
    x = torch.arange(8).view(2, 4)
    for _ in range(2):
        out = model(x).sum()
        with record_collectives() as record:
            out.backward()
        assert gathers(record) <= 1, record.kinds
        assert record.kinds.count("reduce_scatter") == 2
    assert model.embed.weight.grad is not None


def evaluated_after_a_backward(fsdp):
    """A sharded stack with gradients of one backward, then an evaluation; and the whole model it is equal to."""
    model, reference = pair(fsdp)
    backward_both(model, reference)
    with torch.no_grad():
        run(model)
    return model, reference


@case(
    UNITS, "after an evaluation `zero_grad` clears the root's gradients", fsdp2=Wrong(match="head.weight"), ours=None,
)  # fmt: skip
def zero_grad_after_evaluation(fsdp):
    model, reference = evaluated_after_a_backward(fsdp)
    for one in (model, reference):
        one.zero_grad()
    backward_both(model, reference, 1)
    close(full(model.head.weight.grad), reference.head.weight.grad, "head.weight")


@case(UNITS, "after an evaluation clipping sees the root's gradients", fsdp2=Wrong(match="norm"), ours=None)
def clip_after_evaluation(fsdp):
    model, reference = evaluated_after_a_backward(fsdp)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    close(full(norm), nn.utils.clip_grad_norm_(reference.parameters(), 1e-3), "norm")


@case(
    UNITS, "an optimizer that is built after an evaluation trains the root", fsdp2=Wrong(match="head.weight"),
    ours=None,
)  # fmt: skip
def optimizer_after_evaluation(fsdp):
    model, reference = evaluated_after_a_backward(fsdp)
    for one, x in inputs(model, reference, 1):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        one.zero_grad()
        mean_square(one, x).backward()
        optimizer.step()
    close(full(model.head.weight), reference.head.weight.detach(), "head.weight")
