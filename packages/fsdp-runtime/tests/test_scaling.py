"""Whatever is sent and whenever it is divided, the result is the sum over the factor."""

import pytest
import torch

from fsdp_runtime._grads.scaling import ReduceOptions, scaling


def outcome(how, shards, replicas, gradient=1.0):
    """What one element becomes if every rank has the same gradient."""
    one = gradient * how.before
    inside = one if how.op == "avg" else one * shards / (how.divide or 1)
    return inside if how.replica_op == "avg" else inside * replicas / (how.replica_divide or 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("factor", [None, 1.0, 3.0, 128.0])
@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (4, 1), (3, 2), (64, 16)])
def test_the_sum_is_divided_by_the_factor(dtype, force_sum, factor, shards, replicas):
    how = scaling(ReduceOptions(divide_factor=factor, force_sum=force_sum), dtype, shards, replicas)
    ranks = shards * replicas
    assert outcome(how, shards, replicas) == pytest.approx(ranks / (factor or ranks))
    if force_sum:
        assert {how.op, how.replica_op} == {"sum"}


def test_what_is_equal_on_all_replicas_stays_as_it_is():
    for force_sum in (False, True):
        how = scaling(ReduceOptions(force_sum=force_sum), torch.float32, 4, 8)
        assert how.replica_op == "avg" or how.replica_divide == 8


def test_fp16_gradients_are_divided_in_two_halves():
    how = scaling(ReduceOptions(), torch.float16, 1024, 1)
    assert how.before == 1 / 32
    assert how.divide == 32
