"""Note which functions of the sources each program of `tests.programs`, or each test, calls in all of its processes."""

import argparse
import ast
import hashlib
import importlib
import json
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .mutants import (
    ROOT,
    USUAL,
    Mutant,
    changed,
    copied_sources,
    import_torch,
    paths_of_core,
    places_of,
    status_of,
)

# A module of the noted copy. Ranks are other processes: what is being run is a number in memory that all share.
NOTES = """
import mmap, os
FOLDER = os.environ["REACHED"]
with open(FOLDER + "/now", "r+b") as now:
    NOW = mmap.mmap(now.fileno(), 4)
SEEN = set()
def note(name):
    key = NOW[:], name
    if key not in SEEN:
        SEEN.add(key)
        with open(FOLDER + "/calls", "ab", buffering=0) as calls:
            calls.write(f"{int.from_bytes(key[0], 'little')} {name}\\n".encode())
"""
Reached = dict[str, dict[str, float]]  # "path:function" to what calls it, and its seconds


class _Noted(ast.NodeTransformer):
    """Lets every function begin with a note."""

    def __init__(self, path: Path) -> None:
        self._path, self._names = path, list[str]()

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            visited: ast.AST = self.generic_visit(node)
            return visited
        self._names.append(node.name)
        self.generic_visit(node)
        if isinstance(node, ast.FunctionDef):
            call = f"__import__('reached_notes').note({f'{self._path}:' + '.'.join(self._names)!r})"
            node.body.insert(int(ast.get_docstring(node) is not None), ast.parse(call).body[0])
        self._names.pop()
        return node


@contextmanager
def noted_sources() -> Iterator[Path]:
    """A copy of the sources that notes calls; see `copied_sources`."""
    with copied_sources() as folder:
        for path in paths_of_core():
            tree = _Noted(path).visit(ast.parse((ROOT / path).read_text()))
            (folder / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))
        next(folder.glob("packages/*/src")).joinpath("reached_notes.py").write_text(NOTES)
        yield folder


def reached(
    sources: Path, what: str, files: Iterable[Path], run: Callable[[Callable[[str], None]], dict[str, float]]
) -> Reached:
    """What calls each function, from a file in the temporary folder if sources and `files` have not changed.

    Args:
        sources: see `noted_sources`.
        what: in the file's name, and in its key.
        files: whose change makes the result old.
        run: runs everything, in a process with noted sources. It is given a function to call with the name of what
            it runs next, and returns the seconds of those that have no fault.
    """
    texts = [what, *((ROOT / path).read_text() for path in (*sorted(paths_of_core()), *sorted(files)))]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"reached-{re.sub(r'[^a-z0-9]+', '-', what)[:60]}-{key}.json"
    if not cache.exists():
        with tempfile.TemporaryDirectory() as folder:
            _note(sources, Path(folder), cache, run)
    found: Reached = json.loads(cache.read_text())
    return found


def _note(
    sources: Path, folder: Path, cache: Path, run: Callable[[Callable[[str], None]], dict[str, float]]
) -> None:
    (folder / "now").write_bytes(bytes(4))
    (folder / "calls").touch()

    def noted(_: list[str]) -> int:
        os.environ["REACHED"] = str(folder)
        names: list[str] = []
        with open(folder / "now", "r+b") as file:
            now = mmap.mmap(file.fileno(), 4)

        def tell(name: str) -> None:
            names.append(name)
            now[:] = len(names).to_bytes(4, "little")

        seconds = run(tell)
        result: Reached = {}
        for line in (folder / "calls").read_text().splitlines():
            number, function = line.split(" ", 1)
            if number != "0" and (name := names[int(number) - 1]) in seconds:
                result.setdefault(function, {})[name] = seconds[name]
        cache.write_text(json.dumps(result))
        return 0

    if status_of(sources, [], 3600, noted):
        raise RuntimeError("what was to be noted did not run")


def _fault(name: str, limit: float) -> str:
    """The fault of a program, by "system seed"."""
    runs = importlib.import_module("tests.programs.runs")
    system, seed = name.split()
    return str(runs.outcome(_drawn(seed), simulated=system == "simulated", limit=limit).fault)


def _drawn(seed: str) -> Any:
    return importlib.import_module("tests.programs.program").draw(int(seed))


