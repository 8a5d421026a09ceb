"""README, generated tables and pictures are those of the code."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest

from layout_planner._table import Table, markdown, percent, size

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


def test_markdown_aligns_text_left_and_numbers_right():
    assert markdown(("<name", "n"), [["a", "1"], ["long", "2345"]]) == (
        "| name |    n |\n| ---- | ---: |\n| a    |    1 |\n| long | 2345 |"
    )


def test_rows_printed_one_by_one_align_with_the_head():
    table = Table(("<a", "b"), (5, 6))
    assert {len(line) for line in (*table.head().split("\n"), table.row(["x", "1"]))} == {18}


def test_ratios_show_the_digits_that_tell_and_bytes_the_largest_unit_there_is_one_of():
    ratios = {0: "0 %", 1e-5: "<0.01 %", 0.0123: "1.23 %", 0.09999: "10.0 %", 0.5: "50.0 %", 31.2: "3,120 %"}
    ratios[-0.036] = "-3.60 %"
    assert {ratio: percent(ratio) for ratio in ratios} == ratios
    counts = {12: "12 B", 1000: "1.00 kB", 1500: "1.50 kB", 25.2e6: "25.2 MB", 1.83e11: "183 GB"}
    assert {count: size(count) for count in counts} == counts
