"""What units are made of: block policies, groups, meshes, and refusals that change nothing."""

import pickle
from functools import partial

import pytest
import torch
from runtime_helpers import (
    TwoLayers,
    assert_same_gradients,
    assert_same_parameters,
    locals_of,
    loss_of,
    plain_backward,
    same_bits,
    seeded,
    shard,
    shard_with_tensor_parallelism,
    step_of,
    tokens,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layout_planner
from fsdp_runtime import block_policies, fully_shard
from fsdp_runtime import block_policies as bp
from fsdp_runtime.memory import unit_memory
from layout_planner import Elements, Rows, Tile, Whole
from ragged_shard.testing import on_ranks, rank_mesh, simulated_ranks

MATRIX, STACK, VECTOR, SCALAR = torch.empty(6, 4), torch.empty(3, 6, 4), torch.empty(4), torch.empty(())


def blocks(policy):
    return [policy(name, t) for name, t in zip("msvs", (MATRIX, STACK, VECTOR, SCALAR), strict=True)]


class Declares:
    @staticmethod
    def block_policy():
        return bp.by_pattern({"m": Whole()})


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (bp.rows(3), [Rows(3)] * 4),
        (bp.elements(7), [Elements(7)] * 4),
        (bp.tiles(2, 2), [Tile(2, 2), Tile(2, 2), None, None]),
        (bp.whole(), [Whole(), Tile(6, 4), None, None]),
        (bp.by_pattern({"^m": Rows(2), "s|v": bp.whole()}), [Rows(2), Tile(6, 4), None, None]),
        (bp.declared_by(Declares, bp.rows(5)), [Whole(), Rows(5), Rows(5), Rows(5)]),
    ],
)
def test_each_policy_names_its_blocks_and_can_be_pickled(policy, wanted):
    assert blocks(policy) == wanted
    assert blocks(pickle.loads(pickle.dumps(policy))) == wanted


def test_a_pattern_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"block policy: '\(' is not a regular expression"):
        bp.by_pattern({"(": Rows(1)})


def test_an_optimizer_that_declares_nothing_is_refused():
    with pytest.raises(TypeError, match=r"SGD.* declares no blocks"):
        bp.declared_by(torch.optim.SGD)


def snapshot(model):
    """What a refused call must not change; tensors are compared as objects."""
    return [
        (
            type(module),
            {name: id(param) for name, param in module._parameters.items()},
            {name: id(buffer) for name, buffer in module._buffers.items()},
            [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._state_dict_hooks)],
            set(module.__dict__),
        )
        for module in model.modules()
    ]


class TwoDtypes(nn.Module):
    """Two groups of parameters, planned one after the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.second(self.first(x).bfloat16()).float().sum()


def wrong_for_the_second(name, param):
    return "no block" if name == "second.weight" else None


def planner_that_refuses(refuses, specs, ranks, *, align):
    if refuses(specs):
        raise ArithmeticError("refused")
    return layout_planner.plan(specs, ranks, align=align)


@on_ranks(2)
def test_a_module_whose_second_group_is_refused_is_untouched_and_can_be_sharded_again():
    for error, options in (
        ((TypeError, ValueError), {"block_policy": wrong_for_the_second}),
        (
            ArithmeticError,
            {"planner": partial(planner_that_refuses, lambda specs: specs[0].name == "second.weight")},
        ),
    ):
        model, reference = seeded(TwoDtypes), seeded(TwoDtypes)
        before = snapshot(model)
        with pytest.raises(error):
            fully_shard(model, **options)
        assert snapshot(model) == before
        fully_shard(model)
        x = torch.ones(2, 4)
        torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)


@on_ranks(2)
def test_an_outer_unit_that_cannot_lay_out_what_it_keeps_refuses_the_inner_one_and_nothing_changes():
    refusing = False

    def planner(specs, ranks, *, align):
        return planner_that_refuses(lambda _: refusing, specs, ranks, align=align)

    model, reference = fully_shard(seeded(), planner=planner), seeded()
    values = locals_of(model)
    before, refusing = snapshot(model), True
    with pytest.raises(ArithmeticError, match="refused"):
        fully_shard(model.blocks[1])
    assert snapshot(model) == before
    assert same_bits(locals_of(model), values)
    refusing = False
    fully_shard(model.blocks[1])
    torch.testing.assert_close(loss_of(model, tokens()), loss_of(reference, tokens()))


@on_ranks(2)
def test_a_refusal_inside_a_gathered_unit_leaves_it_gathered():
    model, reference = fully_shard(seeded()), seeded()
    model.unshard()
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError)):
        fully_shard(model.blocks[1], block_policy=lambda name, param: "no block")  # type: ignore[arg-type, return-value]
    assert snapshot(model) == before
    fully_shard(model.blocks[1])
    torch.testing.assert_close(loss_of(model, tokens()), loss_of(reference, tokens()))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.out(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self, width=8, vocab=12, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) + x
        return self.head(x)


def sharded(**options):
    model = seeded(Layers)
    fully_shard([block.out for block in model.blocks], reshard_after_forward=False, **options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@on_ranks(3)
def test_a_unit_of_a_module_from_every_layer_trains_like_the_plain_model():
    model, plain = sharded(), seeded(Layers)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        step_of(model, ours, step)
        plain_backward(plain, step)
        theirs.step()
        theirs.zero_grad()
    assert_same_parameters(model, plain)


def test_its_blocks_share_one_layout_so_that_few_blocks_of_each_layer_do_not_pad():
    with simulated_ranks(4):
        policy = block_policies.rows(4)  # two blocks a layer: six for four ranks
        together = unit_memory(sharded(block_policy=policy).blocks[0].out)
        alone = seeded(Layers)
        each = [unit_memory(fully_shard(block.out, block_policy=policy)) for block in alone.blocks]
        assert (together.parameters, together.padding) == (3 * 8 * 32, 2 * 4 * 32)
        assert sum(unit.padding for unit in each) == 3 * 2 * 4 * 32


@on_ranks(2)
def test_tensor_parallelism_of_degree_1_trains_as_without():
    mesh = rank_mesh(2, 1, names=("dp", "tp"))
    model, reference = shard_with_tensor_parallelism(seeded(TwoLayers), mesh, Rows(3)), seeded(TwoLayers)
    x = torch.randn(4, 8)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        for optimizer, m in zip(optimizers, (model, reference), strict=True):
            m(x).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


def sharded_groups():
    with simulated_ranks(4, rank=1):
        return shard(seeded(), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)


def test_neighbors_are_those_of_the_new_process_groups():
    before = sharded_groups()
    assert sharded_groups() is not before  # and nothing asks for a group of before


@on_ranks(8)
def test_ranks_next_to_tensor_parallelism_have_neighbors_of_their_own():
    """Only the ranks of one column of a mesh are in its sub-mesh: a group that all ranks must make would hang."""
    mesh = rank_mesh(4, 2, names=("data", "tensor"))["data"]
    model = shard(seeded(), mesh=mesh, reshard_after_forward=2)
    loss_of(model, tokens(rank=mesh.get_local_rank())).backward()
    assert_same_gradients(model, plain_backward(seeded(), ranks=4))
