"""The README's section on Shampoo and SOAP, run as it stands."""

import re

import torch
from readme_text import readme


def test_the_readmes_example_runs():
    text = readme()
    section = text.partition("\n## Shampoo and SOAP\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
