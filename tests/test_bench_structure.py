"""bench and the training job use public names of the packages only; bench has every command that it lists."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from bench.__main__ import COMMANDS
from bench.history import recorded_as

ROOT = Path(__file__).parent.parent
PACKAGES = ("layout_planner", "ragged_shard", "dbuffer", "block_optim", "fsdp_runtime")
SHARED = "fsdp_runtime._torch_compat."  # by the whole package


def imports_of(path, top):
    """Dotted names that a file below `top` imports anywhere: at its beginning, in functions, under TYPE_CHECKING."""
    package = path.relative_to(top).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    ("folder", "top"),
    [("bench", "."), ("packages/fsdp-runtime/src/fsdp_runtime/train", "packages/fsdp-runtime/src")],
)
def test_only_public_names_of_the_packages_are_used(folder, top):
    used = {
        (path.name, name)
        for path in (ROOT / folder).rglob("*.py")
        for name in imports_of(path, ROOT / top)
        if name.startswith(PACKAGES) and "._" in name and not name.startswith(SHARED)
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
