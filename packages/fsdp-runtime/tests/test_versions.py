"""Ranks with different versions of torch, of these packages or of Python hear of it when a model is sharded."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime import fully_shard
from fsdp_runtime._params.group import _IN_COMMON
from ragged_shard.testing import rank_mesh, run_ranks


def _shard(changes, shape):
    """What this rank is told; `changes`: of its versions, by rank. Also how many gathers of objects there were."""
    names = {1: ("shard",), 2: ("replicate", "shard")}[len(shape)]
    mesh = rank_mesh(*shape, names=names)
    mine = {**_IN_COMMON, **changes.get(dist.get_rank(), {})}
    objects = mock.Mock(wraps=dist.all_gather_object)
    with (
        mock.patch("fsdp_runtime._params.group._IN_COMMON", mine),
        mock.patch("torch.distributed.all_gather_object", objects),
    ):
        try:
            model = torch.nn.Linear(8, 8)
            fully_shard(model, mesh=mesh)
        except ValueError as error:
            return str(error), objects.call_count
        model(torch.ones(2, 8)).sum().backward()
        return None, objects.call_count


def test_every_rank_names_the_versions_that_differ_and_the_ranks_that_have_each():
    name = "the version of dbuffer"
    results = run_ranks(3, _shard, {0: {name: "1.0"}, 1: {name: "1.1"}, 2: {name: "1.0"}}, (3,))
    assert [message for message, _ in results] == [
        "ranks do not agree on the version of dbuffer: 1.0 on ranks 0, 2; 1.1 on rank 1"
    ] * 3


def test_replicas_with_another_python_are_named_by_their_ranks_in_the_job():
    name = "the version of Python"
    other = {name: "9.9"}
    results = run_ranks(4, _shard, {2: other, 3: other}, (2, 2))
    mine = _IN_COMMON[name]
    assert {message for message, _ in results} == {
        f"ranks do not agree on {name}: {mine} on ranks 0, 1; 9.9 on ranks 2, 3"
    }


def test_equal_versions_travel_in_the_digest_of_the_layout_and_cost_no_collective():
    assert run_ranks(2, _shard, {}, (2,)) == [(None, 0)] * 2


@pytest.mark.parametrize("name", ["torch", "Python", "layout-planner", "block-optim", "fsdp-runtime"])
def test_versions_are_those_of_torch_of_each_package_and_of_python(name):
    assert f"the version of {name}" in _IN_COMMON
