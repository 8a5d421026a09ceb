"""Modules of this package import downwards only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import layout_planner

PACKAGE = Path(layout_planner.__file__).parent


def imported(file):
    """Modules of the package that a file imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: write imports in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_imports_itself_through_others():
    names = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in PACKAGE.rglob("*.py")
    }
    graph = {name: (set(imported(file)) & names.keys()) - {PACKAGE.name} for name, file in names.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the circle
