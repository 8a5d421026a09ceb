"""Imports inside a package go one way, and the training job uses public names only."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    path.name: path for path in sorted((ROOT / "packages").glob("*/src/*")) if (path / "__init__.py").exists()
}
SOURCES = {**PACKAGES, "bench": ROOT / "bench"}

# Known exceptions. Delete an entry when the code no longer needs it; a test that then passes says so (strict xfail).
CIRCULAR: set[str] = set()
CIRCULAR_ROOMS: set[str] = set()
PRIVATE_IN_TRAIN: dict[str, list[str]] = {}


def modules_of(package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name; a folder's name stands for its `__init__`."""
    root = SOURCES[package]
    found = {}
    for path in root.rglob("*.py"):
        words = [package, *path.relative_to(root).with_suffix("").parts]
        found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


def imports_in(path: Path, name: str) -> Iterator[tuple[str, str | None, str]]:
    """Each (module, imported name or None, local name): at the top of a file, in functions, for type checking alike."""
    folder = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) + 1 - node.level] if node.level else []
            module = ".".join(above + (node.module.split(".") if node.module else []))
            yield from ((module, alias.name, alias.asname or alias.name) for alias in node.names)


def import_graph(package: str) -> dict[str, set[str]]:
    """Which modules of the package each of its modules names; that a submodule loads its folder is not counted."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        wanted = {
            f"{module}.{imported}" if f"{module}.{imported}" in modules else module
            for module, imported, _ in imports_in(path, name)
        }
        graph[name] = wanted & modules.keys()
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one node, and nodes that name themselves (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        open_nodes.append(node)
        for target in sorted(graph[node]):
            if target not in order:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in open_nodes:
                lowest[node] = min(lowest[node], order[target])
        if lowest[node] == order[node]:
            at = open_nodes.index(node)
            component = open_nodes[at:]
            del open_nodes[at:]
            if len(component) > 1 or node in graph[node]:
                found.append(sorted(component))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def rooms(package: str) -> dict[str, set[str]]:
    """The same graph with each folder directly below the package as one node."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[:2])

    graph: dict[str, set[str]] = {}
    for name, targets in import_graph(package).items():
        graph.setdefault(room(name), set()).update(
            room(target) for target in targets if room(target) != room(name)
        )
    return graph


def expected(names: Collection[str], failing: Collection[str], reason: str) -> list[object]:
    """The names as parameters of a test, the failing ones marked as such."""
    assert set(failing) <= set(names), f"no such: {sorted(set(failing) - set(names))}"
    mark = pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError)
    return [pytest.param(name, marks=mark if name in failing else ()) for name in names]


@pytest.mark.parametrize("package", expected(SOURCES, CIRCULAR, "has an import circle"))
def test_no_package_has_an_import_circle(package):
    assert circles(import_graph(package)) == []


@pytest.mark.parametrize("package", expected(SOURCES, CIRCULAR_ROOMS, "has rooms that import each other"))
def test_no_two_rooms_of_a_package_import_each_other(package):
    assert circles(rooms(package)) == []


def test_a_circle_through_a_function_and_one_through_type_checking_are_found(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "__init__.py").write_text("from .a import x\n")
    (tmp_path / "a.py").write_text("from . import b\nfrom .inner.c import y\n")
    (tmp_path / "b.py").write_text("def late():\n    from package.a import x\n")
    (tmp_path / "inner" / "__init__.py").write_text("")
    (tmp_path / "inner" / "c.py").write_text("if TYPE_CHECKING:\n    from .d import z\n")
    (tmp_path / "inner" / "d.py").write_text("from .c import y\n")
    monkeypatch.setitem(SOURCES, "package", tmp_path)
    found = circles(import_graph("package"))
    assert sorted(found) == [["package.a", "package.b"], ["package.inner.c", "package.inner.d"]]
    assert circles(rooms("package")) == [["package.a", "package.b"]]


def public_names(module: Path) -> set[str]:
    """What the `__all__` of a package or of a folder in it lists, and its version; empty where there is none."""
    for node in ast.parse((module / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return {*ast.literal_eval(node.value), "__version__"}
    return set()


def is_public(dotted: str) -> bool:
    """Whether a package offers a name: it, or a folder without underscore, has its first word in `__all__`.

    No underscore may follow.
    """
    package, *words = dotted.split(".")
    if not words:
        return True
    folder = PACKAGES[package]
    if words[0] not in public_names(folder) and words[0][0] != "_" and (folder / words[0]).is_dir():
        folder, words = folder / words[0], words[1:]
    return not words or (words[0] in public_names(folder) and not any(word[0] == "_" for word in words[1:]))


def private_uses(path: Path, name: str) -> list[str]:
    """What a file of the training job takes from the five packages that they do not offer, as dotted names."""
    modules = {dotted: found for package in PACKAGES for dotted, found in modules_of(package).items()}
    used: list[str] = []
    bound: dict[str, str] = {}  # local names of modules
    for module, imported, local in imports_in(path, name):
        if module in modules and not f"{module}.".startswith("fsdp_runtime.train."):
            used.append(f"{module}.{imported}" if imported else module)
            bound |= {local: used[-1]} if used[-1] in modules else {}
    used += [
        f"{bound[ast.unparse(node.value)]}.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in bound
    ]
    return sorted({dotted for dotted in used if not is_public(dotted)})


JOB = PACKAGES["fsdp_runtime"] / "train"
TRAIN = {
    path.relative_to(JOB).as_posix(): name
    for name, path in modules_of("fsdp_runtime").items()
    if path.is_relative_to(JOB)
}


@pytest.mark.parametrize("file", expected(sorted(TRAIN), PRIVATE_IN_TRAIN, "uses what is not public"))
def test_the_training_job_uses_public_names_only(file):
    assert private_uses(JOB / file, TRAIN[file]) == []


def test_private_modules_names_and_attributes_are_found_and_public_ones_are_not(tmp_path):
    file = tmp_path / "job.py"
    file.write_text(
        "import dbuffer as buffers\nfrom fsdp_runtime import block_policies, fully_shard\n"
        "from fsdp_runtime._wrap import fully_shard as same\nfrom layout_planner import Stranger\n"
        "from fsdp_runtime.train.config import Config\nfrom ragged_shard.testing import run_ranks, Stranger\n"
        "buffers.DBuffer, buffers._buffer, buffers.Stranger, buffers.__version__, block_policies._x\n"
    )
    assert private_uses(file, "fsdp_runtime.train.job") == [
        "dbuffer.Stranger", "dbuffer._buffer", "fsdp_runtime._wrap.fully_shard",
        "fsdp_runtime.block_policies._x", "layout_planner.Stranger", "ragged_shard.testing.Stranger",
    ]  # fmt: skip
