"""The workspace holds what its packages declare."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
# Imports go one way: a package may need those before it in this list, never those after it.
ORDER = ["layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime"]


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def requirements_of(lines):
    return {re.match(r"[\w.-]+", line)[0].lower() for line in lines}


def imports_of(package):
    """Top-level names that the package's sources import, anywhere in them."""
    found = set()
    for path in (ROOT / "packages" / package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    return found


def test_every_package_of_the_design_is_in_the_workspace_and_no_other():
    assert sorted(ORDER) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_declared_dependencies_equal_what_is_imported(package):
    declared = project(package)["project"]
    needed = requirements_of(declared["dependencies"])
    optional = {
        name
        for lines in declared.get("optional-dependencies", {}).values()
        for name in requirements_of(lines)
    }
    imported = {name.replace("_", "-") for name in imports_of(package)}
    third_party = imported & (
        set(PACKAGES) | {"torch", "numpy", "triton", "safetensors", "rich", "matplotlib", "transformers"}
    )
    assert third_party - {package} == needed | optional


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_packages_go_one_way(package):
    siblings = {name.replace("_", "-") for name in imports_of(package)} & set(PACKAGES)
    assert siblings <= set(ORDER[: ORDER.index(package) + 1])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_all_that_a_release_needs(package):
    folder = ROOT / "packages" / package
    module = folder / "src" / package.replace("-", "_")
    for path in (folder / "README.md", folder / "CHANGELOG.md", folder / "LICENSE", module / "py.typed"):
        assert path.is_file(), path
    assert project(package)["project"]["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    version = re.search(r'^__version__ = "(.+)"$', (module / "__init__.py").read_text(), re.MULTILINE)[1]
    newest = re.search(r"^## (.+)$", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest.split(" ")[0] in (version, "Unreleased")


def test_ci_runs_the_readme_test_command():
    commands = re.findall(
        r"^python3 -m pip install nox && python3 -m nox -s \w+$", (ROOT / "README.md").read_text(), re.M
    )
    sessions = [command.rsplit(" ", 1)[1] for command in commands]
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()
    defined = re.findall(r"^def ([a-z]\w*)\(session", (ROOT / "noxfile.py").read_text(), re.M)
    assert set(sessions) <= set(defined)


def test_only_the_constraints_file_pins_torch():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    assert not [name for name in PACKAGES if "torch==" in str(project(name))]
