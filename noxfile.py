"""Every check and job of the workspace, each in a separate environment: `./run` lists them, `./run NAME` runs one.

`constraints.txt` pins torch for all sessions except `versions`. uv builds the environments if it is installed.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
PACKAGES = ["layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime"]  # bottom up
FOLDERS = {name: ROOT / "packages" / name for name in PACKAGES}
SOURCES = os.pathsep.join(str(folder / "src") for folder in FOLDERS.values())
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["tool"]["sessions"]  # what sessions install
USUAL = "not gpu and not long"  # what `tests` runs
NIGHTLY = {name: f"tools.{name}" for name in ("mutants", "order_mutants", "old_faults", "multihost")}
NIGHTLY |= {name: f"checks.{name}" for name in ("fuzz", "chaos", "soak", "peers", "deadlocks")}
TORCH = {f"torch-{version}": f"torch=={version}.*" for version in ("2.11", "2.13", "2.14", "2.15")}
TORCH["torch-newest"] = "torch>=2.15"
# Tests reach into torch's objects, whose stubs say Optional or `Tensor | Module`, and replace methods on purpose.
UNTYPED = [
    "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-decorators", "--allow-any-generics",
    "--no-warn-return-any", "--implicit-reexport", "--follow-imports=silent", "--allow-untyped-globals",
    "--disable-error-code=union-attr", "--disable-error-code=method-assign",
]  # fmt: skip


def _group(*names: str) -> list[str]:
    """Requirements of the repository's groups."""
    return [line for name in names for line in nox.project.dependency_groups(GROUPS, name)]


def _test_requirements(*packages: str) -> list[str]:
    projects = [nox.project.load_toml(FOLDERS[name] / "pyproject.toml") for name in packages]
    return sorted({line for project in projects for line in nox.project.dependency_groups(project, "test")})


def _prepare(session: nox.Session, *requirements: str, constraint: Path = ROOT / "constraints.txt") -> None:
    """Set pip's, uv's and the tests' variables, and install requirements."""
    session.env.update(PIP_CONSTRAINT=str(constraint), UV_CONSTRAINT=str(constraint), OMP_NUM_THREADS="1")
    if links := os.environ.get("PIP_FIND_LINKS"):  # uv does not read pip's variables
        session.env.setdefault("UV_FIND_LINKS", ",".join(links.split()))
    if requirements:
        session.install(*requirements)


def _workspace(*requirements: str) -> list[str]:
    """Arguments of pip that install all five packages from this checkout, and `requirements`."""
    editable = [argument for folder in FOLDERS.values() for argument in ("-e", str(folder))]
    # pip looks for a package that is also named without its folder in the index, where it is missing.
    return [*editable, *(line for line in requirements if line not in PACKAGES)]


def _prepare_tests(session: nox.Session, *groups: str, **constraint: Path) -> None:
    """Prepare the session with the workspace, what its tests need, and groups."""
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # processes that tests start would compile all sources again
    _prepare(session, *_workspace(*_group(*groups), *_test_requirements(*PACKAGES)), **constraint)


def _pytest(session: nox.Session, *selected: str, marks: str = "not gpu") -> list[str]:
    """The command that runs tests on all cores. Ranks are many, so `_prepare` gives each one thread."""
    return ["pytest", "-n", "auto", "-m", marks, "--durations=30", *(session.posargs or selected)]


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU, on all cores; those marked long only if arguments for pytest are given."""
    _prepare_tests(session)
    session.run(*_pytest(session, "tests", "packages", marks="not gpu" if session.posargs else USUAL))


@nox.session
def tests_full(session: nox.Session) -> None:
    """Run what `tests` leaves out: other numbers of ranks, layouts and dtypes, parity, launches, long waits."""
    _prepare_tests(session)
    session.run(*_pytest(session, "tests", "packages", marks="not gpu and long"))


@nox.session
def programs(session: nox.Session) -> None:
    """Run new programs of tests/programs: `-- --minutes 60`, `-- --seed 7 --count 1`, `-- --system simulated`."""
    _prepare_tests(session)
    session.run("python", "-m", "checks.programs", *session.posargs)


@nox.session
def stress(session: nox.Session) -> None:
    """Run `tests` 20 times in random order, 5 of them on a loaded machine; list what failed once: tools/stress.py."""
    _prepare_tests(session, "stress")
    session.run("python", "tools/stress.py", *_pytest(session, marks=USUAL)[1:])  # arguments come last


@nox.session
def memory(session: nox.Session) -> None:
    """Run the tests of dbuffer and fsdp-runtime on glibc's checking allocator; late accesses to memory fail; slow."""
    _prepare_tests(session)
    # Freed memory of 8 KiB and more is unmapped at once, so that a late access is a fault.
    tunables = "glibc.malloc.mmap_threshold=8192:glibc.malloc.mmap_max=2000000:glibc.malloc.perturb=165"
    session.env.update(GLIBC_TUNABLES=tunables, MALLOC_CHECK_="3")
    session.env["LD_PRELOAD"] = "libc_malloc_debug.so.0"  # glibc's checks need it from 2.34 on
    session.run(*_pytest(session, "packages/dbuffer/tests", "packages/fsdp-runtime/tests"))


