"""bench uses public names of the packages only, and has every command that it lists."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from bench.__main__ import COMMANDS
from bench.history import recorded_as

ROOT = Path(__file__).parent.parent
PACKAGES = ("layout_planner", "ragged_shard", "dbuffer", "block_optim", "fsdp_runtime")
FILES = sorted((ROOT / "bench").rglob("*.py"))


def module_of(path):
    """`("bench", "tally")`; of a package's `__init__` the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path):
    """Dotted names that a file imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = (*base, *(node.module or "").split(".")) if node.module else base
            found |= {(*source, alias.name) for alias in node.names}
    return found


def test_only_public_names_of_the_packages_are_used():
    used = {
        (str(path.relative_to(ROOT)), ".".join(name))
        for path in FILES
        for name in imports_of(path)
        if name[0] in PACKAGES and any(part.startswith("_") for part in name)
    }
    assert not used


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_module_with_a_main(command):
    name, _ = COMMANDS[command]
    module = importlib.import_module(f"bench.{name}")
    assert callable(getattr(module, f"main_{command}"))
    assert module.__doc__


def test_a_benchmark_keeps_its_name_wherever_its_class_is():
    @recorded_as("old_place", it=("ms", lambda found, size: found[size]))
    class Question:
        def time_it(self):
            return 1

        def helper(self):
            return 2

    tracked: Any = Question
    names = {"benchmark_name": "old_place.Question.track_it", "unit": "ms", "version": "1"}
    assert vars(tracked.track_it) == names
    assert tracked().track_it({3: 0.5}, 3) == 0.5
    assert vars(Question.time_it) == {"benchmark_name": "old_place.Question.time_it"}
    assert not vars(Question.helper)
