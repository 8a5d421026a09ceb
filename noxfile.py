"""Every check and every job of the workspace, each in an environment of its own: `nox -l` lists them.

uv builds the environments where it is installed (seconds), virtualenv and pip elsewhere.
`constraints.txt` pins torch for all of them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
# In dependency order: a package comes after all that it needs.
PACKAGES = ["layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime"]
LINT = ["ruff>=0.15,<0.18"]
TYPECHECK = ["mypy>=2.0,<3"]
BENCH = ["asv>=0.6.5,<0.7", "matplotlib>=3.9", "virtualenv"]


def _folder(package: str) -> Path:
    return ROOT / "packages" / package


def _project(package: str) -> dict:
    return nox.project.load_toml(_folder(package) / "pyproject.toml")


def _test_requirements(*packages: str) -> list[str]:
    groups = [nox.project.dependency_groups(_project(name), "test") for name in packages]
    return sorted({requirement for group in groups for requirement in group})


def _version(package: str) -> str:
    text = (_folder(package) / "src" / package.replace("-", "_") / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found, f"{package} has no __version__"
    return found[1]


def _find_links() -> str:
    """Local wheel folders that pip knows of; uv reads neither pip's variables nor pip's files."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    found = os.environ.get("PIP_FIND_LINKS", "") + " " + (listed.stdout if listed.returncode == 0 else "")
    return ",".join(dict.fromkeys(found.split()))


def _prepare(session: nox.Session) -> None:
    constraint = str(ROOT / "constraints.txt")
    session.env.update(PIP_CONSTRAINT=constraint, UV_CONSTRAINT=constraint)
    if links := _find_links():
        session.env.setdefault("UV_FIND_LINKS", links)


def _install_workspace(session: nox.Session, *requirements: str) -> None:
    editable = [part for name in PACKAGES for part in ("-e", str(_folder(name)))]
    session.install(*editable, *requirements)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU, on all cores."""
    _prepare(session)
    _install_workspace(session, *_test_requirements(*PACKAGES))
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("pytest", "-n", "auto", "-m", "not gpu", *(session.posargs or ["tests", "packages"]))


@nox.session(python=False)
def gpu_tests(session: nox.Session) -> None:
    """Run the tests marked gpu on this interpreter's CUDA torch; skip, with the reason, without one."""
    probe = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        session.skip("the interpreter that runs nox has no torch")
    if found.stdout.strip() == "0":
        session.skip("torch sees no CUDA device")
    sources = os.pathsep.join(str(_folder(name) / "src") for name in PACKAGES)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *(session.posargs or ["tests", "packages"])]
    session.run(*command, env={"PYTHONPATH": sources})


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel of every package into dist/ and check their metadata."""
    _prepare(session)
    session.install("build", "hatchling>=1.26", "twine>=6.1")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for name in PACKAGES:
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", "dist", str(_folder(name)), silent=True
        )
    session.run("twine", "check", "--strict", *(str(path) for path in sorted((ROOT / "dist").iterdir())))


@nox.session(reuse_venv=False, requires=["build"])
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """Install one package's wheel with what it declares and nothing else; test it outside the tree."""
    _prepare(session)
    wheels = ROOT / "dist"
    (wheel,) = wheels.glob(f"{package.replace('-', '_')}-{_version(package)}-*.whl")
    session.install(str(wheel), "--find-links", str(wheels))
    outside = Path(session.create_tmp()).resolve()
    tests = outside / "tests"
    shutil.rmtree(tests, ignore_errors=True)
    shutil.copytree(_folder(package) / "tests", tests)
    session.chdir(outside)
    session.run("python", str(ROOT / "tests" / "installed_alone.py"), package, *PACKAGES)
    session.install(*_test_requirements(package), "--find-links", str(wheels))
    session.env["OMP_NUM_THREADS"] = "1"
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(outside), "-p", "no:cacheprovider"]
    session.run("pytest", "-n", "auto", "-m", "not gpu", *settings, *(session.posargs or [str(tests)]))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    _prepare(session)
    session.install(*LINT)
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check every package's sources with mypy in strict mode."""
    _prepare(session)
    typed = ["safetensors[numpy]>=0.4.3", "rich>=13.7", "matplotlib>=3.9"]
    _install_workspace(session, *TYPECHECK, *typed)
    for name in PACKAGES:
        session.run("mypy", str(_folder(name) / "src"))


@nox.session
def bench(session: nox.Session) -> None:
    """One quick pass of every benchmark on the working tree; `asv run` keeps the history."""
    _prepare(session)
    _install_workspace(session, *BENCH)
    # A quick pass keeps nothing: its figures are no history, so its results go to the session's own folder.
    folder = Path(session.create_tmp()).resolve()
    config = json.loads((ROOT / "asv.conf.json").read_text())
    config.update(repo=str(ROOT), benchmark_dir=str(ROOT / "bench"), results_dir=str(folder / "results"))
    (folder / "asv.conf.json").write_text(json.dumps(config))
    settings = ["--config", str(folder / "asv.conf.json")]
    session.run("asv", *settings, "machine", "--yes", silent=True)
    session.run("asv", *settings, "check", "--python=same")
    quick = ["--quick", "--launch-method", "forkserver"]  # see bench/preload.py
    session.run("asv", *settings, "run", *quick, "--python=same", "--show-stderr", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Pretrain a small transformer on real text on all local ranks: `nox -s train -- --help` lists what it takes."""
    _prepare(session)
    editable = [part for name in PACKAGES[:-1] for part in ("-e", str(_folder(name)))]
    session.install(*editable, "-e", f"{_folder('fsdp-runtime')}[train]")
    session.run("fsdp-train", *session.posargs)


@nox.session
def plan(session: nox.Session) -> None:
    """Plan a real model: GPT-OSS-120B on 128 ranks, blocks of 32 rows, and draw one of its layers."""
    _prepare(session)
    session.install("-e", str(_folder("layout-planner")))
    chosen = ["--model", "gpt-oss-120b", "--world-size", "128", "--block", "rows:32"]
    session.run("layout-planner", "plan", *(session.posargs or chosen))
    if not session.posargs:
        session.run("layout-planner", "draw", *chosen, "--ranks", "0..15", "-o", "layout.svg")


@nox.session
def readme(session: nox.Session) -> None:
    """Write the figures and pictures of the READMEs anew (the tests fail where they are stale)."""
    _prepare(session)
    session.install("-e", str(_folder("layout-planner")))
    session.run("python", str(_folder("layout-planner") / "tools" / "write_readme.py"))