@nox.session
@nox.parametrize("job", list(NIGHTLY), ids=list(NIGHTLY))
def nightly(session: nox.Session, job: str) -> None:
    """Run a long check: mutants, several hosts, damaged input, killed ranks, long training, peers, deadlocks."""
    _prepare_tests(session)
    if job == "peers":  # DeepSpeed's build looks for torch
        session.env["DS_BUILD_OPS"] = "0"
        session.install("setuptools", "wheel")
        session.install("--no-build-isolation", "deepspeed>=0.19")
    writes = job not in ("mutants", "order_mutants", "old_faults")  # a page
    session.run("python", "-m", NIGHTLY[job], *(session.posargs or ["--write"] * writes))


@nox.session
@nox.parametrize("others", ["trainers", "verl"], ids=["trainers", "verl"])
def integrations(session: nox.Session, others: str) -> None:
    """Run tests and checks that need other projects' packages. verl pins an older transformers."""
    _prepare_tests(session, others)
    if others == "verl":  # compile once, not in all ranks at the same time
        session.run("python", "-c", "import verl.workers.engine")
    else:
        session.install("triton")  # torchtitan imports it
    packages = "|".join(re.split(r"\W", line.replace("-", "_"))[0] for line in _group(others))
    naming = re.compile(rf'"(?:{packages})[".]')  # a test that skips without a package names it
    tests = (*ROOT.glob("tests/*.py"), *ROOT.glob("packages/*/tests/**/*.py"))
    files = [path for path in tests if naming.search(path.read_text())]
    paths = {path if path.name.startswith("test_") else path.parent for path in files}
    session.run(*_pytest(session, *sorted(map(str, paths))))
    if not session.posargs:
        session.run("python", "-m", "checks.trainers")
        if others == "trainers":
            session.run("python", "-m", "checks.torchft")


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
@nox.parametrize("torch", list(TORCH), ids=list(TORCH))
def versions(session: nox.Session, torch: str) -> None:
    """Run the packages' tests on one Python and one torch: `./run "versions-3.12(torch-2.11)"`."""
    constraint = Path(session.create_tmp()).resolve() / "constraints.txt"
    constraint.write_text(TORCH[torch] + "\n")
    _prepare_tests(session, constraint=constraint)
    session.run(*_pytest(session, "packages"))


@nox.session(python=False)
def dev(session: nox.Session) -> None:
    """Make an environment for editors, plain pytest and GPU runs: `./run dev`, in .venv, or `./run dev -- FOLDER`."""
    _prepare(session)
    folder = Path(session.posargs[0] if session.posargs else ".venv").resolve()
    session.run(sys.executable, "-m", "virtualenv", str(folder), external=True)
    wanted = _workspace("nox", *_group("lint", "typecheck", "bench"), *_test_requirements(*PACKAGES))
    session.run(str(folder / "bin" / "python"), "-m", "pip", "install", *wanted, external=True)


@nox.session
def gpu_tests(session: nox.Session) -> None:
    """Run the tests marked gpu, then `bench/gpu.sh`, which keeps its figures: `./run gpu_tests -- OUT`."""
    _prepare_tests(session)
    device = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = session.run("python", "-c", device, silent=True)
    if not (name and name.strip()):
        session.log("gpu_tests: torch sees no CUDA device on this machine, so nothing ran")
        return
    session.log(f"gpu_tests on {name.strip()}")
    session.run("python", "-m", "pytest", "-m", "gpu", "--durations=10", "packages", "tests")
    out = session.posargs or [str(Path(session.create_tmp()).resolve() / "gpu")]
    session.run("sh", "bench/gpu.sh", *out, env={"PYTHON": str(Path(session.bin) / "python")}, external=True)


