"""What the README shows runs as it stands there, on any number of ranks."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch

from ragged_shard.testing import run_ranks

README = Path(__file__).parent.parent / "README.md"


def example():
    # Outside the tree there is what the wheel carries.
    text = README.read_text() if README.is_file() else metadata.metadata("fsdp-runtime")["Description"]
    (found,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found


def run_example(code):
    namespace: dict = {}
    exec(code, namespace)
    assert torch.isfinite(namespace["loss"])
    return [name for name, _ in namespace["model"].named_parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_example_runs(ranks):
    names = run_ranks(ranks, run_example, example())
    assert all(len(found) == 11 for found in names)
