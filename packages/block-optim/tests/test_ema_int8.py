"""EMA in 8 bits: its values beside an average in fp32, the same bits on every layout, checkpoints, and refusals."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import Run, same, tensors
from test_ema import averages, move, nn_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import EMA, AdamW, AdamW8bit
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

# Rows of a whole number of blocks, so that Elements(256) and Tile(1, 256) agree; a vector and a small matrix are fp32.
SHAPES = ((24, 256), (13, 512), (3, 8, 256), (9,), (5, 64))
SHORT = ((24, 344), (5, 9, 100))  # the last block of a row, or of the tensor, is short


def codes_and_averages(ema):
    """Every tensor of a state dict, in full; scales flat, as their shape depends on the kind of block."""
    state = ema.state_dict()
    parts = {part: averages_of(tensors_) for part, tensors_ in state.items() if part != "updates"}
    parts["scales"] = {name: scales.flatten() for name, scales in parts["scales"].items()}
    return {f"{part} {name}": value for part, values in parts.items() for name, value in values.items()}


def averages_of(values):
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in values.items()}


def decoded(module, ema):
    """The averages, in full, as evaluation sees them."""
    with ema.swapped():
        return averages_of({name: p.detach() for name, p in module.named_parameters()})


def averaged(module, updates=3):
    ema = EMA(module, 0.9, dtype=torch.int8, seed=3)
    with record_collectives() as sent:
        for number in range(updates):
            move(module, number)
            ema.update()
    assert not sent.events
    return ema


def test_matrices_take_a_byte_an_element_and_vectors_and_small_matrices_stay_in_fp32():
    state = averaged(nn_of(tensors(SHAPES, 0))).state_dict()
    assert {name: t.dtype for name, t in state["codes"].items()} == dict.fromkeys(
        ("p0", "p1", "p2"), torch.int8
    )
    assert {name: t.numel() for name, t in state["scales"].items()} == {"p0": 24, "p1": 26, "p2": 24}
    assert {name: t.dtype for name, t in state["averages"].items()} == dict.fromkeys(
        ("p3", "p4"), torch.float32
    )


@pytest.mark.parametrize("shapes", [SHAPES, SHORT])
def test_a_new_average_is_the_weight_to_half_a_code(shapes):
    module = nn_of(tensors(shapes, 0))
    before = [p.detach().clone() for p in module.parameters()]
    for value, weight in zip(
        decoded(module, EMA(module, 0.9, dtype=torch.int8)).values(), before, strict=True
    ):
        assert (value - weight).abs().max() <= 0.5001 * weight.abs().max() / 127


def drifting():
    """A module whose first column sets the scales, 1 / 64 for a code, and stays."""
    module = nn_of([torch.ones(64, 256)])
    module.p0.data[:, 0] = 127 / 64
    return module


def test_small_updates_add_up():
    module = drifting()
    ema = EMA(module, 0.999, dtype=torch.int8)
    module.p0.data[:, 1:] = 1.5
    for _ in range(100):
        ema.update()
    value = decoded(module, ema)["p0"][:, 1:]
    assert float(value.mean()) == pytest.approx(1.5 - 0.5 * 0.999**100, abs=2e-3)


def test_an_average_strays_from_that_in_fp32_as_the_readme_says():
    module = drifting()
    narrow, wide = (EMA(module, 0.99, dtype=dtype) for dtype in (torch.int8, torch.float32))
    ratios = []
    for number in range(600):
        module.p0.data[:, 1:] += 5e-4
        narrow.update()
        wide.update()
        if number >= 300:
            exact, weight = averages(wide)["p0"][:, 1:], module.p0.detach()[:, 1:]
            share = float((exact - weight).abs().mean()) / (127 / 64)
            error = (decoded(module, narrow)["p0"][:, 1:] - exact) / (127 / 64)
            ratios.append(float(error.square().mean().sqrt()) / share**0.5)
    assert sum(ratios) / len(ratios) == pytest.approx(0.063, rel=0.1)


def test_numbers_that_are_not_finite_become_nan_in_their_elements_only():
    module = nn_of([torch.ones(16, 256)])
    ema = EMA(module, 0.9, dtype=torch.int8)
    before = module.p0.detach().clone()
    module.p0.data[2, 5], module.p0.data[3, 7] = torch.nan, torch.inf
    ema.update()
    module.p0.data.copy_(before)
    ema.update()
    value = decoded(module, ema)["p0"]
    assert value.isnan().nonzero().tolist() == [[2, 5], [3, 7]]
    assert value.nan_to_num(1.0).sub(1).abs().max() < 1e-6
    assert module.p0.equal(before)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_swapped_restores_weights_and_codes_to_the_bit_also_if_the_body_raises(weights):
    module = nn_of(tensors(SHAPES, 0, weights))
    ema = averaged(module)
    kept, expected = [p.detach().clone() for p in module.parameters()], codes_and_averages(ema)
    with pytest.raises(ZeroDivisionError), ema.swapped():
        1 / int(module.p0.equal(kept[0]))
    assert all(p.equal(value) for p, value in zip(module.parameters(), kept, strict=True))
    same(codes_and_averages(ema), expected)


def test_random_bits_do_not_depend_on_chunks(monkeypatch):
    expected = codes_and_averages(averaged(nn_of(tensors(SHORT, 0))))
    for place, chunk in (("ema.int8.chunk_on", lambda device: 512), ("core.rounding.CHUNK", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(f"block_optim.{place}", chunk)
            same(codes_and_averages(averaged(nn_of(tensors(SHORT, 0)))), expected)


def averaged_in(kind, layout, shapes):
    return codes_and_averages(averaged(Run(kind, layout, shapes=shapes).module))


@pytest.mark.parametrize(
    ("world_size", "kind", "layout", "shapes"),
    [
        (3, AdamW8bit, "planned", SHORT),
        (3, AdamW, "whole", SHORT),
        (3, AdamW, "shard", SHAPES),
        *(pytest.param(n, AdamW8bit, "planned", SHORT, marks=pytest.mark.long) for n in (1, 2, 4)),
        *(pytest.param(n, AdamW, "shard", SHAPES, marks=pytest.mark.long) for n in (2, 4)),
    ],
)
def test_codes_have_the_bits_of_one_process_and_cost_no_communication(world_size, kind, layout, shapes):
    expected = codes_and_averages(averaged(nn_of(tensors(shapes, 0))))
    for result in run_ranks(world_size, averaged_in, kind, layout, shapes):
        same(result, expected)


def saved(folder, layout):
    module = Run(AdamW8bit, layout, shapes=SHAPES).module
    ema = averaged(module)
    dcp.save({"model": module.state_dict(), "ema": ema}, checkpoint_id=folder)


def resumed(folder, layout):
    module = Run(AdamW8bit, layout, shapes=SHAPES, seed=7).module
    ema = EMA(module, 0.9, dtype=torch.int8, seed=3)
    state: dict[str, Any] = {"model": module.state_dict(), "ema": ema}
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    for number in range(3, 6):
        move(module, number)
        ema.update()
    return codes_and_averages(ema)


@pytest.mark.parametrize(
    ("layouts", "sizes"),
    [
        (("planned", "planned"), (3, 2)),
        pytest.param(("planned", "planned"), (2, 4), marks=pytest.mark.long),
        pytest.param(("shard", "shard"), (3, 1), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_continues_at_another_world_size(tmp_path, layouts, sizes):
    run_ranks(sizes[0], saved, tmp_path, layouts[0])
    expected = codes_and_averages(averaged(nn_of(tensors(SHAPES, 0)), 6))
    for result in run_ranks(sizes[1], resumed, tmp_path, layouts[1]):
        same(result, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_averages_of_another_dtype_are_refused_by_state_dicts_and_by_checkpoints(dtype, tmp_path):
    run_ranks(1, load_another_dtype, tmp_path, dtype)


def load_another_dtype(folder, dtype):
    other = torch.float32 if dtype == torch.int8 else torch.int8
    first, second = (EMA(nn_of(tensors(SHAPES, 0)), 0.9, dtype=d) for d in (other, dtype))
    second.update()
    before = {part: averages_of(values) for part, values in second._tensors().items()}
    with pytest.raises(ValueError, match="build EMA with the dtype that was saved"):
        second.load_state_dict(first.state_dict())
    dcp.save({"ema": first}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match=r"ema\.(averages|codes)\.p0"):
        dcp.load({"ema": second}, checkpoint_id=folder)
    if dtype == torch.int8:
        state = second.state_dict()
        state["codes"] = {name: t.float() for name, t in state["codes"].items()}
        with pytest.raises(ValueError, match=r"p0: its codes in the state dict are torch\.float32"):
            second.load_state_dict(state)
    for part, values in second._tensors().items():
        same(averages_of(values), before[part])


@on_ranks(3)
def test_a_layout_that_cuts_a_block_is_refused_on_every_rank_with_the_way_out():
    module = Run(AdamW, "rows", shapes=((61, 100),)).module  # cut by rows of 100 elements
    with pytest.raises(
        ValueError, match=r"p0: .*inside a block .*block_policy.*; or average in bf16 or fp32"
    ):
        EMA(module, 0.9, dtype=torch.int8)
    columns = nn.Parameter(torch_distribute(torch.ones(100, 96), rank_mesh(3), [Shard(1)]))
    with pytest.raises(ValueError, match=r"w: dtype=torch.int8 needs .* one contiguous run"):
        EMA([("w", columns)], 0.9, dtype=torch.int8)
