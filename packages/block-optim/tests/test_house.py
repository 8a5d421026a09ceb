"""The package's rooms: no import goes in a circle, and each room knows only those below it."""

import ast
from pathlib import Path

import block_optim

ROOT = Path(block_optim.__file__).parent
# What a room may import from, itself apart.
KNOWS = {
    "core": set(),
    "adam": {"core"},
    "muon": {"core"},
    "shampoo": {"core"},
    "routing": {"core", "adam", "muon", "shampoo"},
}


def modules():
    """Every module's name with the names that it imports, those for type checking and within functions included."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("block_optim", *path.relative_to(ROOT).with_suffix("").parts)
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[".".join(p for p in parts if p != "__init__")] = imported
    return {name: {i for i in imported if i in found} for name, imported in found.items()}


def circle(graph):
    """The modules of some circle, in order; none where there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph[name]):
            if found := visit(other):
                return found
        done.add(path.pop())
        return []

    return next((found for name in graph if (found := visit(name))), [])


def test_no_module_imports_itself_through_others():
    assert circle(modules()) == []


def test_a_circle_would_be_found():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d"]


def test_each_room_knows_only_those_below_it():
    for name, imported in modules().items():
        room = name.split(".")[1] if "." in name else None
        if room is None:
            continue
        others = {other.split(".")[1] for other in imported if "." in other}
        assert others <= {room, *KNOWS[room]}, f"{name} imports from {sorted(others)}"
        assert "block_optim" not in imported, f"{name} imports from the top of the package"


def test_only_one_module_uses_private_names_of_torch():
    for path in ROOT.rglob("*.py"):
        if path.name == "_torch_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                owner = ast.unparse(node.value)
                assert not owner.startswith("torch"), f"{path.name}: {owner}.{node.attr}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not any(n.startswith("_") for n in names), f"{path.name}: {names}"
