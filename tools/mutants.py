"""Change one place of the sources at a time and count how many of these mutants the tests find.

    nox -s 'nightly(mutants)' -- --number 40 --seed 1
    nox -s 'nightly(mutants)' -- --number 300 --programs --jobs 2 --record FILE
    nox -s 'nightly(mutants)' -- --alive FILE --tests 'packages/*/tests/test_*.py' --record OTHER

A mutant flips a comparison, an operator, `and`, `not` or a constant, or leaves a statement out. Its tests are those
that name what its module defines; with `--programs`, some programs of `tests.programs` that call its function; with
`--tests`, the tests of these files that call it. The tree is not touched: a mutant is a copy of the sources, tested in
a fork of a process with torch. `order_mutants.py` makes other changes with the same functions.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
USUAL = "not gpu and not long"
LEFT_OUT = (
    "_torch_compat", "_triton", "kernels/triton", "testing/", "train/", "integrations/", "__main__", "_cli", "_svg",
)  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip

Change = Callable[[ast.AST], ast.AST | None]  # a node to the changed one; None if there is nothing to change


@dataclass(frozen=True)
class Mutant:
    """One change of a file.

    Attributes:
        path: the file, relative to the repository.
        number: index among the file's places that the kind of change applies to.
        line: its line.
        function: qualified name of the function that it is in.
        code, changed: source before and after.
    """

    path: Path
    number: int
    line: int
    function: str
    code: str
    changed: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code[:60]!r} -> {self.changed[:60]!r}"


def changed(node: ast.AST) -> ast.AST | None:
    """The `Change` of a random mutant."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and "'" not in ast.unparse(node):
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ast.Pass()
    return None


def places_of(tree: ast.Module, change: Change) -> list[tuple[ast.AST, str, ast.AST]]:
    """Nodes of function bodies that can be changed, their function, and the changed node.

    Without errors that are raised, whose words are not tested, and `strict=True` of zip.
    """
    places = []
    pending: list[tuple[ast.AST, tuple[str, ...], bool]] = [(tree, (), False)]
    while pending:
        node, names, inside = pending.pop()
        if inside and (other := change(node)):
            places.append((node, ".".join(names), other))
        if isinstance(node, ast.Raise) or getattr(node, "arg", "") == "strict":
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names, inside = (*names, node.name), inside or isinstance(node, ast.FunctionDef)
        pending += [(child, names, inside) for child in ast.iter_child_nodes(node)]
    return places


def mutants_of(path: Path, change: Change) -> list[Mutant]:
    """All mutants of a file."""
    return [
        Mutant(path, number, getattr(node, "lineno", 0), name, ast.unparse(node), ast.unparse(other))
        for number, (node, name, other) in enumerate(places_of(ast.parse((ROOT / path).read_text()), change))
    ]


class _Replace(ast.NodeTransformer):
    def __init__(self, replacements: dict[ast.AST, Callable[[ast.AST], ast.AST]]) -> None:
        self._replacements = replacements

    def visit(self, node: ast.AST) -> ast.AST:
        visited: ast.AST = self.generic_visit(node)
        return self._replacements[node](visited) if node in self._replacements else visited


def write(
    folder: Path,
    path: Path,
    change: Change,
    number: int | None,
    note: Callable[[int, ast.AST], ast.AST] | None = None,
) -> None:
    """Write a file's mutant into a copy of the sources; with `note`, replace every place by `note(number, node)`."""
    tree = ast.parse((ROOT / path).read_text())
    replacements: dict[ast.AST, Callable[[ast.AST], ast.AST]] = {}
    for index, (node, _, other) in enumerate(places_of(tree, change)):
        if note is not None:
            replacements[node] = lambda visited, index=index: note(index, visited)  # type: ignore[misc]
        elif index == number:
            replacements[node] = lambda _, other=other: other  # type: ignore[misc]
    (folder / path).write_text(ast.unparse(ast.fix_missing_locations(_Replace(replacements).visit(tree))))


@contextmanager
def copied_sources() -> Iterator[Path]:
    """A copy of the packages' sources, in a temporary folder that is laid out as the repository."""
    with tempfile.TemporaryDirectory() as folder:
        for source in ROOT.glob("packages/*/src"):
            shutil.copytree(source, Path(folder) / source.relative_to(ROOT))
        yield Path(folder)


def import_torch() -> None:
    """Import torch before processes are forked; our packages come from each mutant's copy."""
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor
    import torch.utils.checkpoint

    torch.set_num_threads(1)


