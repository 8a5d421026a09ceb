"""torch, and trainers that ask torch's classes, see a sharded module; what they call has its effect."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from runtime_helpers import Body, assert_same_gradients, full, loss_of, plain_backward, seeded, shard, tokens
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_runtime import FSDPModule, UnshardHandle, fully_shard
from fsdp_runtime._module import _refuse_by_name
from ragged_shard.testing import on_ranks

NAMES = sorted(name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_"))


def test_every_public_method_of_torchs_class_is_ours_or_refused_by_name():
    deprecated = "set_reduce_scatter_divide_factor"  # torch's, which calls set_gradient_divide_factor
    for name in NAMES:
        if name == deprecated:
            continue
        assert getattr(FSDPModule, name) is not getattr(torch_fsdp.FSDPModule, name), name
        assert vars(FSDPModule)[name].__module__.startswith("fsdp_runtime"), name
    with pytest.raises(NotImplementedError, match=r"set_warp_drive does not apply: torch .* has it"):
        _refuse_by_name("set_warp_drive")(None, True)


@on_ranks(2)
def test_a_sharded_module_is_an_instance_of_torchs_class():
    model = shard(seeded())
    assert issubclass(type(model), torch_fsdp.FSDPModule)
    assert isinstance(model.blocks[0], (FSDPModule, torch_fsdp.FSDPModule))
    assert not isinstance(model.norm, torch_fsdp.FSDPModule)
    assert isinstance(model.unshard(async_op=True), torch_fsdp.UnshardHandle)
    assert issubclass(UnshardHandle, torch_fsdp.UnshardHandle)
    model.reshard()
    assert type(model).__mro__[1:4] == (FSDPModule, torch_fsdp.FSDPModule, Body)
    torchs: Any = torch_fsdp.fully_shard
    assert torchs.state(model) is not None
    assert torchs.state(model.norm) is None


@on_ranks(2)
def test_our_function_works_in_place_of_torchs_which_refuses_our_modules(monkeypatch):
    torchs: Any = torch_fsdp.fully_shard
    ours: Any = fully_shard
    monkeypatch.setattr(torch_fsdp, "fully_shard", fully_shard)
    model: Any = torch_fsdp.fully_shard(seeded())
    loss_of(model, tokens()).backward()
    assert ours.state(model) is torchs.state(model) is not None
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        torchs(model)


@on_ranks(2)
def test_torchs_own_functions_on_modules_work():
    class Two(Body):
        def again(self, batch):
            return self.forward(batch) * 2

    model = shard(seeded(Two))
    torch_fsdp.register_fsdp_forward_method(model, "again")
    torch_fsdp.share_comm_ctx([model, shard(seeded())])
    alone = seeded(Two)
    torch.testing.assert_close(model.again(tokens()), alone.again(tokens()))
    model.again(tokens()).sum().backward()
    assert model.head.weight.grad is not None


@on_ranks(2)
def test_replicate_around_sharded_children():
    """Composable DDP around a model of which one child is sharded: the rest is all-reduced, the child is not."""
    model, alone = seeded(), seeded()
    fully_shard(model.blocks[0])
    replicate(model)
    loss_of(model, tokens()).backward()
    assert_same_gradients(model, plain_backward(alone), atol=1e-7)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(model.blocks[0])


class Nested(nn.Module):
    """Methods that call each other, and use parameters after that."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        x = torch.tanh(self.last(x) * self.scale)
        return self.last(self.encode(x)) + self.first(x)

    def encode(self, x):
        return torch.tanh(self.first(x) * self.scale)


@on_ranks(2)
def test_a_unit_stays_gathered_until_its_outermost_method_has_ended():
    model, alone = (nn.Sequential(nn.Linear(4, 4), seeded(Nested)) for _ in range(2))
    model[0].load_state_dict(alone[0].state_dict())
    fully_shard(model[1])
    torch_fsdp.register_fsdp_forward_method(model[1], "encode")
    fully_shard(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), alone(x))
    for each in (model, alone):
        each(x).square().sum().backward()
    assert_same_gradients(model, alone)


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def backward_of(value, model):
    value.backward()
    return [p.grad for p in model.parameters()]


