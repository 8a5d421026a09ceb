"""Cases: parameters of every kind that a model may have."""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from conformance_models import (
    MLP,
    Stack,
    Tied,
    assert_same_gradients,
    check_backward,
    check_training,
    cross_entropy,
    full,
    is_sharded,
    mesh,
    pair,
    seeded,
    shard_stack,
    tokens,
    world,
)
from conformance_registry import Raises, case

from ragged_shard.testing import record_collectives

PARAMETERS = "Parameters"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MLP()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.scale * self.inner(x)


class Experts(nn.Module):
    """Stacked 3-D weights; each row of the batch goes to one expert."""

    def __init__(self, experts: int = 3, width: int = 8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, 5) / 3)
        self.back = nn.Parameter(torch.randn(experts, 5, width) / 3)

    def forward(self, x):
        which = torch.arange(x.shape[0]) % self.weight.shape[0]
        return torch.bmm(torch.tanh(torch.bmm(x.unsqueeze(1), self.weight[which])), self.back[which]).squeeze(
            1
        )


class Branches(nn.Module):
    """Two paths; which one is used is the caller's choice."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = MLP(), MLP(), nn.Linear(8, 3)

    def forward(self, x, right: bool = False):
        return self.head(self.right(x) if right else self.left(x))


def shard_branches(fsdp, model):
    for part in (model.left, model.right):
        fsdp.fully_shard(part, mesh=mesh())
    fsdp.fully_shard(model, mesh=mesh())


@case(
    PARAMETERS, "parameters tied inside a unit, also a unit of a list of modules, train as one", ranks=3,
)  # fmt: skip
def tied(fsdp):
    def wrap(model, both):
        fsdp.fully_shard(model.block, mesh=mesh())
        if both:
            fsdp.fully_shard([model.embed, model.output], mesh=mesh(), reshard_after_forward=False)
        fsdp.fully_shard(model, mesh=mesh())

    for both in (False, True):
        model = check_training(Tied, partial(wrap, both=both), loss=cross_entropy, batches=tokens)
        assert model.output.weight is model.embed.weight
        assert len(list(model.parameters())) == 5


@case(PARAMETERS, "a parameter tied across two units", fsdp2=Raises(ValueError, "shared"), ours=None, ranks=3)
def tied_across_units(fsdp):
    def wrap(model):
        for part in (model.embed, model.output, model):
            fsdp.fully_shard(part, mesh=mesh())

    check_training(Tied, wrap, loss=cross_entropy, batches=tokens)


@case(PARAMETERS, "a module that is registered twice is one module", ranks=3)
def shared_module(fsdp):
    def build():
        block = MLP()
        return nn.Sequential(block, nn.Tanh(), block)

    def wrap(model):
        fsdp.fully_shard(model[0], mesh=mesh())
        fsdp.fully_shard(model, mesh=mesh())

    check_training(build, wrap)


@case(PARAMETERS, "a 0-d parameter", fsdp2=Raises(ValueError, "scalar"), ours=None)
def scalar(fsdp):
    check_training(Scaled, lambda model: fsdp.fully_shard(model, mesh=mesh()))


@case(
    PARAMETERS, "a parameter that is not contiguous", fsdp2=Raises(NotImplementedError, "non-contiguous"), ours=None,
)  # fmt: skip
def not_contiguous(fsdp):
    def build():
        model = MLP()
        model.up.weight = nn.Parameter(torch.randn(8, 13).t())
        return model

    check_training(build, lambda model: fsdp.fully_shard(model, mesh=mesh()))


@case(
    PARAMETERS, "parameters of several dtypes in a unit", fsdp2=Raises(AssertionError, "dtype"), ours=None,
    note="each keeps its dtype",
)  # fmt: skip
def mixed_dtypes(fsdp):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(8, 6, dtype=torch.bfloat16), nn.Linear(6, 5)

        def forward(self, x):
            return self.high(self.low(x.bfloat16()).float())

    model, reference = seeded(Mixed), seeded(Mixed)
    fsdp.fully_shard(model, mesh=mesh())
    x = torch.randn(4, 8)
    assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    reference(x).sum().backward()
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert found.dtype == found.grad.dtype == wanted.dtype
        assert torch.equal(full(found.grad), wanted.grad)


@case(
    PARAMETERS,
    "odd shapes, convolutions with a norm, fewer rows than ranks; everything sharded is contiguous",
    ranks=4,
)
def shapes(fsdp):
    def rows(step):
        return torch.randn(12, 15, generator=torch.Generator().manual_seed(step))

    few = lambda: nn.Sequential(nn.Linear(15, 1), nn.Linear(1, 3, bias=False), nn.Linear(3, 2))  # noqa: E731
    odd = lambda: nn.Sequential(nn.Linear(15, 16), nn.Linear(16, 7), nn.Linear(7, 17), nn.Linear(17, 3))  # noqa: E731
    images = lambda: nn.Sequential(  # noqa: E731
        nn.Unflatten(1, (1, 3, 5)), nn.Conv2d(1, 5, 3), nn.GroupNorm(1, 5), nn.Tanh(), nn.Conv2d(5, 2, (1, 2))
    )

    def wrap(model):
        for layer in model:
            fsdp.fully_shard(layer, mesh=mesh())
        fsdp.fully_shard(model, mesh=mesh())

    for build, unit in ((few, partial(fsdp.fully_shard, mesh=mesh())), (odd, wrap), (images, wrap)):
        model = check_training(build, unit, batches=rows)
        model(rows(0)).sum().backward()
        for p in model.parameters():
            assert p.is_contiguous()
            assert p.to_local().is_contiguous()
            assert p.grad.to_local().is_contiguous()


@case(PARAMETERS, "stacked experts: 3-D weights with fewer experts than ranks", ranks=4)
def experts(fsdp):
    def wrap(model):
        fsdp.fully_shard(model[1], mesh=mesh())
        fsdp.fully_shard(model, mesh=mesh())

    def batches(
        step,
    ):  # rows per rank: a multiple of the experts, so that each row meets the same one everywhere
        return torch.randn(3 * world(), 8, generator=torch.Generator().manual_seed(step))

    check_training(lambda: nn.Sequential(nn.Linear(8, 8), Experts()), wrap, batches=batches)


@case(PARAMETERS, "frozen parameters among trained ones; a frozen unit reduces nothing")
def frozen(fsdp):
    def build():
        model = Stack()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.weight.requires_grad_(False)
        return model

    model = check_training(build, lambda model: shard_stack(fsdp, model))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in build().parameters()]
    out = model(torch.randn(4, 8)).sum()
    with record_collectives() as record:
        out.backward()
    assert record.kinds.count("reduce_scatter") == 3, record.kinds


@case(PARAMETERS, "parameters frozen and thawed after wrapping")
def frozen_later(fsdp):
    model, reference = pair(fsdp)
    for frozen in (True, False):
        for one in (model, reference):
            one.zero_grad()
            one.blocks[1].requires_grad_(not frozen)
        check_backward(model, reference)


@case(PARAMETERS, "parameters that a step does not use get no gradient, whole units or one of a unit")
def unused(fsdp):
    def loss(model, x):
        return model(x, right=bool(x.shape[0] > 100)).square().mean()

    model = check_training(Branches, lambda model: shard_branches(fsdp, model), loss=loss)
    assert all(p.grad is None for p in model.right.parameters())
    model(torch.randn(4, 8), right=True).sum().backward()
    assert all(p.grad is None for p in model.left.parameters())
    assert all(p.grad is not None for p in model.right.parameters())
    model = check_training(Branches, lambda model: fsdp.fully_shard(model, mesh=mesh()), loss=loss)
    model(torch.randn(4, 8)).sum().backward()
    assert all(p.grad is None for p in model.right.parameters())
    assert all(p.grad is not None for p in model.left.parameters())


@case(PARAMETERS, "`set_reduce_scatter_unused_params(True)`: ranks may use different parameters in a step")
def unused_on_some_ranks(fsdp):
    model, reference = fsdp.fully_shard(seeded(Branches), mesh=mesh()), seeded(Branches)
    model.set_reduce_scatter_unused_params(True)
    x = torch.randn(4, 8)
    for _ in range(2):
        model(x, right=torch.distributed.get_rank() == 1).sum().backward()
        for rank in range(world()):
            (reference(x, right=rank == 1).sum() / world()).backward()
        assert_same_gradients(model, reference)


@case(PARAMETERS, "in forward, parameters are plain `nn.Parameter`s of the full shape")
def unsharded_type(fsdp):
    kinds: list = []

    class Spy(MLP):
        def forward(self, x):
            kinds.extend(
                (type(p), p.shape, p.requires_grad, p.is_leaf, is_sharded(p)) for p in self.parameters()
            )
            return super().forward(x)

    model = fsdp.fully_shard(Spy(), mesh=mesh())
    model(torch.randn(2, 8))
    wanted = [(nn.Parameter, p.shape, True, True, False) for p in MLP().parameters()]
    assert kinds == wanted, kinds


@case(
    PARAMETERS,
    "a sparse embedding gradient",
    fsdp2=Raises(NotImplementedError, "chunk_cat|as_strided"),
    ours=None,
)
def sparse(fsdp):
    model, reference = (seeded(lambda: nn.Embedding(11, 4, sparse=True)) for _ in range(2))
    fsdp.fully_shard(model, mesh=mesh())
    F.mse_loss(model(torch.arange(5)), torch.zeros(5, 4)).backward()
    F.mse_loss(reference(torch.arange(5)), torch.zeros(5, 4)).backward()
    assert torch.equal(full(model.weight.grad), reference.weight.grad.to_dense())