def status_of(
    folder: Path, tests: list[str], limit: float, run: Callable[[list[str]], int] | None = None
) -> int:
    """Exit status of the tests on a copy of the sources, in a forked process; 124 after `limit` seconds.

    Args:
        folder: the copy.
        tests: test files or node ids.
        limit: in seconds.
        run: called with pytest's arguments in the forked process; by default `pytest.main`.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _run_tests(folder, tests, run)
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return abs(os.waitstatus_to_exitcode(status))
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _run_tests(folder: Path, tests: list[str], run: Callable[[list[str]], int] | None) -> int:
    import pytest

    sources = [str(ROOT), *map(str, sorted(folder.glob("packages/*/src")))]
    sys.path[:0] = sources
    os.environ["PYTHONPATH"] = os.pathsep.join(sources)
    os.chdir(ROOT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    arguments = ["-x", "-q", "-m", USUAL, "-p", "no:cacheprovider", f"--rootdir={ROOT}", *tests]
    return int((run or pytest.main)(arguments))


def results(
    mutants: list[Mutant], change: Change, tests: Callable[[Mutant], list[str]], limit: float, jobs: int
) -> Iterator[tuple[Mutant, int]]:
    """Each mutant, and the exit status of its tests; 0 if it has none."""

    def status(mutant: Mutant) -> int:
        chosen = tests(mutant)
        if not chosen:
            return 0
        with copied_sources() as folder:
            write(folder, mutant.path, change, mutant.number)
            return status_of(folder, chosen, limit)

    import_torch()
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(mutants, pool.map(status, mutants), strict=True)


def tests_of(path: Path, most: int) -> list[str]:
    """Test files of the package that name the module or what it and its importers define, the most telling first."""
    package = ROOT / Path(*path.parts[:2])
    stem = path.stem.strip("_") if path.stem != "__init__" else path.parent.name.strip("_")
    imports = re.compile(
        rf"^ *from \S*\b{path.stem} import|^ *from .* import .*\b{path.stem}\b", re.MULTILINE
    )
    importers = [other for other in package.glob("src/**/*.py") if imports.search(other.read_text())]
    scores: dict[str, float] = {}
    for weight, files in ((1.0, [ROOT / path]), (0.1, importers)):
        names = {stem} if weight == 1 else set()
        for file in files:
            body = ast.parse(file.read_text()).body
            names |= {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        words = re.compile(rf"\b({'|'.join(sorted(map(re.escape, names)))})\b")
        for test in package.glob("tests/**/test_*.py"):
            name, text = str(test.relative_to(ROOT)), test.read_text()
            mentions = len(set(words.findall(text))) if names else 0
            scores[name] = scores.get(name, 0) + weight * mentions + 5 * weight * (stem in test.stem)
    return sorted((test for test in scores if scores[test]), key=lambda test: (-scores[test], test))[:most]


def paths_of_core(under: Sequence[str] = ("",), without: Sequence[str] = ()) -> list[Path]:
    """Files of the sources that mutants are made of, whose paths have one text of `under` and none of `without`."""
    paths = sorted(path.relative_to(ROOT) for path in ROOT.glob("packages/*/src/**/*.py"))
    kept = [path for path in paths if not any(part in path.as_posix() for part in (*LEFT_OUT, *without))]
    return [path for path in kept if any(part in path.as_posix() for part in under)]


def recorded(path: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """Results by file and number of the mutant."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {(answer["path"], answer["number"]): answer for answer in map(json.loads, lines)}


def sample_of(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that the command's options ask for, without those that are in the record already."""
    if options.alive:
        alive = [place for place, answer in recorded(options.alive).items() if answer["status"] == 0]
        sample = [mutants_of(Path(path), changed)[number] for path, number in alive]
    else:
        kept = paths_of_core(options.under, options.without)
        mutants = [mutant for path in kept for mutant in mutants_of(path, changed)]
        sample = random.Random(options.seed).sample(mutants, min(options.number, len(mutants)))
    done = recorded(options.record)
    return [mutant for mutant in sample if (str(mutant.path), mutant.number) not in done]


def main() -> int:
    """Make the mutants, run the tests for each, print which ones live on and the share that was found."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=5, help="test files for a mutant, at most")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds for a mutant; more counts as found"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument(
        "--under", nargs="+", default=[""], help="mutants of files with such a text in their path"
    )
    parser.add_argument("--without", nargs="+", default=[], help="and with none of these")
    parser.add_argument("--alive", type=Path, help="the mutants that live on in this record, not new ones")
    parser.add_argument("--programs", action="store_true", help="run programs instead of tests")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=[],
        help="run the tests of these files, or of FILE::NAME, that call the function",
    )
    parser.add_argument("--most", type=int, default=16, help="programs or tests for a mutant, at most")
    parser.add_argument("--record", type=Path, help="a file for results, one in a line, as JSON")
    options = parser.parse_args()
    sample = sample_of(options)
    verdicts = {0: "LIVES", 124: "slow "}
    statuses = []
    for mutant, status, why in _answers(sample, options):
        statuses.append(status)
        print(f"{verdicts.get(status, 'found')}  {mutant}  {why}", flush=True)
        if options.record:
            with options.record.open("a") as file:
                told = {**dataclasses.asdict(mutant), "path": str(mutant.path), "status": status, "why": why}
                file.write(json.dumps(told) + "\n")
    print(
        f"{len(statuses) - statuses.count(0)} of {len(statuses)} mutants found, {statuses.count(124)} of them slow"
    )
    return 0


def _answers(sample: list[Mutant], options: argparse.Namespace) -> Iterator[tuple[Mutant, int, str]]:
    """Each mutant, its status and what found it."""
    if options.programs or options.tests:
        from . import reached

        yield from reached.results(sample, options)
        return
    for mutant, status in results(
        sample, changed, lambda m: tests_of(m.path, options.files), options.limit, options.jobs
    ):
        yield mutant, status, ""


if __name__ == "__main__":
    sys.exit(main())
