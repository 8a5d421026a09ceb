"""The package's names, versions and imports, and its example."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import block_optim


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
