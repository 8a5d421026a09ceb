"""Take out each wait, event and record in turn, and see whether the tests on the simulated device notice.

    python tools/order_mutants.py [--jobs 2] [--only TEXT] [--write]

A mutant is a copy of the sources with one call changed:

    x.wait(...), arrive(), x.wait_on_host(...)    left out
    x.record()                                    None, which every wait takes for completed
    x.on(stream, after)                           waits for nothing
    partial(x.wait, event)                        does nothing

The tests run once on sources that note which test makes which of these calls; a mutant gets only the tests that make
its call. Prints a table, and exits with 1 where fewer than 90 % are caught or one that is not has no explanation below.
"""

import argparse
import ast
import builtins
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "packages/fsdp-runtime/docs/ORDER.md"
PACKAGES = ("layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")
# Where streams and events are used. Works of dbuffer's own transports are for CPU ranks, where there are none.
SOURCES = (
    "dbuffer/src/dbuffer/_collectives.py",
    "dbuffer/src/dbuffer/_handle.py",
    "dbuffer/src/dbuffer/memory",
    "fsdp-runtime/src/fsdp_runtime",
    "block-optim/src/block_optim/core",
    "block-optim/src/block_optim/muon",
    "block-optim/src/block_optim/shampoo",
)
# Of the host alone; and measurements, which synchronize so that their figures are right.
LEFT_OUT = ("train", "integrations", "watchdog.py", "meter.py", "tune.py")
TESTS = (
    "packages/dbuffer/tests/test_happens_before.py",
    "packages/fsdp-runtime/tests/test_happens_before.py",
    "packages/fsdp-runtime/tests/test_offloaded_optimizer.py",
    "packages/fsdp-runtime/tests/test_offloaded_blocks.py",
    "packages/block-optim/tests/test_happens_before.py",
)
WAITS = ("wait", "wait_on_host", "synchronize")
CALLED_WAITS = ("wait", "arrive", "returned")  # results of functions that start something
LIMIT = 150  # seconds for the tests of a mutant
SHARE = 0.9

# (function, code) of the mutants that are not caught, and why that is right.
EXPLAINED: dict[tuple[str, str], str] = {
    ("_gather_neighbors", "layer.on(stream, after)"): (
        "no: the slices' event and the memory's last use are waited for one by one; these events are the caller's own"
    ),
    ("share_amax", "streams.layer.on(streams.gather, after)"): (
        "no: the next gather takes memory of the compute stream's pool, and so waits for that stream anyway"
    ),
    ("_HostCopy.__init__", "self._layer.record()"): (
        "no: not reached; nothing that lies on a CPU is copied to the host, and such copies need pinned memory"
    ),
    ("_HostCopy.read", "self._layer.wait_on_host(self._event)"): (
        "no: not reached; nothing that lies on a CPU is copied to the host, and such copies need pinned memory"
    ),
    ("Stateful._complete", "self.synchronize()"): (
        "no: a state dict without it holds values from before the refresh, in order; other tests compare the values"
    ),
    ("GradBuffer.discard", "self.buffer.wait()"): (
        "no: no reduction uses memory that accepts gradients; only an interrupt of the host could leave one there"
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: of the file, in the packages.
        line: of the call.
        function: that it is in.
        code: what is changed.
        number: of the call among those that can be changed in this file.
    """

    path: str
    line: int
    function: str
    code: str
    number: int


class _Change(ast.NodeTransformer):
    """Finds the calls of a file that can be changed, and changes the one of a number; -1: has each noted when made."""

    def __init__(self, path: str, number: int | None = None) -> None:
        self.path, self.number = path, number
        self.found: list[Mutant] = []
        self._functions: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # ast's name
        """Remember where we are."""
        self._functions.append(node.name)
        visited = self.generic_visit(node)
        self._functions.pop()
        return visited

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """The same for classes."""
        self._functions.append(node.name)
        found = self.generic_visit(node)
        self._functions.pop()
        return found

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Change a call, where it is the one."""
        changed = _changed(node)
        node = self.generic_visit(node)  # type: ignore[assignment]
        if changed is None:
            return node
        number = len(self.found)
        function = ".".join(self._functions)
        self.found.append(Mutant(self.path, node.lineno, function, ast.unparse(node), number))
        if self.number == -1:
            note = f"__import__('builtins').note_call({self.path!r}, {number})"
            return ast.Subscript(
                ast.Tuple([ast.parse(note, mode="eval").body, node], ast.Load()), ast.Constant(1), ast.Load()
            )
        return changed if number == self.number else node


def _changed(node: ast.Call) -> ast.expr | None:
    """What a call becomes; None where it stays."""
    nothing = ast.Constant(None)
    if isinstance(node.func, ast.Name):
        if node.func.id in CALLED_WAITS and not node.args:
            return nothing
        if (
            node.func.id == "partial"
            and isinstance(node.args[0], ast.Attribute)
            and node.args[0].attr in WAITS
        ):
            return ast.parse("lambda: None", mode="eval").body
        return None
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr in WAITS or node.func.attr == "record":
        return nothing
    after = node.args[1:2]
    if node.func.attr == "on" and not (after and isinstance(after[0], ast.Tuple) and not after[0].elts):
        return ast.Call(node.func, [*node.args[:1], ast.Tuple([], ast.Load())], [])
    return None


def mutants() -> list[Mutant]:
    """All of them."""
    found: list[Mutant] = []
    for source in SOURCES:
        top = ROOT / "packages" / source
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            if not any(part in LEFT_OUT for part in path.relative_to(ROOT).parts):
                change = _Change(str(path.relative_to(ROOT / "packages")))
                change.visit(ast.parse(path.read_text()))
                found += change.found
    return found


@contextlib.contextmanager
def _copied() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            shutil.copytree(ROOT / "packages" / package / "src", Path(folder) / package / "src")
        yield Path(folder)


def _write(folder: Path, path: str, number: int) -> None:
    """Change one file of a copy."""
    tree = _Change(path, number).visit(ast.parse((ROOT / "packages" / path).read_text()))
    (folder / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))


def _tests_of_calls() -> dict[tuple[str, int], list[str]] | None:
    """For each call, by file and number, the tests that make it; None: the tests fail."""
    with _copied() as folder:
        for path in {mutant.path for mutant in mutants()}:
            _write(folder, path, -1)
        notes = folder / "notes.json"
        if not _passes(folder, list(TESTS), notes, 10 * LIMIT):
            return None
        return {(path, number): tests for path, number, tests in json.loads(notes.read_text())}


def _caught(mutant: Mutant, tests: list[str]) -> bool:
    """Whether one of the tests fails with a mutant."""
    if not tests:
        return False
    with _copied() as folder:
        _write(folder, mutant.path, mutant.number)
        return not _passes(folder, tests, None, LIMIT)


def _passes(folder: Path, tests: list[str], notes: Path | None, limit: float) -> bool:
    """Whether tests pass on a copy, in a child that is ended after so many seconds."""
    child = os.fork()
    if child == 0:
        _run_tests(folder, tests, notes)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run_tests(folder: Path, tests: list[str], notes: Path | None) -> None:
    """In a child: run the tests, and leave. Write which test made which calls to `notes`."""
    import pytest

    found: dict[tuple[str, int], dict[str, None]] = {}

    def note_call(path: str, number: int) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        found.setdefault((path, number), {})[test] = None

    builtins.note_call = note_call  # type: ignore[attr-defined]
    sys.path[:0] = [str(folder / package / "src") for package in PACKAGES]
    os.chdir(ROOT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *tests]))
    if notes is not None:
        notes.write_text(json.dumps([(path, number, list(names)) for (path, number), names in found.items()]))
    os._exit(status)


