"""The package: names, versions, imports, and trees of tensors."""

import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from importlib import metadata
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp_runtime
from fsdp_runtime import fully_shard
from fsdp_runtime._params.group import _IN_COMMON
from fsdp_runtime._torch.tree import cast_to, map_tensors, tensors_in
from ragged_shard.testing import rank_mesh, run_ranks


def test_the_installed_version_and_every_exported_name_are_there():
    assert metadata.version("fsdp-runtime") == fsdp_runtime.__version__
    assert all(hasattr(fsdp_runtime, name) for name in fsdp_runtime.__all__)


def test_importing_it_needs_no_extra_and_adapters_import_no_trainer():
    code = """
import importlib, sys
trainers = {"accelerate", "lightning_fabric", "torchtitan", "transformers", "verl", "vllm"}
for name in ("accelerate", "fabric", "torchtitan", "transformers", "verl", "vllm"):
    importlib.import_module(f"fsdp_runtime.integrations.{name}")
    assert not trainers & sys.modules.keys(), name
for name in [name for name in sys.modules if name.startswith("fsdp_runtime")]:
    del sys.modules[name]
for name in ("block_optim", "rich", "matplotlib", "safetensors", "transformers"):
    sys.modules[name] = None
import fsdp_runtime
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def _refusal(changes, shape):
    """The error on this rank; `changes`: of its versions, by rank."""
    names = {1: ("shard",), 2: ("replicate", "shard")}[len(shape)]
    mine = {**_IN_COMMON, **changes.get(dist.get_rank(), {})}
    with mock.patch("fsdp_runtime._params.group._IN_COMMON", mine), pytest.raises(ValueError) as raised:
        fully_shard(torch.nn.Linear(8, 8), mesh=rank_mesh(*shape, names=names))
    return str(raised.value)


def test_every_rank_names_versions_that_differ_and_the_ranks_that_have_each():
    name = "the version of dbuffer"
    found = run_ranks(3, _refusal, {0: {name: "1.0"}, 1: {name: "1.1"}, 2: {name: "1.0"}}, (3,))
    assert found == [f"ranks do not agree on {name}: 1.0 on ranks 0, 2; 1.1 on rank 1"] * 3
    name = "the version of Python"  # of replicas
    found = run_ranks(4, _refusal, {2: {name: "9.9"}, 3: {name: "9.9"}}, (2, 2))
    expected = f"ranks do not agree on {name}: {_IN_COMMON[name]} on ranks 0, 1; 9.9 on ranks 2, 3"
    assert found == [expected] * 4


Pair = namedtuple("Pair", "left right")


class Batch(dict):
    """A dictionary with a constructor of its own, whose items are attributes too."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


@dataclass
class Output:
    value: torch.Tensor
    note: str
    extra: list | None = None


def test_tensors_in_every_container_are_mapped_and_its_class_is_kept():
    x = torch.ones(2)
    tree = (x, [x, 3], {"k": x}, OrderedDict(a=x), Pair(x, "s"), Output(x, "n", [x]), None, Batch(k=x))
    found = map_tensors(lambda t: t + 1, tree)
    assert len(list(tensors_in(tree))) == len(list(tensors_in(found))) == 8
    assert all(torch.equal(t, x + 1) for t in tensors_in(found))
    assert [type(item) for item in found] == [type(item) for item in tree]
    assert (found[4].right, found[5].note, found[1][1], found[6]) == ("s", "n", 3, None)
    assert found[7].k is found[7]["k"]
    user = map_tensors(lambda t: t + 1, UserDict(data=x))  # whose attribute `data` is not the item
    assert list(user) == ["data"]
    assert torch.equal(user["data"], x + 1)
    assert map_tensors(lambda t: t, tree) is tree
    mixed = [x, torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)]
    cast = map_tensors(cast_to(torch.bfloat16), mixed)  # of floating-point tensors alone
    assert [t.dtype for t in cast] == [torch.bfloat16, torch.int64, torch.bool]
    assert map_tensors(cast_to(None), mixed) is mixed
