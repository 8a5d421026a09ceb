"""The package: names, versions, imports, and trees of tensors."""

import subprocess
import sys
from importlib import metadata
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp_runtime
from fsdp_runtime import fully_shard
from fsdp_runtime._params.group import _IN_COMMON
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
