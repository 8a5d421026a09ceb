"""The README's Python runs."""

import re
from importlib import metadata
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def readme():
    if README.is_file():
        return README.read_text()
    return metadata.metadata("layout-planner")["Description"]  # outside the tree: what the wheel carries


def test_every_python_snippet_of_the_readme_runs():
    snippets = re.findall(r"```python\n(.*?)```", readme(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        namespace: dict = {}
        exec(compile(snippet, "README.md", "exec"), namespace)
        assert namespace["layout"].padding_ratio < 0.5
