"""Every check and every job of the workspace, each in its own environment: `./run` lists them, `./run NAME` runs one.

uv builds the environments where it is installed (seconds), virtualenv and pip elsewhere. `constraints.txt` pins torch
for all of them, except in `versions`.
"""

import ctypes.util
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
LINT = ["ruff>=0.15,<0.18", "check-jsonschema>=0.33", "pre-commit>=4", "zizmor>=1.14"]
TYPECHECK = ["mypy>=2.0,<3"]
# What `typecheck` covers next to the sources.
CHECKED = ["tests", "bench", *(f"packages/{name}/tests" for name in PACKAGES)]
UNTYPED = [
    "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-decorators", "--allow-any-generics",
    "--no-warn-return-any", "--implicit-reexport", "--follow-imports=silent",
    # Tests reach into torch's objects, whose stubs say Optional or `Tensor | Module`, and replace methods on purpose.
    "--disable-error-code=union-attr", "--disable-error-code=method-assign", "--allow-untyped-globals",
]  # fmt: skip
COVERAGE = ["coverage>=7.10"]
RELEASE = ["build", "hatchling>=1.26", "packaging>=24", "twine>=6.1"]
# What `versions` runs; each becomes the session's own constraint.
TORCH = {"torch-2.11": "torch==2.11.*", "torch-2.13": "torch==2.13.*", "torch-newest": "torch>=2.13"}
# All that there is on the GPU machines that `bench/gpu.sh` is for.
BARE = ["torch", "triton>=3.6", "numpy", "pytest>=8.4"]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1,<2", LINT[0]]
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


def _prepare(session: nox.Session, constraint: Path = ROOT / "constraints.txt") -> None:
    session.env.update(PIP_CONSTRAINT=str(constraint), UV_CONSTRAINT=str(constraint))
    if links := _find_links():
        session.env.setdefault("UV_FIND_LINKS", links)


def _workspace(*requirements: str) -> list[str]:
    """What pip or uv is asked for to have all five packages from this checkout, and more."""
    editable = [argument for name in PACKAGES for argument in ("-e", str(_folder(name)))]
    # pip looks for a package that is also named without its folder in the index, where ours are not.
    return [*editable, *(line for line in requirements if line not in PACKAGES)]


def _pytest(session: nox.Session, *selected: str, marks: str = "not gpu") -> list[str]:
    """The command that runs all tests that need no GPU, on all cores; ranks are many, so each has one thread."""
    session.env["OMP_NUM_THREADS"] = "1"
    session.env["RAGGED_SHARD_NATIVE_STACKS"] = "1"  # a crash in a thread of gloo's is to say where
    return ["pytest", "-n", "auto", "-m", marks, *(session.posargs or selected)]


