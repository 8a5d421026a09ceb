"""The README's Python runs, on one rank and on several."""

import re
from importlib import metadata
from pathlib import Path

from dbuffer import Gather
from ragged_shard.testing import run_ranks

README = Path(__file__).parent.parent / "README.md"


def readme():
    if README.is_file():
        return README.read_text()
    return metadata.metadata("dbuffer")["Description"]  # outside the tree: what the wheel carries


def run(snippet):
    namespace: dict = {}
    exec(compile(snippet, "README.md", "exec"), namespace)
    Gather([namespace["params"]]).start().wait()
    return {name: view.clone() for name, view in namespace["params"].views.items()}


def test_the_example_trains_to_the_same_parameters_on_any_number_of_ranks():
    (snippet,) = re.findall(r"```python\n(.*?)```", readme(), re.DOTALL)
    (alone,) = run_ranks(1, run, snippet)
    for found in run_ranks(3, run, snippet):
        for name, value in alone.items():
            assert found[name].equal(value), name


def test_every_public_name_that_the_readme_and_the_guide_call_exists():
    import dbuffer
    from dbuffer import encodings

    # `./run isolated` copies the page next to the tests.
    text = readme() + (Path(__file__).parent.parent / "docs" / "guide.md").read_text()
    for name in set(re.findall(r"`(\w+)\(", text)):
        assert any(hasattr(place, name) for place in (dbuffer, dbuffer.DBuffer, encodings)), name