def squares(model, x):
    return model(x).square().sum()


TRANSFORMS = {
    "grad": lambda m, x, t: torch.func.grad(lambda y: squares(m, y))(x),
    "vjp": lambda m, x, t: torch.func.vjp(m, x)[1](t)[0],
    "jvp": lambda m, x, t: torch.func.jvp(m, (x,), (t,))[1],
    "vmap": lambda m, x, t: torch.func.vmap(m)(x),
    "jacrev": lambda m, x, t: torch.func.jacrev(m)(x),
    "jacfwd": lambda m, x, t: torch.func.jacfwd(m)(x),
    "hessian": lambda m, x, t: torch.func.hessian(lambda y: squares(m, y))(x),
    "jvp, backward of both": lambda m, x, t: backward_of(
        sum(v.square().sum() for v in torch.func.jvp(m, (x,), (t,))), m
    ),
    "jvp, backward of the tangent": lambda m, x, t: backward_of(
        torch.func.jvp(m, (x,), (t,))[1].square().sum(), m
    ),
    "grad, then a plain backward": lambda m, x, t: (
        torch.func.grad(lambda y: squares(m, y))(x),
        backward_of(squares(m, x), m),
    )[1],
}


@on_ranks(2)
def test_transforms_of_torch_func_pass_through_units():
    for what, transform in TRANSFORMS.items():
        torch.manual_seed(0)
        alone = Smooth()
        model = copy.deepcopy(alone)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        x, tangent = torch.randn(3, 4), torch.randn(3, 4)
        found, wanted = (transform(m, x, tangent) for m in (model, alone))
        for one, other in zip(*(v if isinstance(v, list) else [v] for v in (found, wanted)), strict=True):
            if other is None:
                assert one is None or not one.full_tensor().any(), what
            else:
                torch.testing.assert_close(full(one), other, msg=f"{what}: {{}}".format)


class Inside(nn.Module):
    """Calls a unit with other tensors."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        other: Any = {
            name: nn.Parameter(param.detach() + 1) for name, param in nn.Linear(4, 4).named_parameters()
        }
        return torch.func.functional_call(self.inner, other, x)


@on_ranks(2)
def test_functional_call_with_other_tensors_raises_and_leaves_the_weights():
    """Also with tensors that a transform differentiates by, and for a unit inside a forward."""
    model, alone, around = seeded(Smooth), seeded(Smooth), Inside()
    for unit in (model.layers[0], model, around.inner, around):
        fully_shard(unit)
    x, call = torch.randn(3, 4), torch.func.functional_call
    other = {name: param.detach() + 1 for name, param in alone.named_parameters()}
    refused: Any = pytest.raises(ValueError, match=r"parameter .*weight is a .*functional_call takes those")
    with refused:
        call(model, other, x)
    with refused:
        torch.func.grad(lambda params: call(model, params, x).sum())(other)
    with refused:
        around(x)
    torch.testing.assert_close(call(model, dict(model.named_parameters()), x), alone(x))


@on_ranks(2)
def test_compiled_autograd_is_refused_by_name():
    model = seeded()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    loss = loss_of(fully_shard(model), tokens())
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match=r"of Body under compiled autograd: .*Turn it off"),
    ):
        loss.backward()


class Scaled(nn.Module):
    """Keeps what a weight that tensor parallelism cuts was multiplied with, as its forward goes on."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.kept = mesh, torch.zeros(())
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))

    def forward(self, x):
        product: Any = DTensor.from_local(x, self.mesh, [Replicate()]) * self.weight
        self.kept = product.full_tensor()
        return self.kept * 2


@on_ranks(4)
def test_a_backward_that_reads_a_freed_weight_cut_by_tensor_parallelism_raises():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = fully_shard(Scaled(mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=True)
    model(torch.ones(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.kept.sum().backward()