def _measured(session: nox.Session, command: list[str]) -> None:
    """Run pytest under coverage, ranks and other subprocesses included, and print one figure for each package."""
    folder = Path(session.create_tmp()).resolve()
    session.env["COVERAGE_FILE"] = str(folder / "coverage")
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", *command)
    session.run("coverage", "combine", "--quiet", silent=True)
    for unfinished in folder.glob("coverage.*"):  # of processes that a test has killed
        unfinished.unlink()
    found = {}
    for name in PACKAGES:
        report = ["coverage", "report", "--format=total", f"--include={_folder(name) / 'src'}/*"]
        total = str(
            session.run(*report, silent=True, success_codes=[0, 1])
        ).strip()  # 1: nothing of it has run
        found[name] = f"{total} %" if total.isdigit() else "not run"
    session.log("coverage of lines: " + ", ".join(f"{name} {total}" for name, total in found.items()))


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU, on all cores; from Python 3.12 on, with the coverage.

    Those marked long are left out, unless arguments for pytest are given.
    """
    _prepare(session)
    session.install(*_workspace(*COVERAGE, *_test_requirements(*PACKAGES)))
    marks = "not gpu" if session.posargs else "not gpu and not long"
    command = _pytest(session, "tests", "packages", marks=marks)
    if sys.version_info < (3, 12):  # tracing doubles the time there; sys.monitoring costs a few percent
        session.run(*command)
        session.log(
            "coverage is measured from Python 3.12 on; `./run coverage` measures it here, in twice the time"
        )
        return
    session.env["COVERAGE_CORE"] = "sysmon"
    _measured(session, command)


@nox.session
def order_mutants(session: nox.Session) -> None:
    """Take out each wait, event and record in turn: do the tests on the simulated device notice? Takes minutes."""
    _prepare(session)
    session.install(*_workspace(*_test_requirements("dbuffer", "block-optim", "fsdp-runtime")))
    session.run("python", "tools/order_mutants.py", *session.posargs)


@nox.session
def memory(session: nox.Session) -> None:
    """Run dbuffer's and fsdp-runtime's tests so that writes into released memory are found; slow."""
    _prepare(session)
    session.install(*_workspace(*_test_requirements(*PACKAGES)))
    # What is freed is unmapped at once from 8 KiB on, so that a late access is a fault.
    tunables = "glibc.malloc.mmap_threshold=8192:glibc.malloc.mmap_max=2000000:glibc.malloc.perturb=165"
    environment = {"DBUFFER_DEBUG_MEMORY": "1", "GLIBC_TUNABLES": tunables}
    if library := ctypes.util.find_library("c_malloc_debug"):  # glibc's own checks need it from 2.34 on
        environment |= {"LD_PRELOAD": library, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "90"}
    else:
        session.warn("no libc_malloc_debug here: only dbuffer's own memory is checked")
    tests = ["packages/dbuffer/tests", "packages/fsdp-runtime/tests"]
    slow = ["--ignore-glob=*/tests/conformance/*", "--ignore-glob=*/tests/parity/*"]
    session.run(*_pytest(session, *tests), *slow, env=environment)


@nox.session
def multihost(session: nox.Session) -> None:
    """Train on two and three hosts (network namespaces) and break what can break between them; needs root, minutes."""
    _prepare(session)
    session.install(*_workspace(*_test_requirements("fsdp-runtime")))
    session.run("python", "-m", "tools.multihost", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Give damaged input to all that reads from outside, 100,000 times, and write the table into RELIABILITY.md."""
    _reliability(session, "fuzz.py")


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill and freeze ranks and launchers 300 times, and write the table into RELIABILITY.md. Takes an hour."""
    _reliability(session, "chaos.py")


@nox.session
def soak(session: nox.Session) -> None:
    """Train 20,000 steps with every optimizer, and write what grew into RELIABILITY.md. Takes hours."""
    _reliability(session, "soak.py")


@nox.session
def peers(session: nox.Session) -> None:
    """Give FSDP2, DeepSpeed and ours the same faults, and write what each says into RELIABILITY.md."""
    session.env["DS_BUILD_OPS"] = "0"
    _reliability(session, "peers.py", "deepspeed>=0.19")


def _reliability(session: nox.Session, script: str, *others: str) -> None:
    """Run one of the long commands that write sections of RELIABILITY.md."""
    _prepare(session)
    session.install(*_workspace(*_test_requirements(*PACKAGES)))
    if others:  # whose builds look for torch
        session.install("setuptools", "wheel")
        session.install("--no-build-isolation", *others)
    session.env["OMP_NUM_THREADS"] = "1"
    folder = _folder("fsdp-runtime") / "tests" / "reliability"
    session.run("python", str(folder / script), *(session.posargs or ["--write"]))


@nox.session
def integrations(session: nox.Session) -> None:
    """Run the tests that need packages of other projects: trainers, transformers, peft, torchao. Skipped elsewhere."""
    _prepare(session)
    others = (
        "transformers>=5",
        "peft>=0.17",
        "accelerate>=1.15",
        "torchao>=0.18",
        "lightning-fabric>=2.6",
        "torchtitan>=0.3",
        "torchft>=0.2",
        "triton",
    )
    session.install(*_workspace(*_test_requirements(*PACKAGES), *others))
    tests = (
        "test_accelerate.py", "test_fabric.py", "test_lora.py", "test_load_transformers.py",
        "test_transformers_trainer.py", "test_extensions_torchao.py", "test_torchtitan.py",
        "train/test_train_float8.py", "parity/test_hf.py", "parallel/test_parallel.py", "integrations",
        "reliability/test_torchft.py",
    )  # fmt: skip
    session.run(*_pytest(session, *(f"packages/fsdp-runtime/tests/{name}" for name in tests)))


@nox.session
def verl(session: nox.Session) -> None:
    """Run the tests of the adapter to verl, apart from the others: verl pins an older transformers."""
    _prepare(session)
    served = ("uvicorn", "fastapi", "pyzmq", "cachetools", "msgspec")  # which verl imports for its delta sync
    session.install(*_workspace(*_test_requirements(*PACKAGES), "verl>=0.9.1", *served))
    session.run(
        "python", "-c", "import verl.workers.engine"
    )  # compiled once, not by all ranks at the same time
    tests = (
        "packages/fsdp-runtime/tests/test_verl.py",
        "packages/fsdp-runtime/tests/integrations",
        "-k",
        "verl",
    )
    session.run(*_pytest(session, *tests))


@nox.session
def coverage(session: nox.Session) -> None:
    """Run every test that needs no GPU with coverage on any Python, however long it takes."""
    _prepare(session)
    session.install(*_workspace(*COVERAGE, *_test_requirements(*PACKAGES)))
    _measured(session, _pytest(session, "tests", "packages"))


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
@nox.parametrize("torch", list(TORCH), ids=list(TORCH))
def versions(session: nox.Session, torch: str) -> None:
    """Run the packages' tests on one Python and one torch: `./run "versions-3.12(torch-2.11)"`."""
    constraint = Path(session.create_tmp()).resolve() / "constraints.txt"
    constraint.write_text(TORCH[torch] + "\n")
    _prepare(session, constraint)
    session.install(*_workspace(*_test_requirements(*PACKAGES)))
    session.run("python", "-c", "import sys, torch; print('Python', sys.version, 'torch', torch.__version__)")
    session.run(*_pytest(session, "packages"))


