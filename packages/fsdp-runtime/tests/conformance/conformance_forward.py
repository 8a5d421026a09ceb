"""Cases: forward and backward, whatever their shape and order."""

import dataclasses

import torch
import torch.nn as nn
from conformance_models import (
    MLP,
    Stack,
    all_sharded,
    assert_same,
    assert_same_gradients,
    batch,
    check_backward,
    check_training,
    close,
    inputs,
    is_sharded,
    mean_square,
    mesh,
    mine,
    pair,
    seeded,
    shard_stack,
    world,
)
from conformance_registry import Raises, case, refusal

FORWARD = "Forward and backward"


def run(model, x=None):
    return model(torch.randn(4, 8) if x is None else x)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict


@case(FORWARD, "several forwards before one backward", ranks=3)
def several_forwards(fsdp):
    def loss(model, x):
        first, second = x.chunk(2)
        return (model(first) - model(second)).square().mean()

    model, reference = pair(fsdp)
    for step in range(3):
        whole = batch(step)
        loss(model, mine(whole)).backward()
        (sum(loss(reference, part) for part in whole.chunk(world())) / world()).backward()
        assert_same_gradients(model, reference)
        for one in (model, reference):
            one.zero_grad()


@case(FORWARD, "a nested unit's forward trains it alone once the root has run")
def not_the_root(fsdp):
    model, reference = pair(fsdp)
    run(model).sum().backward()
    model.zero_grad()
    check_backward(model.blocks[1], reference.blocks[1])
    assert all(p.grad is None for p in model.blocks[0].parameters())
    assert all_sharded(model.blocks[0])


@case(
    FORWARD, "forward of a nested unit before the root's first forward", fsdp2=Raises(RuntimeError, "root"),
    ours=None, note="order does not matter",
)  # fmt: skip
def nested_first(fsdp):
    model, reference = pair(fsdp)
    for one, x in inputs(model, reference):
        mean_square(one.blocks[1], x).backward()
        mean_square(one, x).backward()
    assert_same_gradients(model, reference)


@case(FORWARD, "evaluation: the same output, sharded after it; training continues")
def evaluation(fsdp):
    model, reference = pair(fsdp)
    x = torch.randn(4, 8)
    for _ in range(2):
        with torch.no_grad():
            close(run(model, x), reference(x), "no_grad")
        assert all_sharded(model.blocks)
        with torch.inference_mode():
            close(run(model, x), reference(x), "inference_mode")
        for one in (model, reference):
            mean_square(one, x).backward()
        assert_same_gradients(model, reference)


@case(FORWARD, "inputs get gradients; outputs may go unused")
def input_gradients(fsdp):
    class Pair(Stack):
        def forward(self, x):
            return super().forward(x), self.blocks[0](x)

    model, reference = pair(fsdp, Pair)
    x = torch.randn(4, 8)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(a)[0].square().sum().backward()
    reference(b)[0].square().sum().backward()
    close(a.grad, b.grad, "input gradient")
    assert_same_gradients(model, reference)


@case(FORWARD, "outputs in a dict, tuple or dataclass; inputs by keyword")
def structures(fsdp):
    class Rich(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = MLP(), MLP()

        def forward(self, *, x, flag=None):
            hidden = self.a(x)
            return Output(hidden, {"logits": (self.b(hidden), None, 3), "flag": flag})

    class Block(MLP):
        def forward(self, pair):
            return {"y": super().forward(pair["x"]), "n": None}

    model, reference = seeded(Rich), seeded(Rich)
    for part in (model.a, model.b):
        fsdp.fully_shard(part, mesh=mesh())
    fsdp.fully_shard(model, mesh=mesh())
    for one, x in inputs(model, reference):
        out = one(x=x, flag="on")
        assert out.extra["flag"] == "on"
        assert out.extra["logits"][1:] == (None, 3)
        out.extra["logits"][0].square().mean().backward()
    assert_same_gradients(model, reference)
    block = fsdp.fully_shard(seeded(Block), mesh=mesh())
    block({"x": torch.randn(2, 8)})["y"].sum().backward()
    assert block.up.weight.grad is not None


@case(FORWARD, "`backward` twice through one graph (`retain_graph=True`) adds up")
def backward_twice(fsdp):
    model, reference = pair(fsdp)
    for one, x in inputs(model, reference):
        loss = mean_square(one, x)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, reference)


