"""Puts this folder on the path (test modules and the ranks that they start import helpers by name); one thread."""

import sys
from pathlib import Path

import pytest
import torch

from ragged_shard.testing import preload

sys.path.insert(0, str(Path(__file__).parent))
preload("block_optim")


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums and products have other bits with other numbers of threads. Ranks have one, and are compared with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
