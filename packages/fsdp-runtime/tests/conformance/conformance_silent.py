"""Cases: what FSDP2 gets wrong without an error, from public reports. Here each is right, or an error that says so."""

import contextlib

import torch
from conformance_failure import Fragile
from conformance_models import (
    MLP,
    Stack,
    assert_same,
    assert_same_gradients,
    batch,
    check_backward,
    close,
    full,
    mean_square,
    mesh,
    mine,
    pair,
    seeded,
    shard_stack,
)
from conformance_registry import Raises, Wrong, case
from torch import nn
from torch.utils.checkpoint import checkpoint

SILENT = "Wrong without an error in FSDP2"


@case(SILENT, "figures of gradients for a log: norms, means, largest elements", fsdp2=Wrong(), ours=None)
def figures(fsdp):
    model, reference = pair(fsdp)
    check_backward(model, reference)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        for figure in (torch.norm, torch.mean, lambda grad: grad.abs().max(), lambda grad: grad.pow(2).sum()):
            close(torch.tensor(float(figure(found.grad))), figure(wanted.grad), "a figure of a gradient")


@case(
    SILENT, "initialization after sharding, with one seed on all ranks", fsdp2=Wrong(), ours=None,
    note="on CPU: after a warning, rows repeat from rank to rank in FSDP2",
)  # fmt: skip
def initialized_late(fsdp):
    model, reference = fsdp.fully_shard(seeded(MLP), mesh=mesh()), seeded(MLP)
    for each in (model, reference):
        torch.manual_seed(7)
        nn.init.normal_(each.up.weight)
        nn.init.xavier_uniform_(each.down.weight)
    assert full(model.up.weight).equal(reference.up.weight)
    assert full(model.down.weight).equal(reference.down.weight)


@case(
    SILENT, "an edit of a weight between `unshard()` and `reshard()`", fsdp2=Wrong(),
    ours=Raises(RuntimeError, "changed in place.*full_params"), better="FSDP2 loses the edit",
)  # fmt: skip
def edited_while_gathered(fsdp):
    model = fsdp.fully_shard(seeded(MLP), mesh=mesh())
    model.unshard()
    with torch.no_grad():
        model.up.weight.zero_()
    model.reshard()
    assert not full(model.up.weight).any()


@case(SILENT, "an edit of a few rows of a sharded weight", fsdp2=Wrong(), ours=None)
def edited_rows(fsdp):
    model, reference = fsdp.fully_shard(seeded(MLP), mesh=mesh()), seeded(MLP)
    with torch.no_grad():
        for each in (model, reference):
            each.up.weight[2].zero_()
            each.up.weight[3:5].fill_(1.5)
    assert full(model.up.weight).equal(reference.up.weight)


class Views(Stack):
    """Blocks under reentrant checkpoints."""

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@case(SILENT, "two forwards before one backward, with reentrant checkpoints", fsdp2=Wrong(), ours=None)
def two_views(fsdp):
    model, reference = pair(fsdp, Views)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for each, rows in ((model, mine), (reference, lambda whole: whole)):
        sum(mean_square(each, rows(batch(step)).requires_grad_()) for step in range(2)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same(model, reference)


@case(SILENT, "a step that failed in backward, tried again with half batches", fsdp2=Wrong(), ours=None)
def tried_again(fsdp):
    model, reference = pair(fsdp, Fragile)
    model.fail = "backward"
    with contextlib.suppress(ValueError):
        mean_square(model, mine(batch())).backward()
    model.zero_grad()
    model.fail = None
    for half in mine(batch()).chunk(2):
        (mean_square(model, half) / 2).backward()
    mean_square(reference, batch()).backward()
    assert_same_gradients(model, reference)


@case(
    SILENT, "ranks that built the model from different seeds", fsdp2=Wrong(),
    ours=Raises(RuntimeError, "different values of.*manual_seed"),
    better="in the first forward; FSDP2 trains a mixture of the models",
)  # fmt: skip
def other_seeds(fsdp):
    rank = torch.distributed.get_rank()
    model = shard_stack(fsdp, seeded(Stack, seed=rank))
    model(mine(batch()))
    assert full(model.head.weight).equal(seeded(Stack).head.weight)


class Rotary(nn.Module):
    """Its table is in no state dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x):
        return self.linear(x * self.table)


@case(
    SILENT, "buffers that no state dict has, after `to_empty`", fsdp2=Wrong(),
    ours=Raises(RuntimeError, "table.*without values since to_empty"),
    better="in the first forward, by name; FSDP2 computes with what was in memory",
)  # fmt: skip
def empty_buffers(fsdp):
    with torch.device("meta"):
        model = Rotary()
    model = fsdp.fully_shard(model, mesh=mesh())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    model(torch.ones(2, 8))
    assert model.table.equal(torch.arange(8.0))


class Chunked(Stack):
    """Computes with the weight of a module that it does not call."""

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        weight = self.blocks[0].down.weight
        return x @ (weight.full_tensor() if hasattr(weight, "full_tensor") else weight)


@case(
    SILENT, "`full_tensor()` of another unit's weight in a forward", fsdp2=Wrong(),
    ours=Raises(RuntimeError, "full_tensor.*would get its own batch's gradient only"),
    better="with remedies; FSDP2 reduces no such gradient",
)  # fmt: skip
def weight_of_another_unit(fsdp):
    model, reference = pair(fsdp, Chunked)
    check_backward(model, reference)


@case(
    SILENT, "`register_hook` on a parameter, before and after `fully_shard`", fsdp2=Wrong(), ours=None,
    note="the hook gets the reduced gradient, and its result takes that one's place; in FSDP2 it never runs",
)  # fmt: skip
def hooked_parameters(fsdp):
    model, reference = seeded(MLP), seeded(MLP)
    for each in (model, reference):
        each.up.weight.register_hook(lambda grad: grad * 0.5)
    fsdp.fully_shard(model, mesh=mesh())
    for each in (model, reference):
        each.down.weight.register_hook(lambda grad: grad * 2)
    check_backward(model, reference)


@case(
    SILENT,
    "`register_post_accumulate_grad_hook` on a parameter before `fully_shard`",
    fsdp2=Wrong(),
    ours=None,
)
def hooked_before(fsdp):
    model = seeded(MLP)
    called: list[torch.Tensor] = []
    model.up.weight.register_post_accumulate_grad_hook(called.append)
    fsdp.fully_shard(model, mesh=mesh())
    mean_square(model, mine(batch())).backward()
    assert len(called) == 1
