"""Lets tests, and the ranks they start, import the helpers of all folders by name."""

import sys
from pathlib import Path

from ragged_shard.testing import preload

for folder in ("train", "parity", "parallel", "conformance", ""):
    sys.path.insert(0, str(Path(__file__).parent / folder))
preload("fsdp_runtime", "fsdp_runtime.train.trainer", "torch.distributed.pipelining")
