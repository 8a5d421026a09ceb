"""The workspace holds what its packages declare."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
ORDER = ["layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime"]


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def requirements_of(lines):
    return {found[0].lower() for line in lines if (found := re.match(r"[\w.-]+", line))}


def imports_of(package):
    """Top-level names that the package's sources import, anywhere in them."""
    found = set()
    for path in (ROOT / "packages" / package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.split(".")[0])
    return found


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
        set(PACKAGES)
        | {"torch", "numpy", "triton", "safetensors", "matplotlib", "transformers", "accelerate"}
        | {"lightning-fabric", "torchtitan", "typing-extensions", "verl"}
    )
    through_torch: set[str] = set()
    assert third_party - {package} == (needed | optional) - through_torch


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_all_that_a_release_needs(package):
    folder = ROOT / "packages" / package
    module = folder / "src" / package.replace("-", "_")
    for path in (folder / "README.md", folder / "CHANGELOG.md", folder / "LICENSE", module / "py.typed"):
        assert path.is_file(), path
    assert project(package)["project"]["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    version = re.search(r'^__version__ = "(.+)"$', (module / "__init__.py").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version
    assert newest
    assert newest[1] in (version[1], "Unreleased")


def test_the_image_copies_what_is_there_and_installs_all_packages():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    sources = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()]
    assert all((ROOT / source).exists() for source in sources)
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(kept) == sorted(sources)
    assert re.search(r"^RUN pip install .* -r requirements.txt$", text, re.M)
    requirements = (ROOT / "requirements.txt").read_text()
    assert sorted(re.findall(r"^\./packages/([\w-]+)", requirements, re.M)) == PACKAGES
    assert re.search(r'^CMD \["fsdp-train"\]$', text, re.M)


def installs_of(text):
    """The words after each "pip install", to the end of its line or code span."""
    commands = re.findall(r"pip install\s+([^\n`#]+)", text)
    return [[re.sub(r"^['\"]+|['\"\\.,;:()]+$", "", word) for word in words.split()] for words in commands]


def needed_by(package):
    """The package, and those of ours that it depends on."""
    direct = requirements_of(project(package)["project"]["dependencies"]) & set(PACKAGES)
    return {package}.union(*map(needed_by, direct))


def test_no_message_or_page_installs_one_of_our_names_from_an_index():
    """They are not registered there: who registers one gets the users that such a command sends."""
    ours = "|".join(PACKAGES)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        path = ROOT / name
        if (
            path == Path(__file__)
            or path.suffix not in (".py", ".md", ".yml", ".sh", "")
            or not path.is_file()
        ):
            continue
        text = path.read_text()
        for words in installs_of(text):
            found = [w for w in words if re.fullmatch(rf"({ours})(\[.*|[=<>~!].*)?", w.replace("_", "-"))]
            assert not found, f"{name}: pip install {' '.join(words)}"
            folders = set(re.findall(rf"\./packages/({ours})", " ".join(words)))
            missing = set().union(*map(needed_by, folders)) - folders
            assert not missing, f"{name}: pip asks an index for {missing}: pip install {' '.join(words)}"
        extras = re.findall(rf"(?<![\w/])(?:{ours})\[\w+\]", text)
        assert not extras, f"{name}: {extras}"


def sessions_called(text):
    """The nox sessions that the lines of a script or of a README's shell blocks run."""
    return [line.split()[1:] for line in text.splitlines() if line.startswith("./run ")]


def sessions_defined():
    return set(re.findall(r"^def ([a-z]\w*)\(session", (ROOT / "noxfile.py").read_text(), re.M))


def test_the_readme_has_two_commands_and_ci_starts_with_the_second():
    readme = "\n".join(re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S))
    assert sessions_called(readme) == [["train"], ["tests"]]
    assert sessions_called((ROOT / ".ci" / "run").read_text())[0] == ["tests"]


@pytest.mark.parametrize(
    "path",
    [
        "README.md", "CONTRIBUTING.md", ".ci/run", ".github/workflows/cpu.yml", ".github/workflows/gpu.yml",
        ".devcontainer/devcontainer.json",
    ],
)  # fmt: skip
def test_the_sessions_that_a_file_names_exist(path):
    text = (ROOT / path).read_text()
    named = set(re.findall(r"(?:\./run|nox -s) +[\"']?([a-z]\w*)", text))
    named |= {name for call in sessions_called(text) for name in call if name.isidentifier()}
    assert named
    assert named <= sessions_defined()


def test_the_launcher_installs_the_nox_that_the_noxfile_needs():
    needed = re.search(r'^nox.needs_version = "(.+)"$', (ROOT / "noxfile.py").read_text(), re.M)
    installed = re.search(r"^nox='nox(.+)'$", (ROOT / "run").read_text(), re.M)
    assert needed
    assert installed
    assert needed[1] == installed[1]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_every_expression_of_a_workflow_is_closed_and_names_a_key_of_the_matrix(path):
    """What the linters of `./run lint` do not see."""
    text = path.read_text()
    expressions = re.findall(r"\$\{\{ ([^{}]+) \}\}", text)
    assert len(expressions) == text.count("${{") == text.count("}}")
    used = {name for expression in expressions for name in re.findall(r"\bmatrix\.(\w+)", expression)}
    assert used == set(re.findall(r"[{,] (\w+):", text))


def test_pre_commit_runs_the_versions_of_the_lint_session():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["sessions"]["dependency-groups"]
    hooks = re.findall(r"additional_dependencies: (\[.+\])", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks
    assert {name for hook in hooks for name in ast.literal_eval(hook)} <= set(groups["lint"])


def test_only_the_constraints_file_pins_torch():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    assert not [name for name in PACKAGES if "torch==" in str(project(name))]


def files_of_the_repository():
    """What is committed or would be; nothing that a tool made."""
    which = ["--cached", "--others", "--exclude-standard"]
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", *which]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.skipif(
    not (shutil.which("git") and (ROOT / ".git").exists()),
    reason="only git knows which files belong to the repository",
)
def test_no_file_names_a_package_registry():
    """A mirror or a proxy is the user's choice; pip's and uv's own settings say which."""
    hosts = (
        ("pypi", "org"), ("pythonhosted", "org"), ("pypi", "nvidia", "com"), ("download", "pytorch", "org"),
        ("anaconda", "org"), ("npmjs", "org"), ("npmjs", "com"), ("deb", "debian", "org"),
        ("archive", "ubuntu", "com"),
    )  # fmt: skip
    names = re.compile("|".join(re.escape(".".join(words)) for words in hosts).encode())
    naming = [
        str(path.relative_to(ROOT)) for path in files_of_the_repository() if names.search(path.read_bytes())
    ]
    assert naming == []


@pytest.mark.long
def test_modules_are_imported_where_new_tensors_are_on_meta_and_of_another_dtype():
    code = f"""
import importlib, pkgutil, torch
torch.set_default_dtype(torch.float64)
with torch.device("meta"):
    for package in map(importlib.import_module, {[package.replace("-", "_") for package in ORDER]}):
        for module in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_patches_of_old_faults_fit_the_sources(tmp_path):
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}  # it is no repository's
    for package in PACKAGES:
        shutil.copytree(ROOT / "packages" / package / "src", tmp_path / "packages" / package / "src")
    for patch in (ROOT / "tools" / "old_faults").glob("*.patch"):
        command = ["git", "apply", "--check", "-C1", "--recount", str(patch)]
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
