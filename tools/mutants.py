"""Changes one place of a package's source at a time and counts how many of these mutants the tests find.

    nox -s mutants -- --number 40 --seed 1 [arguments for pytest]

A mutant flips a comparison, an operator, `and`, `not` or a constant, or leaves a statement out. The tests that are run
for it are those that name what its module defines. The tree itself is not touched: mutants live in a copy.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = ("_torch_compat", "_triton", "testing/", "train/", "integrations/", "__main__", "_cli", "_svg")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


def mutated(node: ast.AST) -> ast.AST | None:
    """The node with one thing changed, or None if there is nothing to change."""
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


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(x, ast.JoinedStr) or isinstance(getattr(x, "value", 0), str) for x in ast.walk(node)
    )


def _in_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes of function bodies, without what raises an error, whose words are not tested, and `strict=True` of zip."""
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, inside = pending.pop()
        if inside:
            yield node
        if not isinstance(node, ast.Raise) and getattr(node, "arg", "") != "strict":
            inside = inside or isinstance(node, ast.FunctionDef)
            pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def places() -> list[tuple[Path, int]]:
    """Every place that can be changed: a file and the place's number in it."""
    found = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if not any(part in path.as_posix() for part in LEFT_OUT):
            nodes = [node for node in _in_functions(ast.parse(path.read_text())) if mutated(node)]
            found += [(path.relative_to(ROOT), number) for number in range(len(nodes))]
    return found


def mutant(path: Path, number: int) -> tuple[str, str]:
    """The changed source, and a line that says what was changed."""
    tree = ast.parse((ROOT / path).read_text())
    node = [node for node in _in_functions(tree) if mutated(node)][number]
    other = mutated(node)
    assert other is not None
    what = f"{path}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:60]!r} -> {ast.unparse(other)[:60]!r}"
    replace = ast.NodeTransformer()
    visit = replace.generic_visit
    replace.visit = lambda at: other if at is node else visit(at)  # type: ignore[assignment]
    return ast.unparse(ast.fix_missing_locations(replace.visit(tree))), what


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
            name, mentions = (
                str(test.relative_to(ROOT)),
                len(set(words.findall(test.read_text()))) if names else 0,
            )
            scores[name] = scores.get(name, 0) + weight * mentions + 5 * weight * (stem in test.stem)
    return sorted((test for test in scores if scores[test]), key=lambda test: (-scores[test], test))[:most]


def main() -> int:
    """Make the mutants, run the tests for each, print which ones live on and the share that was found."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--files", type=int, default=5, help="how many test files are run for a mutant, at most"
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds for a mutant; more counts as found"
    )
    options, arguments = parser.parse_known_args()
    found = total = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".nox", "dist", "site", "__pycache__")
        )
        sources = os.pathsep.join(map(str, [copy, *copy.glob("packages/*/src")]))
        for path, number in random.Random(options.seed).sample(places(), options.number):
            changed, what = mutant(path, number)
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu and not long", *arguments]
            begin = time.monotonic()
            (copy / path).write_text(changed)
            try:
                ended = subprocess.run(
                    [*command, *tests_of(path, options.files)], cwd=copy, env={**os.environ, "PYTHONPATH": sources},
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=options.limit, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                ended = 124
            (copy / path).write_text((ROOT / path).read_text())
            total, found = total + 1, found + (ended != 0)
            verdict = {0: "LIVES", 124: "slow "}.get(ended, "found")
            print(f"{verdict}  {time.monotonic() - begin:4.0f} s  {what}", flush=True)
    print(f"{found} of {total} mutants found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
