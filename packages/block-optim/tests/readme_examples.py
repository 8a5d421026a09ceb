"""The README's examples, from the tree or, outside it, from the installed wheel. Also runs on ranks."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any


def section(title):
    """The text of a section."""
    path = Path(__file__).parent.parent / "README.md"
    text = path.read_text() if path.is_file() else str(metadata.metadata("block-optim")["Description"] or "")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def run_examples(title):
    """The names that a section's examples define, run one after the other."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", section(title), re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    assert names, title
    return names