@nox.session
def gpu_guard(session: nox.Session) -> None:
    """Collect the tests marked gpu, run those marked gpu_guard, and `gpu.sh --dry-run`, with what a GPU machine has."""
    _prepare(session, *_group("bare"))
    session.env["PYTHONPATH"] = SOURCES
    folders = session.posargs or ["packages", "tests"]
    session.run("python", "-m", "pytest", "-m", "gpu or gpu_guard", "--durations=10", *folders)
    dry = ["bench/gpu.sh", str(Path(session.create_tmp()).resolve() / "gpu"), "--dry-run", "--skip-tests"]
    session.run("sh", *dry, env={"PYTHON": str(Path(session.bin) / "python")}, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel of every package into dist/ and check their metadata."""
    _prepare(session, *_group("build"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder in FOLDERS.values():
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", str(folder), silent=True)
    session.run("twine", "check", "--strict", *(str(path) for path in sorted((ROOT / "dist").iterdir())))


@nox.session(reuse_venv=False, requires=["build"])
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """Install one package's wheel with what it declares and nothing else; run the tests of its sdist."""
    _prepare(session)
    wheels = ROOT / "dist"
    (wheel,) = wheels.glob(f"{package.replace('-', '_')}-*.whl")  # `build` empties dist/ first
    session.install(str(wheel), "--find-links", str(wheels))
    (sdist,) = wheels.glob(f"{package.replace('-', '_')}-*.tar.gz")
    outside = Path(session.create_tmp()).resolve() / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(outside, ignore_errors=True)
    shutil.unpack_archive(sdist, outside.parent, filter="data")
    session.chdir(outside)
    session.run("python", str(ROOT / "checks" / "installed_alone.py"), package, *PACKAGES)
    session.install(*_test_requirements(package), "--find-links", str(wheels))
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(outside), "-o", "pythonpath="]
    session.run("pytest", "-n", "auto", "-m", USUAL, *settings, *(session.posargs or ["tests"]))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style with ruff, imports with import-linter, workflows with check-jsonschema and zizmor, Dockerfile."""
    _prepare(session, *_group("lint"))
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": f"{ROOT}{os.pathsep}{SOURCES}"})
    workflows = [str(path) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    for schema in ("vendor.github-workflows", "custom.github-workflows-require-timeout"):
        session.run("check-jsonschema", "--builtin-schema", schema, *workflows)
    session.run("zizmor", "--offline", "--no-progress", "--strict-collection", "--pedantic", ".github")
    session.run("hadolint", "Dockerfile")
    session.run("pre-commit", "validate-config")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check the sources with mypy in strict mode; tests and benchmarks without asking them for annotations."""
    _prepare_tests(session, "typecheck")
    for folder in (*(folder / "src" for folder in FOLDERS.values()), "tools"):
        session.run("mypy", str(folder))
    session.run("mypy", *UNTYPED, "bench", "examples")
    helpers = ["", *(f"/{name}" for name in ("train", "conformance", "parity", "parallel"))]
    session.env["MYPYPATH"] = os.pathsep.join(f"{FOLDERS['fsdp-runtime']}/tests{name}" for name in helpers)
    session.run("mypy", *UNTYPED, "checks")
    # Tests import helpers by name if the conftest.py on top puts their folder on the path, else relatively.
    for top in (ROOT / "tests", *(folder / "tests" for folder in FOLDERS.values())):
        for folder in sorted({path.parent for path in top.rglob("*.py")}):
            by_name = (top / "conftest.py").exists()
            session.env["MYPYPATH"] = f"{folder}{os.pathsep}{top}" if by_name else str(folder.parent)
            session.run("mypy", *UNTYPED, *sorted(str(path) for path in folder.glob("*.py")))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages into site/ and check their links and what they load; `-- serve` shows them instead."""
    _prepare(session, *_group("docs"))  # sources are read, not imported: no torch; ruff formats signatures
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.run("mkdocs", *(session.posargs or ["build", "--strict", "--quiet"]))


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark once on the working tree and keep nothing; `history` keeps figures."""
    *others, runtime = _workspace()
    # asv imports all of bench, also the GPU's part, which trains.
    _prepare(session, *others, f"{runtime}[train]", *_group("bench"))
    session.run("asv", "machine", "--yes", silent=True)
    session.run("asv", "check", "--python=same")
    quick = ["--quick", "--dry-run", "--launch-method=forkserver", "--python=same", "--show-stderr"]
    session.run("asv", "run", *quick, *session.posargs)


@nox.session
def history(session: nox.Session) -> None:
    """Measure commits with asv into bench/results, and render the pages: `-- main^!`; by default HEAD."""
    _prepare(session, *_group("bench"))
    session.run("asv", "machine", "--yes", silent=True)
    session.run("asv", "run", "--show-stderr", *(session.posargs or ["HEAD^!"]))
    session.run("asv", "publish")


@nox.session
def train(session: nox.Session) -> None:
    """Pretrain a small transformer on real text on all local ranks: `nox -s train -- --help` lists the options."""
    *others, runtime = _workspace()
    _prepare(session, *others, f"{runtime}[train]")
    del session.env["OMP_NUM_THREADS"]
    session.run("fsdp-train", *session.posargs)
