"""Take out each wait, event and record in turn, and see whether the tests on the simulated device notice.

    python -m tools.order_mutants [--jobs 2] [--only TEXT]

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
import json
import os
import sys

from .mutants import ROOT, Mutant, copied_sources, import_torch, mutants_of, results, status_of, write

# Where streams and events are used. Works of dbuffer's own transports are for CPU ranks, where there are none.
SOURCES = (
    "dbuffer/src/dbuffer/_collectives.py",
    "dbuffer/src/dbuffer/memory",
    "fsdp-runtime/src/fsdp_runtime",
    "block-optim/src/block_optim/core",
    "block-optim/src/block_optim/muon",
    "block-optim/src/block_optim/shampoo",
)
# Of the host alone; measurements, which synchronize so that their figures are right; and a copy that `Tensor.to` makes
# on the host, which the simulated device does not see.
LEFT_OUT = ("train", "integrations", "meter.py", "token_loss.py")
TESTS = [
    "packages/dbuffer/tests/test_happens_before.py",
    "packages/fsdp-runtime/tests/test_happens_before.py",
    "packages/fsdp-runtime/tests/test_offloaded_activations.py",
    "packages/block-optim/tests/test_happens_before.py",
    "tests/programs/test_programs.py::test_drawn_programs_use_no_memory_without_an_order",
]
WAITS = ("wait", "wait_on_host", "synchronize")
CALLED_WAITS = ("wait", "arrive", "returned")  # results of functions that start something
LIMIT = 150  # seconds for the tests of a mutant
SHARE = 0.9

# (function, code) of the mutants that are not caught, and why that is right.
EXPLAINED: dict[tuple[str, str], str] = {
    ("_gather_neighbors", "layer.on(stream, after)"): (
        "the slices' event and the memory's last use are waited for separately"
    ),
    ("Reduction._unused", "self._streams.layer.wait_on_host(self._event)"): (
        "orders this rank after what others publish, not memory; tests on real ranks need it"
    ),
    ("Activations.__del__", "self._layer.wait(self._layer.record(self._stream))"): (
        "page-locked memory ends at the same time, and waits for the device"
    ),
    ("Activations.__del__", "self._layer.record(self._stream)"): (
        "page-locked memory ends at the same time, and waits for the device"
    ),
    ("Handle._complete", "self._host_wait.wait()"): (
        "of ranks on CPU, which have no streams; tests on real ranks need it"
    ),
    ("Pass.before_save", "layer.synchronize()"): (
        "the comparison of collectives that follows reads numbers of the host, not memory"
    ),
    ("GradBuffer.discard", "self.buffer.wait()"): (
        "no reduction uses memory that accepts gradients; only an interrupt of the host could leave one there"
    ),
}


def left_out(node: ast.AST) -> ast.expr | None:
    """The `mutants.Change` of a call that waits, records or orders."""
    if not isinstance(node, ast.Call):
        return None
    nothing = ast.Constant(None)
    if isinstance(node.func, ast.Name):
        if node.func.id in CALLED_WAITS and not node.args:
            return nothing
        bound = node.args[0] if node.func.id == "partial" else None
        waits = isinstance(bound, ast.Attribute) and bound.attr in WAITS
        return ast.parse("lambda: None", mode="eval").body if waits else None
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr in WAITS or node.func.attr == "record":
        return nothing
    after = node.args[1:2]
    if node.func.attr == "on" and not (after and isinstance(after[0], ast.Tuple) and not after[0].elts):
        return ast.Call(node.func, [*node.args[:1], ast.Tuple([], ast.Load())], [])
    return None


def all_mutants() -> list[Mutant]:
    """All of them."""
    mutants: list[Mutant] = []
    for source in SOURCES:
        top = ROOT / "packages" / source
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            if not any(part in LEFT_OUT for part in path.relative_to(ROOT).parts):
                mutants += mutants_of(path.relative_to(ROOT), left_out)
    return mutants


def tests_of_calls() -> dict[tuple[str, int], list[str]] | None:
    """Tests that make each call, by file and number; None if the tests fail."""
    with copied_sources() as folder:
        for path in {mutant.path for mutant in all_mutants()}:

            def noted(number: int, node: ast.AST, path: str = str(path)) -> ast.AST:
                call = "getattr(__import__('builtins'), 'note_call', lambda *_: None)"  # ranks note nothing
                note = ast.parse(f"{call}({path!r}, {number})", mode="eval").body
                return ast.parse(f"({ast.unparse(note)}, {ast.unparse(node)})[1]", mode="eval").body

            write(folder, path, left_out, None, noted)
        notes = folder / "notes.json"

        def run(arguments: list[str]) -> int:
            import pytest

            calls: dict[tuple[str, int], dict[str, None]] = {}

            def note_call(path: str, number: int) -> None:
                test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
                calls.setdefault((path, number), {})[test] = None

            builtins.note_call = note_call  # type: ignore[attr-defined]
            status = int(pytest.main(arguments))
            notes.write_text(json.dumps([(*call, list(tests)) for call, tests in calls.items()]))
            return status

        if status_of(folder, TESTS, 10 * LIMIT, run):
            return None
        return {(path, number): tests for path, number, tests in json.loads(notes.read_text())}


def table(statuses: list[tuple[Mutant, int]]) -> list[str]:
    """Lines of Markdown: how many are caught, and each mutant that is not."""
    missed = [mutant for mutant, status in statuses if not status]
    caught, files = len(statuses) - len(missed), len({mutant.path for mutant, _ in statuses})
    whys = [(m.function, m.code, EXPLAINED.get((m.function, m.code), "**not explained**")) for m in missed]
    return [
        f"{caught} of {len(statuses)} mutants in {files} files are caught ({caught / len(statuses):.0%}).",
        "",
        "| not caught | removed | why |",
        "| --- | --- | --- |",
        *(f"| `{function}` | `{code}` | {why} |" for function, code, why in whys),
    ]


def main() -> int:
    """Run the tests on every mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose path, function or code has this text")
    options = parser.parse_args()
    chosen = [m for m in all_mutants() if options.only in f"{m.path} {m.function} {m.code}"]
    import_torch()
    tests = tests_of_calls()
    if tests is None:
        print("the tests fail without any mutant; run them first", file=sys.stderr)
        return 1
    statuses: list[tuple[Mutant, int]] = []
    for mutant, status in results(
        chosen, left_out, lambda m: tests.get((str(m.path), m.number), []), LIMIT, options.jobs
    ):
        statuses.append((mutant, status))
        print(
            f"{'caught    ' if status else 'NOT CAUGHT'} {mutant.path}:{mutant.line} {mutant.code}",
            flush=True,
        )
    print(*table(statuses), sep="\n")
    missed = [mutant for mutant, status in statuses if not status]
    unexplained = [m for m in missed if (m.function, m.code) not in EXPLAINED]
    return int(bool(unexplained) or len(missed) > (1 - SHARE) * len(statuses))


if __name__ == "__main__":
    sys.exit(main())
