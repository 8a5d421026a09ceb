"""Lets tests, and the ranks they start, import the helpers beside them by name."""

import sys
from pathlib import Path

from ragged_shard.testing import preload

sys.path.insert(0, str(Path(__file__).parent))
preload("fsdp_runtime", "fsdp_runtime.train.trainer", "torch.distributed.pipelining")
