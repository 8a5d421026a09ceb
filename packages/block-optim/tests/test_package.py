"""The package's names, versions and imports, and its example."""

import ast
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import put, world_mesh
from torch.distributed.tensor import Shard

import block_optim
from ragged_shard import RaggedShard
from ragged_shard.testing import on_ranks


def test_the_installed_version_is_the_modules():
    assert metadata.version("block-optim") == block_optim.__version__


ROOT = Path(block_optim.__file__).parent


def test_only_one_module_uses_private_names_of_torch():
    for path in ROOT.rglob("*.py"):
        if path.name == "_torch_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                owner = ast.unparse(node.value)
                assert not owner.startswith("torch"), f"{path.name}: {owner}.{node.attr}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not any(n.startswith("_") for n in names), f"{path.name}: {names}"


EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.long
@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are in the checkout only")
def test_muon_trains_on_torchs_fully_shard():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, EXAMPLES / "muon_fsdp2.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"rank \d: loss (\d+\.\d\d) -> (\d+\.\d\d)", done.stdout)
    assert len(losses) == 2, done.stdout
    assert all(float(last) < float(first) - 2 for first, last in losses)
    assert "muon: 8 tensors" in done.stdout
    assert len((EXAMPLES / "muon_fsdp2.py").read_text().splitlines()) <= 60


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are in the checkout only")
@on_ranks(3)
def test_qk_clip_of_the_examples_scales_the_rows_of_each_head_on_shards_too():
    qk_clip_ = runpy.run_path(str(EXAMPLES / "qk_clip.py"))["qk_clip_"]
    logits = torch.tensor([50.0, 400.0, 100.0, 100.0])
    placements: list[Any]
    for placements in ([Shard(0)], [RaggedShard((0, 1), (1, 0, 29))]):
        w_q, w_k = (put(torch.ones(rows, 5), world_mesh(), placements) for rows in (12, 6))
        qk_clip_(w_q, w_k, logits, key_heads=2)
        assert w_q.full_tensor()[:, 0].tolist() == [1.0] * 3 + [0.5] * 3 + [1.0] * 6
        assert w_k.full_tensor()[:, 0].tolist() == [0.5] * 3 + [1.0] * 3


ONE_DEVICE = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(4, 4))
weight.grad = torch.ones(4, 4)
torch.optim.Muon([weight]).step()
torch.optim.AdamW([weight]).step()
known = set(sys.modules)
from block_optim import SOAP, AdamW, AdamW8bit, Muon, Shampoo
for kind in (AdamW, AdamW8bit, Muon, Shampoo, SOAP):
    kind([weight], lr=0.1).step()
assert not torch.distributed.is_initialized()
print(sorted(name for name in set(sys.modules) - known if name.startswith("torch.distributed")))
"""


@pytest.mark.long
def test_a_step_on_one_device_imports_no_more_of_torch_distributed_than_torchs():
    done = subprocess.run([sys.executable, "-c", ONE_DEVICE], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
