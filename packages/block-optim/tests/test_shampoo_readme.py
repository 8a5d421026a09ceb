"""The README's section on Shampoo and SOAP, run as it stands."""

import re
from pathlib import Path

import torch


def test_the_readmes_example_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    section = text.partition("\n## Shampoo and SOAP\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
