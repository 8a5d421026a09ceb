"""The snippets of the README and of the guide run, and the op table of docs/ops.md is the code's."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ragged_shard._ops.table import RULES, markdown
from ragged_shard._tensor import HANDLERS
from ragged_shard.testing import run_ranks


def readme():
    """The file of the checkout, or the copy in the installed package's metadata."""
    file = Path(__file__).parent.parent / "README.md"
    if file.is_file():
        return file.read_text()
    return importlib.metadata.metadata("ragged-shard")["Description"]


def guide():
    """The page with the rest of the examples; `./run isolated` copies it next to the tests."""
    return (Path(__file__).parent.parent / "docs" / "guide.md").read_text()


def snippets(kind, text):
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_script(code):
    assert dist.is_initialized()
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("page", "fewest"), [(readme, 2), (guide, 5)])
def test_the_snippets_of_a_page_run_one_after_another_as_one_script(page, fewest):
    code = snippets("python", page())
    assert len(code) >= fewest
    run_ranks(3, run_script, "\n".join(code))


def test_the_test_snippet_passes(tmp_path):
    (code,) = snippets("python test", guide())
    file = tmp_path / "snippet_of_readme.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("snippet_of_readme", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        module.test_all_reduce_sums()


def test_the_op_table_is_the_codes():
    page = Path(__file__).parent.parent / "docs" / "ops.md"
    assert page.read_text().endswith(f"\n\n{markdown()}\n")


def test_every_name_in_the_table_is_an_op_that_has_a_handler():
    handled = {op._schema.name.removeprefix("aten::").rstrip("_") for op in HANDLERS}
    for rule in RULES.values():
        for name in rule.ops.split():
            assert name.partition(".")[0].rstrip("_") in handled, name
