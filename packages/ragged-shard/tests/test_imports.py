"""Modules of this package import downwards only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ragged_shard

PACKAGE = Path(ragged_shard.__file__).parent
MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}


def imported(file):
    """Modules of the package that a file imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: write imports in full"
            joined = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else name.rpartition(".")[0] for name in joined]
        else:
            continue
        yield from (name for name in names if name in MODULES)


def test_no_module_imports_itself_through_others():
    graph = {name: set(imported(file)) for name, file in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the circle
