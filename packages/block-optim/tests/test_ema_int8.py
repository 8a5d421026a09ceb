"""EMA in 8 bits: its codes and what they cost, and refusals; the rest is in test_ema.py."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import same, tensors
from test_ema import BLOCKS, SHORT, averages, decoded, move, nn_of
from torch.distributed.checkpoint.api import CheckpointException

from block_optim import EMA
from ragged_shard.testing import on_ranks


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
def test_a_checkpoint_of_another_dtype_is_refused_and_changes_nothing(dtype, tmp_path):
    other = torch.float32 if dtype == torch.int8 else torch.int8
    first, second = (EMA(nn_of(tensors(BLOCKS, 0)), 0.9, dtype=d) for d in (other, dtype))
    before = averages(second)
    dcp.save({"ema": first}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match=r"ema\.(averages|codes)\.p0"):
        dcp.load({"ema": second}, checkpoint_id=tmp_path)
    same(averages(second), before)
