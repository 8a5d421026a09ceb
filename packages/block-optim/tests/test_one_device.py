"""Plain tensors in one process: no process group, and no more imports than torch's own optimizers need."""

import subprocess
import sys

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


def test_a_step_on_one_device_imports_nothing_of_torch_distributed_that_torchs_own_does_not():
    done = subprocess.run([sys.executable, "-c", ONE_DEVICE], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
