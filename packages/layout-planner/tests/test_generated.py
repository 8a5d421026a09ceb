"""What is generated into the README and docs is what the code gives now."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "write_readme.py"


@pytest.fixture(scope="module")
def tool():
    if not TOOL.is_file():
        pytest.skip("outside the repository there is no README and no tool that writes it")
    spec = importlib.util.spec_from_file_location("write_readme", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_and_pictures_are_current(tool):
    stale = [
        path.name for path, content in tool.outputs() if not path.is_file() or path.read_text() != content
    ]
    assert not stale, "run `nox -s readme`"


def test_a_stale_figure_would_be_found(tool):
    readme = "<!-- generated: padding -->\nours: 0 %\n<!-- /generated -->\n"
    assert "ours: 0 %" not in tool.written(readme)
    assert "| deepseek-v3" in tool.written(readme)


def test_an_unknown_generated_part_is_refused(tool):
    with pytest.raises(ValueError, match=r"\['padding', 'poem'\]; known are"):
        tool.written(
            "<!-- generated: padding -->\n<!-- /generated -->\n<!-- generated: poem -->\n<!-- /generated -->\n"
        )
