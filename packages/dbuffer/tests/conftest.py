"""Puts this folder on the path: test modules and the ranks that they start both import `dbuffer_helpers` by name."""

import sys
from pathlib import Path

from ragged_shard.testing import preload

sys.path.insert(0, str(Path(__file__).parent))
preload("dbuffer")
