"""README, generated tables and pictures are those of the code."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "write_readme.py"


@pytest.fixture(scope="module")
def tool():
    if not TOOL.is_file():
        pytest.skip("only in a checkout: the tool that writes the pages is not installed")
    spec = importlib.util.spec_from_file_location("write_readme", TOOL)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_tables_and_pictures_are_up_to_date(tool):
    stale = [
        path.name for path, content in tool.outputs() if not path.is_file() or path.read_text() != content
    ]
    assert not stale, "run `python tools/write_readme.py`"


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
