"""EMA of weights: the bits of one process on every layout, swapping for evaluation, checkpoints, and misuse."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import Run, full, neighbors, same, tensors
from test_fsdp2 import Model, rows
from torch import nn

from block_optim import EMA, AdamW
from ragged_shard import RaggedDTensor
from ragged_shard.dist import DISTRIBUTED
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

BF16 = torch.bfloat16
SHAPES = ((24, 16), (13, 8), (3, 8, 6), (9,), (1, 5))


def nn_of(weights):
    """A module with these parameters."""
    module = nn.Module()
    for i, weight in enumerate(weights):
        module.register_parameter(f"p{i}", nn.Parameter(weight))
    return module


def flat_module(shapes=SHAPES, dtype=torch.float32):
    """A module whose parameters are neighbors in one buffer, and the gaps, which hold NaN."""
    views, gaps = neighbors(tensors(shapes, 0, dtype), torch.nan)
    return nn_of(views), gaps


def move(module, number):
    """Some update of the parameters, the same wherever they are cut."""
    for i, p in enumerate(module.parameters()):
        p.data.mul_(0.9 + 0.01 * i).add_(0.01 * number)


def averages(ema):
    """The averages, in full."""
    return full_values(ema.state_dict()["averages"])


def full_values(values):
    return {name: full(value).clone() for name, value in values.items()}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, torch.float64])
def test_averages_are_those_of_torchs_lerp_in_fp32(dtype):
    (module, _), (other, _) = flat_module(dtype=dtype), flat_module(dtype=dtype)
    ema = EMA(module, 0.9)
    wide = torch.promote_types(dtype, torch.float32)
    assert all(value.dtype == wide for value in averages(ema).values())
    expected = {name: p.detach().to(wide, copy=True) for name, p in other.named_parameters()}
    for number in range(4):
        move(module, number)
        ema.update()
        move(other, number)
        for name, p in other.named_parameters():
            expected[name].lerp_(p.detach().to(wide), 1 - 0.9)
    same(averages(ema), expected)


def test_warmup_follows_new_weights_faster_at_first():
    weight = nn.Parameter(torch.zeros(3))
    ema = EMA([("w", weight)], 0.5, warmup=True)
    expected = torch.zeros(3)
    for number in range(12):
        weight.data.fill_(number)
        ema.update()
        expected.lerp_(weight.detach(), 1 - min(0.5, (1 + number) / (10 + number)))
    assert averages(ema)["w"].equal(expected)


def test_random_bits_depend_on_name_update_and_element_but_not_on_chunks(monkeypatch):
    def average(name="w", shape=(64,), updates=1):
        weight = nn.Parameter(torch.full(shape, 1.0))
        ema = EMA([("before", nn.Parameter(torch.ones(3))), (name, weight)], 0.5, dtype=BF16)
        weight.data.fill_(1 + 2**-7)
        for _ in range(updates):
            ones = {n: torch.ones_like(v) for n, v in averages(ema).items()}
            ema.load_state_dict({"averages": ones, "updates": ema.updates})
            ema.update()
        return averages(ema)[name]

    first = average()
    assert first.equal(average(shape=(8, 8)).flatten())
    others = (average("v"), average(updates=2))
    assert not any(first.equal(other) for other in others)
    assert 16 < int((first == 1).sum()) < 48
    monkeypatch.setattr("block_optim.ema.CHUNK", 5)
    assert first.equal(average())


def test_a_tied_parameter_is_averaged_once_and_twice_if_it_is_untied():
    module = nn.Module()
    module.wte = module.head = weight = nn.Parameter(torch.ones(3))
    of_module = EMA(module, 0.5)
    for ema in (of_module, EMA([("wte", weight), ("tied", weight)], 0.5)):
        weight.data.fill_(3)
        ema.update()
        assert {name: value.tolist() for name, value in averages(ema).items()} == {"wte": [2.0] * 3}
        with ema.swapped():
            assert weight.tolist() == [2.0] * 3
        assert weight.tolist() == [3.0] * 3
        weight.data.fill_(1)
    module.head = nn.Parameter(torch.ones(3))
    of_module.update()
    assert averages(of_module).keys() == {"wte", "head"}


def averaged(module, dtype):
    ema = EMA(module, 0.9, dtype=dtype)
    with record_collectives() as sent:
        for number in range(3):
            move(module, number)
            ema.update()
    assert not sent.events
    return averages(ema)


@functools.cache
def alone(dtype, weights=torch.float32):
    return averaged(nn_of(tensors(SHAPES, 0, weights)), dtype)


KINDS = [(torch.float32, torch.float32), (BF16, BF16), (torch.float32, BF16), (BF16, torch.float32)]


@on_ranks(3)
def test_averages_have_the_bits_of_one_process_and_cost_no_communication():
    for dtype, weights in KINDS:
        for layout in ("elements", "rows", "whole", "shard", "replicate"):
            module = Run(AdamW, layout, shapes=SHAPES, dtype=weights).module
            same(averaged(module, dtype), alone(dtype, weights))


TOKENS = torch.arange(31)


@on_ranks(3)
def test_on_torchs_fully_shard_an_evaluation_leaves_no_averages_gathered():
    model = rows(Model())
    ema = EMA(model, 0.9)
    move(model, 1)
    before = model(TOKENS).sum().item()
    with ema.swapped(), torch.no_grad():
        assert model(TOKENS).sum().item() != before  # leaves the root of FSDP2 gathered
    assert model(TOKENS).sum().item() == before


@pytest.mark.parametrize("weights", [torch.float32, BF16])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_swapped_restores_weights_and_averages_to_the_bit_also_if_the_body_raises(dtype, weights):
    module, _ = flat_module(dtype=weights)
    ema = EMA(module, 0.9, dtype=dtype)
    for number in range(3):
        move(module, number)
        ema.update()
    kept, expected = [p.detach().clone() for p in module.parameters()], averages(ema)
    places = [p.data_ptr() for p in module.parameters()]

    def fail():
        for name, p in module.named_parameters():
            assert p.equal(expected[name].to(weights))
        assert not any(p.equal(value) for p, value in zip(module.parameters(), kept, strict=True))
        raise KeyError("from the body")

    with pytest.raises(KeyError, match="from the body"), ema.swapped():
        fail()
    assert all(p.equal(value) for p, value in zip(module.parameters(), kept, strict=True))
    assert places == [p.data_ptr() for p in module.parameters()]
    same(averages(ema), expected)
    ema.update()


def test_frozen_parameters_have_an_average_once_they_train():
    module = nn_of(tensors(SHAPES, 0))
    module.p1.requires_grad_(False)
    ema = EMA(module, 0.9)
    assert "p1" not in averages(ema)
    move(module, 1)
    ema.update()
    with ema.swapped():
        frozen = module.p1.detach().clone()
    assert frozen.equal(module.p1)
    module.p1.requires_grad_(True)
    ema.update()
    assert averages(ema)["p1"].equal(frozen)
    expected = frozen.clone().lerp_(frozen + 1, 1 - 0.9)
    module.p1.data.add_(1)
    ema.update()
    assert averages(ema)["p1"].equal(expected)


def test_weights_that_moved_are_followed_and_replaced_ones_are_named():
    module = nn_of(tensors(SHAPES, 0))
    ema = EMA(module, 0.9)
    before = averages(ema)["p0"]
    module.p0.data = module.p0.data + 1
    ema.update()
    assert averages(ema)["p0"].equal(before.lerp(module.p0.detach(), 1 - 0.9))
    kept = module.p0.data
    for data in (kept[:5], kept.t().contiguous().t()):
        module.p0.data = data
        for call in (ema.update, lambda: ema.swapped().__enter__()):
            with pytest.raises(ValueError, match=r"p0: it has .*, and had"):
                call()
        module.p0.data = kept
    replaced, module.p3 = module.p3, nn.Parameter(module.p3.detach().clone())
    with pytest.raises(ValueError, match="p3: the module has another tensor there"):
        ema.update()
    module.p3 = replaced
    with ema.swapped():
        pass


def test_a_compiled_module_has_the_names_of_the_module_inside():
    module = nn_of(tensors(SHAPES, 0))
    compiled: Any = torch.compile(module, backend="eager")
    ema = EMA(compiled, 0.9)
    assert averages(ema).keys() == dict(module.named_parameters()).keys()
    ema.update()
    with ema.swapped():
        pass


@on_ranks(3)
def test_on_shards_what_was_built_wrongly_is_named():
    early = Model()
    ema = EMA(early, 0.9)
    rows(early)
    another = r"embedding.weight: the module has another tensor there, .*fully_shard"
    with pytest.raises(ValueError, match=another):
        ema.update()
    model = rows(Model())
    lone = EMA(model.named_parameters(), 0.9)
    lone.update()
    with (
        pytest.raises(ValueError, match=r"embedding.weight: EMA has tensors of a sharded model"),
        lone.swapped(),
    ):
        raise AssertionError
    part = EMA(model.norm, 0.9)  # the root has its unit
    model(TOKENS)
    with pytest.raises(
        ValueError, match=r"weight: the module has another tensor there, .* a unit that is gathered"
    ):
        part.update()
    model.reshard()
    part.update()
    with part.swapped():
        pass


def saved(folder, layout, dtype):
    module = Run(AdamW, layout, shapes=SHAPES).module
    ema = EMA(module, 0.9, dtype=dtype, warmup=True)
    for number in range(3):
        move(module, number)
        ema.update()
    value = next(iter(ema.state_dict()["averages"].values()))
    assert isinstance(value, DISTRIBUTED) == (layout != "plain")
    assert isinstance(value, RaggedDTensor) == (layout not in ("plain", "shard"))
    dcp.save({"model": module.state_dict(), "ema": ema}, checkpoint_id=folder)


def resumed(folder, layout, dtype):
    module = Run(AdamW, layout, shapes=SHAPES, seed=7, cuts=2).module
    ema = EMA(module, 0.9, dtype=dtype, warmup=True)
    state: dict[str, Any] = {"model": module.state_dict(), "ema": ema}
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    assert ema.updates == 3
    for number in range(3, 6):
        move(module, number)
        ema.update()
    return averages(ema)


@pytest.mark.parametrize(
    ("layouts", "sizes"),
    [
        (("elements", "shard"), (3, 2)),
        pytest.param(("shard", "elements"), (3, 4), marks=pytest.mark.long),
        pytest.param(("rows", "whole"), (2, 3), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_continues_at_another_world_size_and_layout(tmp_path, layouts, sizes):
    for dtype in (torch.float32, BF16):
        run_ranks(sizes[0], saved, tmp_path / str(dtype), layouts[0], dtype)
        module = Run(AdamW, shapes=SHAPES).module
        ema = EMA(module, 0.9, dtype=dtype, warmup=True)
        for number in range(6):
            move(module, number)
            ema.update()
        for result in run_ranks(sizes[1], resumed, tmp_path / str(dtype), layouts[1], dtype):
            same(result, averages(ema))


@on_ranks(3)
def test_full_averages_load_into_shards():
    module = Run(AdamW, "elements", shapes=SHAPES).module
    ema = EMA(module, 0.9)
    ema.load_state_dict({"averages": alone(torch.float32), "updates": 3})
    result = averages(ema)
    same(result, alone(torch.float32))
