"""Hooks, gradients, attributes and containers of users work as in one process, or raise by name."""

import copy
import os
import re
import signal
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import assert_same_gradients, seeded
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.profiler import profile

import block_optim
from fsdp_runtime import fully_shard
from fsdp_runtime._torch.tree import cast_to, map_tensors, tensors_behind, tensors_in
from ragged_shard.testing import RankError, on_ranks, run_ranks


def batch(rank=None, rows=2, width=6):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


def backward_both(model, plain, loss=lambda each, x: each(x).square().sum()):
    """Backward of this rank's batch, and of the mean over all ranks' in one process."""
    ranks = dist.get_world_size()
    loss(model, batch()).backward()
    for rank in range(ranks):
        (loss(plain, batch(rank)) / ranks).backward()


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def sharded(make, *inner):
    model = seeded(make)
    for index in inner:
        fully_shard(model[index])
    return fully_shard(model), seeded(make)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x, both):
        return self.always(x) + (self.sometimes(x) if both else 0)


def communicates_in_hooks(folder, kind):
    """Rank 1 has no gradient for one parameter; each rank notes its error and ends, as a script does."""
    model = fully_shard(seeded(Branches))

    def hook(param):
        if kind == "norm":
            param.grad.norm().item()
        else:
            block_optim.Muon([param], lr=0.1).step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    try:
        model(torch.ones(2, 6), dist.get_rank() != 1).sum().backward()
    except RuntimeError as error:
        (folder / str(dist.get_rank())).write_text(str(error))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["norm", "Muon"])
def test_hooks_that_communicate_raise_where_ranks_call_them_in_another_order(tmp_path, kind):
    with pytest.raises(RankError):
        run_ranks(3, communicates_in_hooks, tmp_path, kind)
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert re.search(r"sometimes\.weight.*set_reduce_scatter_unused_params\(True\)", texts[1])


@on_ranks(3)
def test_the_remedy_for_hooks_that_communicate_gives_each_the_gradient_of_one_process():
    model, plain = fully_shard(seeded(Branches)), seeded(Branches)
    model.set_reduce_scatter_unused_params(True)
    seen = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.norm().item()))
    model(batch(), dist.get_rank() != 1).square().sum().backward()
    for rank in range(3):
        (plain(batch(rank), rank != 1).square().sum() / 3).backward()
    assert_same_gradients(model, plain)
    assert seen == pytest.approx([param.grad.norm().item() for param in plain.parameters()], rel=1e-5)


@on_ranks(2)
def test_a_hook_on_a_parameter_that_returns_another_shape_raises_by_name():
    model, _ = sharded(mlp)
    model[0].weight.register_hook(lambda grad: torch.ones(2))
    with pytest.raises(
        RuntimeError, match=r"0\.weight.*returned \(2,\); expected None or a tensor of shape \(5, 6\)"
    ):
        model(batch()).sum().backward()


@on_ranks(2)
def test_autograd_grad_of_parameters_that_are_gathered_raises_with_the_remedy():
    model, plain = sharded(mlp, 0)
    loss = model(batch()).square().sum()
    with pytest.raises(NotImplementedError, match=r"2\.weight.*loss\.backward\(\) and read `\.grad`"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    model.reset_iter_state()
    backward_both(model, plain)
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_a_unit_of_which_one_module_was_converted_raises_in_the_next_forward():
    model = seeded(mlp)
    fully_shard([model[0], model[2]])
    model[0].to(torch.float64)
    with pytest.raises(ValueError, match=r"different dtypes.*convert all of them"):
        model[0](batch().double())


@on_ranks(2)
def test_a_second_backward_raises_where_a_step_has_changed_the_parameters_in_between():
    model, _ = sharded(mlp, 0, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).square().sum().backward()
    x = batch().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"were changed between a backward.*Call optimizer\.step\(\) after both"
    ):
        grad.square().sum().backward()
    model.reset_iter_state()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.other, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.other(self.block(x)))


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_what_was_unsharded_by_hand_stays_so_in_a_forward_with_gradients_until_reshard(reshard):
    model, plain = seeded(Inner), seeded(Inner)
    fully_shard(model.block, reshard_after_forward=reshard)
    fully_shard(model.other, reshard_after_forward=reshard)
    fully_shard(model)
    model.unshard()
    model.other.unshard()
    for _ in range(2):  # after the first, its graph is gone
        out = model.block(batch())
        assert torch.equal(model.norm(model.other.forward(out)), plain(batch()))
        del out
    model.reshard()
    assert hasattr(model.norm.weight, "full_tensor")
    assert torch.equal(model(batch()), plain(batch()))


@dataclass
class Late:
    """Fields that the constructor does not take, one of which is set later."""

    x: torch.Tensor
    doubled: torch.Tensor = field(init=False)
    mask: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self):
        self.doubled = self.x * 2


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    late: Late