@case(FORWARD, "forward hooks that a user registered see full parameters")
def user_hooks(fsdp):
    seen = []
    model = seeded(MLP)
    model.register_forward_pre_hook(lambda m, a: seen.append(is_sharded(m.up.weight)))
    fsdp.fully_shard(model, mesh=mesh(), reshard_after_forward=True)
    model.up.register_forward_hook(lambda m, a, o: seen.append(is_sharded(m.weight)))
    run(model)
    assert seen == [False, False]


@case(FORWARD, "`register_fsdp_forward_method`: another method gathers, trains and frees like forward")
def forward_method(fsdp):
    class Model(Stack):
        def encode(self, x, scale=1.0):
            for block in self.blocks:
                x = x + scale * block.encode(x)
            return self.head(x)

    class Block(MLP):
        def encode(self, x):
            return torch.sigmoid(self.down(self.up(x)))

    def build():
        model = Model()
        for i in range(3):
            model.blocks[i] = Block()
        return model

    model, reference = pair(fsdp, build)
    for part in (*model.blocks, model):
        fsdp.register_fsdp_forward_method(part, "encode")
    for _ in range(2):
        for one, x in inputs(model, reference):
            out = one.encode(x, scale=0.5)
            assert all_sharded(model.blocks)
            out.square().mean().backward()
        assert_same_gradients(model, reference)
    plain = MLP()
    fsdp.register_fsdp_forward_method(plain, "no_such_method")  # of a plain module: nothing
    assert not hasattr(plain, "no_such_method")


refusal(
    FORWARD, "`register_fsdp_forward_method` of a method that is not there",
    lambda fsdp: fsdp.register_fsdp_forward_method(fsdp.fully_shard(MLP(), mesh=mesh()), "nothere"),
    Raises(ValueError, "nothere"),
)  # fmt: skip
refusal(
    FORWARD, "sharded parameters outside forward and registered methods",
    lambda fsdp: torch.mm(torch.randn(2, 8), fsdp.fully_shard(MLP(), mesh=mesh()).up.weight.t()),
    Raises(RuntimeError, "mixed torch.Tensor and DTensor"), Raises(NotImplementedError, "full_tensor"),
)  # fmt: skip


@case(FORWARD, "the order of units changes between steps, and a unit is called twice in a forward", ranks=3)
def changing_order(fsdp):
    class Ordered(Stack):
        order = (0, 1, 2)

        def forward(self, x):
            for i in self.order:
                x = x + self.blocks[i](x)
            return self.head(x)

    for reshard in (True, False):
        model, reference = pair(fsdp, Ordered, reshard_after_forward=reshard)
        for step, order in enumerate([(0, 1, 2, 0), (0, 1, 2, 0), (2, 0, 1), (1,), (2, 2, 1, 0), (0, 1, 2)]):
            for one, x in inputs(model, reference, step):
                one.order = order
                one.zero_grad()
                mean_square(one, x).backward()
            assert_same_gradients(model, reference)
        assert_same(model, reference)


@case(FORWARD, "`autograd.grad` with respect to the input alone, then a normal step")
def input_gradient_alone(fsdp):
    model, reference = pair(fsdp)
    x = torch.randn(4, 8)
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    (a,) = torch.autograd.grad(model(found).square().sum(), found)
    (b,) = torch.autograd.grad(reference(wanted).square().sum(), wanted)
    close(a, b, "input gradient")
    model.zero_grad()
    check_backward(model, reference)