def programs_that_reach(sources: Path, first: int, end: int, system: str) -> Reached:
    """By function, the programs of some seeds that call it, as "system seed"."""

    def run(tell: Callable[[str], None]) -> dict[str, float]:
        fork_ranks()
        seconds = {}
        for name in (f"{system} {seed}" for seed in range(first, end)):
            tell(name)
            began = time.monotonic()
            if not _fault(name, 100.0):
                seconds[name] = time.monotonic() - began
        return seconds

    files = [path.relative_to(ROOT) for path in ROOT.glob("tests/programs/*.py")]
    return reached(sources, f"{system} {first} {end}", files, run)


class _Fork:
    """`subprocess.Popen` of the process that forks ranks: a fork of this one, which has imported everything."""

    def __init__(self, command: list[str], pass_fds: Sequence[int], **_: Any) -> None:
        from ragged_shard.testing import _fork_server

        self.pid = os.fork()
        if self.pid == 0:
            os.closerange(3, pass_fds[0])  # the other ends of sockets: they must close with the parent
            os.closerange(pass_fds[0] + 1, 4096)
            _fork_server.main(pass_fds[0], [])

    def wait(self, timeout: float | None = None) -> int:
        return os.waitpid(self.pid, 0)[1]


def import_all() -> None:
    """Import what programs need."""
    for name in ("ragged_shard.testing._fork_server", "fsdp_runtime", "tests.programs.runs"):
        importlib.import_module(name)


def fork_ranks() -> None:
    """Let ranks be forked from this process: no other one imports torch again."""
    import_all()
    pool: Any = importlib.import_module("ragged_shard.testing._pool")
    pool.subprocess = SimpleNamespace(Popen=_Fork, DEVNULL=None, TimeoutExpired=TimeoutError)


def _features(name: str) -> set[str]:
    program = _drawn(name.split()[1])
    fields = {f"{key} {value}" for key, value in vars(program).items() if isinstance(value, str | bool | int)}
    names = {action[0] for action in program.actions} | set(program.layers)
    return {name.split()[0], *(field for field in fields if not field.startswith("seed")), *names}


def choice(seconds: dict[str, float], most: int) -> list[str]:
    """Some of the programs: each has much that those before have not, for its time."""
    left, chosen, seen = {name: _features(name) for name in seconds}, list[str](), set[str]()
    while left and len(chosen) < most:
        best = max(left, key=lambda name: (len(left[name] - seen) + 1) / (seconds[name] + 0.5))
        chosen.append(best)
        seen |= left.pop(best)
    return chosen


