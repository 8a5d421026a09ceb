"""Damaged input for everything that is read from outside: one line of error or a right result, at bounded cost.

`python -m checks.fuzz --inputs 100000` prints the sums; `--write` puts them into RELIABILITY.md. One process for
all inputs of a kind, and another one when a signal has ended it. `--only NAME --seed S --first N --inputs 1` makes one
input again.
"""

import argparse
import contextlib
import faulthandler
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from random import Random
from types import FrameType

MEMORY = 1 << 30  # bytes that reading one small file may take
CPU_SECONDS = 10.0  # that it may take
LONGEST = 2000  # characters of a message


class Hung(BaseException):
    """An input took longer than allowed. No Exception: what is tested may catch those."""


class WrongError(Exception):
    """A result that is not right, or an error that is not one clear line."""


@dataclass(frozen=True)
class Target:
    """One input format.

    Attributes:
        name: what the table calls it.
        make: one input, from a generator.
        read: reads it, as users' programs do; raises one of `refusals`, or returns after a right result.
        refusals: the documented errors.
        shown: what users see of an error.
    """

    name: str
    make: Callable[[Random], object]
    read: Callable[[object], object]
    refusals: tuple[type[Exception], ...]
    shown: Callable[[Exception], str] = str


@dataclass
class Result:
    name: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # by kind: how to make it again
    slowest: float = 0.0

    def add(self, more: "Result") -> None:
        self.inputs += more.inputs
        self.accepted += more.accepted
        self.refused += more.refused
        self.faults = more.faults | self.faults
        self.slowest = max(self.slowest, more.slowest)


def run(target: Target, seed: int, first: int, count: int) -> Result:
    """Read inputs number `first` to `first + count - 1` of a target, in a child process: a signal ends only that."""
    total, number = Result(target.name), first
    while number < first + count:
        done, problem = in_child(target, seed, range(number, first + count))
        number += done.inputs
        if problem is not None:
            done.inputs += 1
            done.faults[problem] = again(target, seed, number)
            number += 1
        total.add(done)
    return total


def again(target: Target, seed: int, number: int) -> str:
    return f"--only {target.name!r} --seed {seed} --first {number} --inputs 1"


def in_child(target: Target, seed: int, numbers: Sequence[int]) -> tuple[Result, str | None]:
    """Run these inputs in a child process: its last result, and the signal that ended it, or None."""
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        faulthandler.enable()
        result, status = Result(target.name), 1
        limit_memory()  # here: a fork may have copied memory that its parent shares
        try:
            for one in numbers:
                draw = Random(f"{target.name}/{seed}/{one}")
                judge(target, target.make(draw), result, again(target, seed, one))
                theirs.send(result)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    last = Result(target.name)
    with contextlib.suppress(EOFError), ours:
        while True:
            last = ours.recv()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status <= 0, f"{target.name}: the fuzzer itself failed"
    return last, f"ended by {signal.Signals(-status).name}" if status else None


def judge(target: Target, given: object, result: Result, again: str) -> None:
    result.inputs += 1
    begun = time.process_time()
    try:
        with alarm(CPU_SECONDS):
            target.read(given)
        result.accepted += 1
    except target.refusals as error:
        if problem := unclear(target.shown(error)):
            where = traceback.extract_tb(error.__traceback__)[-1]
            result.faults.setdefault(
                f"{problem}, {Path(where.filename).name}:{where.lineno}", f"{str(error)[:200]} ({again})"
            )
        else:
            result.refused += 1
    except (Hung, Exception) as error:
        frames = list(traceback.extract_tb(error.__traceback__))
        own = [frame for frame in frames if "/src/" in frame.filename] or frames
        kind = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"
        result.faults.setdefault(kind, f"{str(error)[:300]} ({again})")
    result.slowest = max(result.slowest, time.process_time() - begun)


def unclear(text: str) -> str | None:
    if "memory" in text and ("allocate" in text or "MemoryError" in text):
        return "asks for more memory than allowed"
    if len(text) > LONGEST:
        return "a message that nobody can read"
    if not text.strip():
        return "no message"
    return None


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `Hung` inside after that many seconds of CPU, or sixty times as many of waiting."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hung(f"more than {seconds:g} s")

    numbers = (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, 60 * seconds),
    )
    before = [signal.signal(number, ring) for _, number, _ in numbers]
    try:
        for timer, _, after in numbers:
            signal.setitimer(timer, after)
        yield
    finally:
        for timer, _, _ in numbers:
            signal.setitimer(timer, 0)
        for (_, number, _), handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def limit_memory() -> None:
    """From now on this process cannot allocate more than `MEMORY` on top of what it has: a larger request fails."""
    with open("/proc/self/status") as file:
        present = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (present + MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


def fuzz(targets: Sequence[Target], seed: int, first: int, count: int) -> list[Result]:
    """`count` inputs for all targets together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy and torch, about damaged data
        return [run(target, seed, first, max(1, count // len(targets))) for target in targets]


def sentence(results: Sequence[Result], seed: int) -> str:
    """The sums over all targets."""
    inputs, accepted, refused, faults = (
        sum(counts)
        for counts in zip(*((r.inputs, r.accepted, r.refused, len(r.faults)) for r in results), strict=True)
    )
    return (
        f"{inputs:,} inputs of {len(results)} kinds, seed {seed}, each in {MEMORY >> 20} MiB more than a process "
        f"starts with and {CPU_SECONDS:g} s of CPU time: {accepted:,} right results, {refused:,} times one line "
        f"of error, {faults} faults (tracebacks, hangs, too much memory). The slowest took "
        f"{max(r.slowest for r in results):.2f} s of CPU time."
    )


def main() -> int:
    """Print the sums, and faults one a line; 1 if there are any."""
    from checks.fuzz_targets import all_targets
    from checks.page import write_section

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=100_000, help="in total (default: 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input of a target")
    parser.add_argument("--only", help="one target")
    parser.add_argument("--write", action="store_true", help="put the sums into docs/RELIABILITY.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, all_targets(Path(folder)) as found:
        targets = [target for target in found if options.only in (None, target.name)]
        if not targets:
            parser.error(f"--only: there are {', '.join(target.name for target in found)}")
        results = fuzz(targets, options.seed, options.first, options.inputs)
    text = sentence(results, options.seed)
    print(text)
    for result in results:
        print(
            f"{result.name}: {result.accepted:,} right, {result.refused:,} refused, {result.slowest:.2f} s at most"
        )
        for kind, again in result.faults.items():
            print(f"FAULT {result.name}: {kind} ({again})")
    if options.write:
        write_section("fuzz", text)
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