@case(FORWARD, "full backward hooks of units and inner modules get the right gradients")
def backward_hooks(fsdp):
    model, reference = pair(fsdp)
    seen: dict = {model: [], reference: []}
    for one in (model, reference):
        for part in (one.blocks[1], one.blocks[1].up, one.head):
            part.register_full_backward_hook(lambda m, gi, go, one=one: seen[one].append(go[0].clone()))
    x = torch.randn(4, 8)
    for one in (model, reference):
        mean_square(one, x).backward()
    assert len(seen[model]) == len(seen[reference]) == 3
    for found, wanted in zip(seen[model], seen[reference], strict=True):
        close(found, wanted, "gradient in a hook")


@case(FORWARD, "units of one model on different meshes", ranks=4)
def several_meshes(fsdp):
    def wrap(model):
        fsdp.fully_shard(model.blocks[0], mesh=mesh(2, 2, names=("r", "s")))
        fsdp.fully_shard(model.blocks[1], mesh=mesh())
        fsdp.fully_shard(model.blocks[2], mesh=mesh(4, 1, names=("r", "s")))
        fsdp.fully_shard(model, mesh=mesh(1, 4, names=("r", "s")))

    check_training(Stack, wrap)


@case(FORWARD, "two models on two halves of the ranks", ranks=4)
def halves(fsdp):
    over = mesh(2, 2, names=("pipeline", "data"))
    stage = over.get_local_rank("pipeline")
    model, reference = seeded(Stack, stage), seeded(Stack, stage)
    shard_stack(fsdp, model, mesh=over["data"])
    whole = batch(stage, rows=2)[:4]
    mean_square(model, whole.chunk(2)[over.get_local_rank("data")]).backward()
    mean_square(reference, whole).backward()
    assert_same_gradients(model, reference)


@case(FORWARD, "a world of one rank: no collectives, the same training", ranks=1)
def one_rank(fsdp):
    for reshard in (True, False, None):
        check_training(Stack, lambda model, r=reshard: shard_stack(fsdp, model, reshard_after_forward=r))


@case(FORWARD, "`no_grad` forwards before the trained one, and between it and backward")
def evaluation_between(fsdp):
    model, reference = pair(fsdp)
    for one, x in inputs(model, reference):
        with torch.no_grad():
            target = one(x)
        loss = (one(x) - 0.5 * target).square().mean()
        with torch.no_grad():
            one(x + 1)
        loss.backward()
    assert_same_gradients(model, reference)


@dataclasses.dataclass
class Derived:
    """A field that the constructor does not take."""

    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.doubled = self.x * 2


@case(
    FORWARD, "arguments in a dataclass with `field(init=False)`", ours=None, fsdp2=Raises(ValueError, "init=False")
)  # fmt: skip
def derived_fields(fsdp):
    class Takes(MLP):
        def forward(self, item):
            return super().forward(item.x + item.doubled)

    model, reference = fsdp.fully_shard(seeded(Takes), mesh=mesh()), seeded(Takes)
    for one, x in inputs(model, reference, 0):
        one(Derived(x.clone().requires_grad_())).square().mean().backward()
    assert_same_gradients(model, reference)


class Forces(nn.Module):
    """A gradient of its input is taken inside its forward, and used with its own parameters."""

    def __init__(self):
        super().__init__()
        self.energy, self.last = MLP(), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x):
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.last(force * self.scale)


@case(
    FORWARD, "a gradient inside a forward (force fields)", ours=None, fsdp2=Raises(RuntimeError, "mixed torch.Tensor")
)  # fmt: skip
def forces(fsdp):
    model, reference = seeded(Forces), seeded(Forces)
    for each in (model.energy, model.last, model):
        fsdp.fully_shard(each, mesh=mesh())
    check_backward(model, reference)


@case(
    FORWARD, "a penalty on the gradient of the inputs (`create_graph=True`)", ours=None,
    fsdp2=Raises(RuntimeError, "storage of size 0"),
)  # fmt: skip
def penalty(fsdp):
    model, reference = pair(fsdp)
    for one, x in inputs(model, reference, 0):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        grad.square().mean().backward()
    assert_same_gradients(model, reference)