def tests_that_reach(sources: Path, file: str, tests: Sequence[str]) -> Reached:
    """By function, those of some tests of a file that call it."""

    def run(tell: Callable[[str], None]) -> dict[str, float]:
        import pytest

        seconds: dict[str, float] = {}

        class Plugin:
            def pytest_runtest_logstart(self, nodeid: str) -> None:
                tell(nodeid)

            def pytest_runtest_logreport(self, report: Any) -> None:
                seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
                if not report.passed:
                    seconds[report.nodeid] = float("inf")

        options = ["-q", "-m", USUAL, "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        pytest.main([*options, *tests], plugins=[Plugin()])
        return {name: number for name, number in seconds.items() if number < float("inf")}

    return reached(sources, " ".join(sorted(tests)), [Path(file)], run)


def _merged(maps: Iterable[Reached]) -> Reached:
    result: Reached = {}
    for one in maps:
        for function, callers in one.items():
            result.setdefault(function, {}).update(callers)
    return result


def _before_the_body(tree: ast.Module) -> set[ast.AST]:
    """What runs when functions are defined, or allows no other expression: defaults, annotations, patterns, formats."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            found += [
                node.args,
                *getattr(node, "decorator_list", []),
                getattr(node, "returns", None) or node.args,
            ]
        if isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
        if isinstance(node, ast.match_case):
            found.append(node.pattern)
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            found.append(node.format_spec)
    return {inner for node in found for inner in ast.walk(node)}


class _Switched(ast.NodeTransformer):
    """Puts mutants of a file into its code; one of them is on."""

    def __init__(self, others: dict[ast.AST, tuple[ast.AST, int]]) -> None:
        self._others = others

    def visit(self, node: ast.AST) -> ast.AST:
        visited: ast.AST = self.generic_visit(node)
        if node not in self._others:
            return visited
        other, number = self._others[node]
        test = ast.parse(f"__import__('reached_notes').MUTANT == {number}", mode="eval").body
        if isinstance(visited, ast.stmt):
            assert isinstance(other, ast.stmt)
            return ast.If(test, [other], [visited])
        assert isinstance(visited, ast.expr)
        assert isinstance(other, ast.expr)
        return ast.IfExp(test, other, visited)


@contextmanager
def switched_sources(mutants: list[Mutant]) -> Iterator[tuple[Path, list[Mutant]]]:
    """A copy of the sources with all mutants that can be switched on, and these: the first one has number 1."""
    switched = []
    with copied_sources() as folder:
        for path in {mutant.path for mutant in mutants}:
            tree = ast.parse((ROOT / path).read_text())
            places, fixed = places_of(tree, changed), _before_the_body(tree)
            others = {}
            for mutant in mutants:
                if mutant.path == path and places[mutant.number][0] not in fixed:
                    switched.append(mutant)
                    others[places[mutant.number][0]] = places[mutant.number][2], len(switched)
            text = ast.unparse(ast.fix_missing_locations(_Switched(others).visit(tree)))
            (folder / path).write_text(text)
        notes = 'import os\nMUTANT = int(os.environ.get("MUTANT", 0))\n'
        next(folder.glob("packages/*/src")).joinpath("reached_notes.py").write_text(notes)
        yield folder, switched


def results(mutants: list[Mutant], options: argparse.Namespace) -> Iterator[tuple[Mutant, int, str]]:
    """Each mutant, the exit status of its programs or tests, and which of them found it.

    Args:
        mutants: to find.
        options: of the command `mutants`.
    """
    import_torch()
    files: dict[str, list[str]] = {}
    for text in options.tests:
        pattern, _, name = text.partition("::")
        for path in ROOT.glob(pattern):
            file = str(path.relative_to(ROOT))
            files.setdefault(file, []).append(f"{file}::{name}" if name else file)
    with ThreadPoolExecutor(options.jobs) as pool, noted_sources() as sources:
        if options.programs:
            parts = [(0, 75, "ours"), (75, 150, "ours"), (0, 60, "simulated")]
            maps = list(pool.map(lambda part: programs_that_reach(sources, *part), parts))
        else:
            maps = list(pool.map(partial(tests_that_reach, sources), files, files.values()))
    callers = _merged(maps)
    with switched_sources(mutants) as (folder, switched), ThreadPoolExecutor(options.jobs) as pool:
        paths = [str(ROOT), *map(str, sorted(folder.glob("packages/*/src")))]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.chdir(ROOT)
        import_all()

        def result(number: int, mutant: Mutant) -> tuple[Mutant, int, str]:
            seconds = callers.get(f"{mutant.path}:{mutant.function}", {})
            if not seconds:
                return mutant, 0, "not called"
            found = folder / f"found-{number}"

            def run(arguments: list[str]) -> int:
                os.environ["MUTANT"] = str(number)
                notes: Any = importlib.import_module("reached_notes")
                notes.MUTANT = number
                kind = _run_programs if options.programs else _run_tests
                return kind(found, seconds, options.most, arguments)

            status = status_of(folder, [], options.limit, run)
            why = found.read_text() if status else ""
            return mutant, status, why or ("" if status == 0 else f"status {status}")

        yield from pool.map(result, range(1, len(switched) + 1), switched)


def _run_programs(found: Path, seconds: dict[str, float], most: int, _: list[str]) -> int:
    found.write_text("import")
    fork_ranks()
    runs: Any = importlib.import_module("tests.programs.runs")
    with_fsdp2 = runs._fsdp2
    # FSDP2 is asked where ours raises. That ours sends no more than FSDP2 is left out: it would cost the time of two.
    runs._fsdp2 = lambda program, stopped, limit: (
        with_fsdp2(program, stopped, limit) if stopped else (None, "", "")
    )
    for name in choice(seconds, most):
        found.write_text(f"{name}: no end")
        fault = _fault(name, 20.0)
        if fault.startswith("hang"):
            fault = _fault(name, 40.0)  # the machine may be loaded
        if fault:
            found.write_text(f"{name}: {fault[:200]}")
            return 1
    return 0


def _run_tests(found: Path, seconds: dict[str, float], most: int, arguments: list[str]) -> int:
    import pytest

    found.write_text("import")
    fork_ranks()

    class Plugin:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            found.write_text(f"{nodeid}: no end")

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                found.write_text(report.nodeid)

    tests = sorted(seconds, key=seconds.__getitem__)[:most]
    return int(pytest.main([*arguments, *tests], plugins=[Plugin()]))