@nox.session(python=False)
def dev(session: nox.Session) -> None:
    """Make an environment for editors, plain pytest and GPU runs: `./run dev`, in .venv, or `./run dev -- FOLDER`."""
    _prepare(session)
    folder = Path(session.posargs[0] if session.posargs else ".venv").resolve()
    tools = ["nox", *COVERAGE, *LINT, *TYPECHECK, *BENCH]
    session.run(sys.executable, "-m", "virtualenv", str(folder), external=True)
    wanted = _workspace(*tools, *_test_requirements(*PACKAGES))
    session.run(str(folder / "bin" / "python"), "-m", "pip", "install", *wanted, external=True)


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
def gpu_guard(session: nox.Session) -> None:
    """Check without a GPU what will run on one, with torch, triton, numpy and pytest alone.

    Collects the tests marked gpu (skipped without a CUDA device), runs those marked gpu_guard, and `gpu.sh --dry-run`.
    """
    _prepare(session)
    session.install(*BARE)
    session.env["PYTHONPATH"] = os.pathsep.join(str(_folder(name) / "src") for name in PACKAGES)
    session.env["OMP_NUM_THREADS"] = "1"
    tests = session.posargs or ["packages", "tests"]
    session.run("python", "-m", "pytest", "-m", "gpu or gpu_guard", "--durations=10", *tests)
    out = Path(session.create_tmp()).resolve() / "gpu"
    dry = ["bench/gpu.sh", str(out), "--dry-run", "--skip-tests"]
    session.run("sh", *dry, env={"PYTHON": str(Path(session.bin) / "python")}, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel of every package into dist/ and check their metadata."""
    _prepare(session)
    session.install(*RELEASE)
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
    shutil.copytree(
        _folder(package) / "docs", outside / "docs", dirs_exist_ok=True
    )  # whose examples tests run
    session.chdir(outside)
    session.run("python", str(ROOT / "tests" / "installed_alone.py"), package, *PACKAGES)
    session.install(*_test_requirements(package), "--find-links", str(wheels))
    session.env["OMP_NUM_THREADS"] = "1"
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(outside), "-p", "no:cacheprovider"]
    session.run("pytest", "-n", "auto", "-m", "not gpu", *settings, *(session.posargs or [str(tests)]))


@nox.session
def release(session: nox.Session) -> None:
    """Release one package: `./run release -- PACKAGE [VERSION] [--dry-run]`; see CONTRIBUTING.md."""
    _prepare(session)
    session.install(*RELEASE)
    session.run("python", str(ROOT / "tools" / "release.py"), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff, the workflows with check-jsonschema and zizmor, and pre-commit's settings."""
    _prepare(session)
    session.install(*LINT)
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", ".")
    workflows = [str(path) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    for schema in ("vendor.github-workflows", "custom.github-workflows-require-timeout"):
        session.run("check-jsonschema", "--builtin-schema", schema, *workflows)
    session.run("zizmor", "--offline", "--no-progress", "--strict-collection", "--pedantic", ".github")
    session.run("pre-commit", "validate-config")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check the sources with mypy in strict mode; tests and benchmarks without asking them for annotations."""
    _prepare(session)
    typed = ["packaging>=24", "safetensors[numpy]>=0.4.3", "rich>=13.7", "matplotlib>=3.9", "asv>=0.6.5,<0.7"]
    session.install(*_workspace(*TYPECHECK, *typed, *_test_requirements(*PACKAGES)))
    for name in PACKAGES:
        session.run("mypy", str(_folder(name) / "src"))
    session.run("mypy", "tools")
    for top in CHECKED:
        if (ROOT / top / "__init__.py").exists():
            session.run("mypy", *UNTYPED, top)
            continue
        # Tests import helpers by name where a conftest.py puts their folder on the path, else relatively; mypy is told
        # the same, one folder at a time.
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            named = (folder / "conftest.py").exists()
            session.env["MYPYPATH"] = f"{folder}{os.pathsep}{ROOT / top}" if named else str(folder.parent)
            session.run("mypy", *UNTYPED, *sorted(str(path) for path in folder.glob("*.py")))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages into site/, and check what they load and where links lead; `-- serve` shows them instead."""
    _prepare(session)
    session.install(*DOCS)  # sources are read, not imported: no torch; ruff formats signatures
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    if session.posargs:
        session.run("mkdocs", *session.posargs)
        return
    session.run("mkdocs", "build", "--strict", "--quiet")
    session.run("python", str(ROOT / "tools" / "docs_check.py"), "site")


@nox.session
def bench(session: nox.Session) -> None:
    """One quick pass of every benchmark on the working tree; `asv run` keeps the history."""
    _prepare(session)
    session.install(*_workspace(*BENCH))
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
    editable = [argument for name in PACKAGES[:-1] for argument in ("-e", str(_folder(name)))]
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
    """Rewrite the figures and pictures of the READMEs (the tests fail where they are out of date)."""
    _prepare(session)
    session.install("-e", str(_folder("layout-planner")))
    session.run("python", str(_folder("layout-planner") / "tools" / "write_readme.py"))