class Shares(dict):
    """A mapping whose copies share what they hold."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def items(self):
        return self.held.items()

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value


@pytest.mark.parametrize(
    "tree", [MappingProxyType({"x": torch.ones(2)}), Shares({"x": torch.ones(2)})], ids=type
)
def test_a_container_that_cannot_be_copied_is_refused_by_class_and_not_changed(tree):
    with pytest.raises(TypeError, match=rf"{type(tree).__qualname__}.*tuple, a dict or a dataclass"):
        map_tensors(lambda t: t + 1, tree)
    assert torch.equal(tree["x"], torch.ones(2))
    assert map_tensors(lambda t: t, tree) is tree


class Batch(dict):
    """A dictionary with a constructor of its own, whose items are attributes too."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


def test_both_walks_come_to_the_same_tensors_and_classes_are_kept():
    x, late = torch.ones(2), Late(torch.ones(2))
    late.mask = torch.zeros(2)
    tree = [Frozen(x, late), {"x": (x,)}, OrderedDict(a=x), Batch(k=x), UserDict(data=x), None, "s"]
    found = map_tensors(lambda t: t + 1, tree)
    assert [t.tolist() for t in tensors_in(found)] == [
        [t + 1 for t in one.tolist()] for one in tensors_in(tree)
    ]
    assert len(tensors_in(tree)) == 8
    assert [type(item) for item in found] == [type(item) for item in tree]
    assert found[3].k is found[3]["k"]
    assert list(found[4]) == ["data"]  # whose attribute `data` is not the item
    assert copy.copy(found[0].late).mask.tolist() == [1, 1]


def test_floating_point_tensors_alone_are_cast():
    mixed = [torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)]
    cast = map_tensors(cast_to(torch.bfloat16), mixed)
    assert [t.dtype for t in cast] == [torch.bfloat16, torch.int64, torch.bool]
    assert map_tensors(cast_to(None), mixed) is mixed


class Holder:
    """An object that is no container."""

    def __init__(self, value):
        self.inner = {"value": value}


class Lists(nn.Module):
    """Returns many values that are no tensors, before one that is."""

    def __init__(self):
        super().__init__()
        self.layer = mlp()

    def forward(self, x):
        return {"ids": [float(number) for number in range(2000)], "x": self.layer(x)}


@on_ranks(2)
def test_a_tensor_behind_thousands_of_other_values_is_marked():
    model, plain = sharded(lambda: nn.Sequential(Lists()), 0)
    backward_both(model, plain, lambda each, x: each(x)["x"].square().sum())
    assert_same_gradients(model, plain)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, cache):
        cache.inner["value"].append(self.key(x))
        return self.out(x).tanh() * cache.inner["value"][-1] + x, cache


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        cache = Holder([])
        for layer in self.layers:
            x, cache = layer(x, cache)
        return x


@on_ranks(2)
def test_units_that_pass_on_a_cache_are_gathered_once_a_backward():
    model, plain = seeded(Layers), seeded(Layers)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    backward_both(model, plain)
    assert_same_gradients(model, plain)
    out = model(batch()).square().sum()
    with profile(record_shapes=False) as recorded:
        out.backward()
    gathered = [event.name for event in recorded.events() if event.name.startswith("FSDP::all_gather (")]
    assert sorted(gathered) == [f"FSDP::all_gather (layers.{index})" for index in range(4)]


class Scaled(NamedTuple("Scaled", [("x", torch.Tensor), ("factor", int)])):
    """Its constructor changes values, and it has attributes."""

    def __new__(cls, x, factor):
        return super().__new__(cls, x * factor, factor)


def test_a_tuple_of_a_users_class_is_copied_without_its_constructor_and_with_its_attributes():
    scaled: Any = Scaled(torch.ones(1), 2)
    scaled.note = "kept"
    copied = map_tensors(lambda t: t + 1, scaled)
    assert (type(copied), copied.x.item(), copied.note) == (Scaled, 3, "kept")


class Lazy:
    """Refuses attributes that are not set, with an error of its own."""

    __slots__ = ("__hidden", "missing")

    def __init__(self, value):
        self.__hidden = value

    def __getattr__(self, name):
        raise KeyError(name)


def test_attributes_are_found_without_running_a_users_code():
    (tensor,) = tensors_behind([Lazy(torch.ones(3))])
    assert tensor.shape == (3,)


def test_batch_sizes_of_a_packed_sequence_stay_where_they_are():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    moved = map_tensors(lambda t: t.to("meta"), packed)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


@dataclass
class Single:
    """Its copies are itself."""

    x: torch.Tensor

    def __copy__(self):
        return self


def test_an_object_that_copies_to_itself_is_refused_and_not_changed():
    single = Single(torch.ones(1))
    with pytest.raises(TypeError, match=r"Single holds tensors"):
        map_tensors(lambda t: t + 1, single)
    assert single.x.item() == 1
