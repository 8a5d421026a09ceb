"""The examples of the README and of docs/guide.md. Also runs on ranks.

Outside the tree the README is that of the installed wheel, and `./run isolated` copies the guide.
"""

import re
from importlib import metadata
from pathlib import Path
from typing import Any


def section(title):
    """The text of a section of either page."""
    folder = Path(__file__).parent.parent
    path = folder / "README.md"
    text = path.read_text() if path.is_file() else str(metadata.metadata("block-optim")["Description"] or "")
    text += "\n" + (folder / "docs" / "guide.md").read_text()
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def run_examples(title):
    """The names that a section's examples define, run one after the other."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", section(title), re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    assert names, title
    return names
