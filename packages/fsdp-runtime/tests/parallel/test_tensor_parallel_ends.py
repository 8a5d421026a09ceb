"""Tensor parallelism that divides nothing evenly: three ranks, unequal pieces, ranks without any of a parameter."""

from functools import partial
from typing import Any

import pytest
from cases_tp import VOCABULARY, WIDTH, Model, run, vocabulary
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_runtime
from fsdp_runtime import fully_shard
from layout_planner import Whole
from ragged_shard.testing import on_ranks, rank_mesh, run_ranks


@on_ranks(3)
def test_three_ranks_of_tensor_parallelism_give_the_numbers_of_one_process():
    """Also a vocabulary in pieces of 9, 9 and 8 rows."""
    for size in (VOCABULARY, 26):
        found = run(fsdp_runtime, vocabulary, (1, 3), build=partial(Model, vocabulary=size, hidden=36))
        assert found.loss < 1e-6
        assert found.gradients < 1e-5


def refusal(shape, rows, block):
    mesh = rank_mesh(*shape, names=("dp", "tp"))
    layer: Any = nn.Linear(WIDTH, rows, bias=False)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    policy = None if block is None else lambda name, param: block
    try:
        fully_shard(layer, mesh=mesh["dp"], block_policy=policy)
    except ValueError as error:
        return str(error)
    return layer.weight.full_tensor().shape[0]


@pytest.mark.parametrize(
    ("shape", "rows", "text"),
    [((1, 4), 3, "leaves a rank without any of it"), ((2, 2), 25, "leaves pieces of different sizes")],
)
def test_pieces_that_do_not_combine_are_refused_by_name_on_every_rank(shape, rows, text):
    for found in run_ranks(4, refusal, shape, rows, None):
        assert found.startswith("weight of shape")
        assert text in found


def test_unequal_pieces_that_lie_whole_on_a_rank_combine():
    assert run_ranks(4, refusal, (2, 2), 25, Whole()) == [25] * 4
