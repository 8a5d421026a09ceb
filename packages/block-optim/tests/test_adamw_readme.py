"""The README's example of AdamW and AdamW8bit, run as it stands."""

import re

import torch
from readme_text import readme


def test_the_readmes_two_minutes_run():
    text = readme()
    section = text.partition("\n## In two minutes\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    torch.manual_seed(0)
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
