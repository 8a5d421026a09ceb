"""The example scripts run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


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
