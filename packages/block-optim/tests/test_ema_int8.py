"""EMA in 8 bits: its codes and what they cost, and refusals; the rest is in test_ema.py."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import Run, same, tensors
from test_ema import BLOCKS, SHORT, averages, decoded, full_values, move, nn_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import EMA, AdamW
from ragged_shard.testing import on_ranks, rank_mesh


def averaged(module):
    ema = EMA(module, 0.9, dtype=torch.int8, seed=3)
    for number in range(3):
        move(module, number)
        ema.update()
    return ema


def test_matrices_take_a_byte_an_element_and_vectors_and_small_matrices_stay_in_fp32():
    state = averaged(nn_of(tensors(BLOCKS, 0))).state_dict()
    assert {name: t.dtype for name, t in state["codes"].items()} == dict.fromkeys(
        ("p0", "p1", "p2"), torch.int8
    )
    assert {name: t.numel() for name, t in state["scales"].items()} == {"p0": 24, "p1": 26, "p2": 24}
    assert {name: t.dtype for name, t in state["averages"].items()} == dict.fromkeys(
        ("p3", "p4"), torch.float32
    )


@pytest.mark.parametrize("shapes", [BLOCKS, SHORT])
def test_a_new_average_is_the_weight_to_half_a_code(shapes):
    module = nn_of(tensors(shapes, 0))
    before = [p.detach().clone() for p in module.parameters()]
    for value, weight in zip(
        decoded(module, EMA(module, 0.9, dtype=torch.int8)).values(), before, strict=True
    ):
        assert (value - weight).abs().max() <= 0.5001 * weight.abs().max() / 127


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


def test_random_bits_do_not_depend_on_chunks(monkeypatch):
    expected = averages(averaged(nn_of(tensors(SHORT, 0))))
    for place, chunk in (("ema.int8.chunk_on", lambda device: 512), ("core.rounding.CHUNK", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(f"block_optim.{place}", chunk)
            same(averages(averaged(nn_of(tensors(SHORT, 0)))), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@on_ranks(1)
def test_averages_of_another_dtype_are_refused_by_state_dicts_and_by_checkpoints(dtype, tmp_path):
    other = torch.float32 if dtype == torch.int8 else torch.int8
    first, second = (EMA(nn_of(tensors(BLOCKS, 0)), 0.9, dtype=d) for d in (other, dtype))
    second.update()
    before = {part: full_values(values) for part, values in second._tensors().items()}
    with pytest.raises(ValueError, match="build EMA with the dtype that was saved"):
        second.load_state_dict(first.state_dict())
    dcp.save({"ema": first}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match=r"ema\.(averages|codes)\.p0"):
        dcp.load({"ema": second}, checkpoint_id=tmp_path)
    if dtype == torch.int8:
        state = second.state_dict()
        state["codes"] = {name: t.float() for name, t in state["codes"].items()}
        with pytest.raises(ValueError, match=r"p0: its codes in the state dict are torch\.float32"):
            second.load_state_dict(state)
    for part, values in second._tensors().items():
        same(full_values(values), before[part])


@on_ranks(3)
def test_a_layout_that_cuts_a_block_is_refused_on_every_rank_with_the_way_out():
    module = Run(AdamW, "elements", shapes=((61, 100),), cuts=1).module  # cut inside rows
    with pytest.raises(
        ValueError, match=r"p0: .*inside a block .*block_policy.*; or average in bf16 or fp32"
    ):
        EMA(module, 0.9, dtype=torch.int8)
    columns = nn.Parameter(torch_distribute(torch.ones(100, 96), rank_mesh(3), [Shard(1)]))
    with pytest.raises(ValueError, match=r"w: dtype=torch.int8 needs .* one contiguous run"):
        EMA([("w", columns)], 0.9, dtype=torch.int8)


@on_ranks(3)
def test_a_bf16_average_of_columns_is_refused_also_on_a_rank_that_holds_none():
    columns = nn.Parameter(torch_distribute(torch.ones(8, 2), rank_mesh(3), [Shard(1)]))
    with pytest.raises(ValueError, match=r"p: dtype=torch.bfloat16 needs .* one contiguous run"):
        EMA([("p", columns)], 0.9, dtype=torch.bfloat16)