def _import_torch() -> None:
    """Once, before ranks of tests are forked: our packages come from each mutant's copy."""
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor
    import torch.utils.checkpoint

    torch.set_num_threads(1)


def table(results: list[tuple[Mutant, bool]]) -> list[str]:
    """Lines of Markdown: the count per file, and each mutant that is not caught."""
    caught = sum(was_caught for _, was_caught in results)
    files = Counter(mutant.path.split("/src/")[1] for mutant, _ in results)
    missed = [mutant for mutant, was_caught in results if not was_caught]
    missed_files = Counter(mutant.path.split("/src/")[1] for mutant in missed)
    return [
        f"{caught} of {len(results)} mutants are caught ({caught / len(results):.0%}).",
        "",
        "| file | mutants | caught |",
        "| --- | --- | --- |",
        *(f"| {name} | {count} | {count - missed_files[name]} |" for name, count in files.items()),
        "",
        "| not caught | removed | why |",
        "| --- | --- | --- |",
        *(
            f"| `{mutant.function}` | `{mutant.code}` | "
            f"{EXPLAINED.get((mutant.function, mutant.code), '**not explained**').removeprefix('no: ')} |"
            for mutant in missed
        ),
    ]


def main() -> int:
    """Run the tests on every mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose path, function or code has this text")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in f"{m.path} {m.function} {m.code}"]
    _import_torch()
    tests = _tests_of_calls()
    if tests is None:
        print("the tests fail without any mutant; run them first", file=sys.stderr)
        return 1
    results: list[tuple[Mutant, bool]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        asked = [tests.get((mutant.path, mutant.number), []) for mutant in chosen]
        for mutant, found in zip(chosen, pool.map(_caught, chosen, asked), strict=True):
            results.append((mutant, found))
            print(
                f"{'caught    ' if found else 'NOT CAUGHT'} {mutant.path}:{mutant.line} {mutant.code}",
                flush=True,
            )
    lines = table(results)
    print(lines[0])
    if options.write:
        before = PAGE.read_text().partition("## Mutants\n")[0]
        PAGE.write_text("\n".join([before + "## Mutants", "", *lines, ""]))
    unexplained = [m for m, found in results if not found and (m.function, m.code) not in EXPLAINED]
    return int(bool(unexplained) or sum(found for _, found in results) < SHARE * len(results))


if __name__ == "__main__":
    sys.exit(main())
