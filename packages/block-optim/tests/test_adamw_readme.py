"""The README's example of AdamW and AdamW8bit, run as it stands."""

import re
from pathlib import Path

import torch


def test_the_readmes_two_minutes_run():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    section = text.partition("\n## In two minutes\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    torch.manual_seed(0)
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
