"""The generated tables and pictures are what the code gives now."""

import importlib.util
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


@pytest.mark.long
def test_a_stale_figure_would_be_found(tool):
    page = "<!-- generated: padding -->\nours: 0 %\n<!-- /generated -->\n"
    assert "ours: 0 %" not in tool.written(page)
    assert "| deepseek-v3" in tool.written(page)


def test_an_unknown_generated_section_is_refused(tool):
    with pytest.raises(ValueError, match=r"\['padding', 'poem'\]; known are"):
        tool.written(
            "<!-- generated: padding -->\n<!-- /generated -->\n<!-- generated: poem -->\n<!-- /generated -->\n"
        )
