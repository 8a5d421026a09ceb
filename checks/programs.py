"""Draw and run new programs: `./run programs -- --minutes 60`, or `--seed 7 --count 1`; `--system simulated`.

`--count-kinds 5000` prints how often each kind of layer, action and option is drawn.

Programs that fail are made smaller, printed, and written to `tests/programs/found/`, which `./run tests` replays.
"""

import argparse
import collections
import multiprocessing
import signal
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any

from ragged_shard.testing import preload

FOUND = Path(__file__).parents[1] / "tests" / "programs" / "found"
EVERY = 100  # programs between two lines of progress


def search(arguments: argparse.Namespace, first: int, answers: Any) -> None:
    """In a process: run every `jobs`-th program from a seed on, and send back what came of each."""
    preload("fsdp_runtime", "tests.programs.runs")
    from tests.programs.program import draw
    from tests.programs.runs import outcome

    from .shrink import shrunk

    simulated, deadline = arguments.system == "simulated", time.monotonic() + 60 * arguments.minutes

    def fault_of(program: Any) -> str:
        return outcome(program, simulated).fault

    for seed in range(first, arguments.seed + arguments.count, arguments.jobs):
        if time.monotonic() > deadline:
            break
        program = draw(seed)
        found = outcome(program, simulated)
        if found.fault and outcome(program, simulated).fault:  # twice, or the machine was to blame
            program = shrunk(program, found.fault, fault_of, arguments.shrink)
            found = outcome(program, simulated)
        elif found.fault:
            found.fault = f"once: {found.fault}"
        answers.put((seed, program, found))
    answers.put(None)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="./run programs --", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first program; default: from the clock"
    )
    parser.add_argument("--count", type=int, default=10**9, help="programs")
    parser.add_argument("--minutes", type=float, default=10**6, help="stop after so many")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--system", choices=("ours", "simulated"), default="ours")
    parser.add_argument(
        "--shrink", type=float, default=120.0, help="seconds to make a failing program smaller"
    )
    parser.add_argument("--found", type=Path, default=FOUND, help="folder for programs that fail")
    parser.add_argument("--keep-going", action="store_true", help="go on after a fault")
    parser.add_argument(
        "--count-kinds",
        type=int,
        metavar="N",
        help="run nothing; print how many of N programs have which names",
    )
    arguments = parser.parse_args()
    if arguments.count_kinds:
        count_kinds(arguments.seed or 0, arguments.count_kinds)
        return
    if arguments.seed is None:
        arguments.seed = int(time.time()) * 1000
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [
        context.Process(target=search, args=(arguments, arguments.seed + job, answers))
        for job in range(arguments.jobs)
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the workers end too
    try:
        for worker in workers:
            worker.start()
        faults = report(answers, arguments)
    finally:
        for worker in workers:
            worker.terminate()
    raise SystemExit(1 if faults else 0)


def count_kinds(first: int, count: int) -> None:
    """Print how many programs have each name of a layer, an action or an option, rare ones last."""
    from tests.programs.program import draw, names

    tally = collections.Counter(name for seed in range(first, first + count) for name in names(draw(seed)))
    for name, programs in tally.most_common():
        print(f"{programs:6} {name}")


def report(answers: Any, arguments: argparse.Namespace) -> int:
    """Print what comes in, write down programs that fail; returns their number."""
    began, tally, running = time.monotonic(), collections.Counter[str](), arguments.jobs
    faults = 0
    while running:
        try:
            answer = answers.get(timeout=600)
        except Empty:
            print("no program ended within ten minutes")
            return faults + 1
        if answer is None:
            running -= 1
            continue
        seed, program, found = answer
        tally["programs"] += 1
        tally["also on FSDP2"] += program.for_fsdp2
        tally["refused, as FSDP2 does or the table says"] += bool(found.ours and not found.fault)
        tally["FSDP2 raises, hangs or is wrong"] += bool(found.theirs)
        if found.fault:
            faults += 1
            print(f"\nseed {seed}: {found.fault}\n{program!r}\n", flush=True)
            write(arguments.found, seed, program, found.fault)
            if not arguments.keep_going:
                return faults
        if tally["programs"] % EVERY == 0:
            _progress(tally, began, arguments.seed)
    _progress(tally, began, arguments.seed)
    return faults


def _progress(tally: collections.Counter[str], began: float, first: int) -> None:
    minutes = (time.monotonic() - began) / 60
    counts = ", ".join(f"{count} {what}" for what, count in tally.items())
    print(
        f"from seed {first}: {counts}; {minutes:.1f} min, {tally['programs'] / minutes:.0f} a minute",
        flush=True,
    )


def write(folder: Path, seed: int, program: Any, fault: str) -> None:
    """Keep a program that fails."""
    folder.mkdir(exist_ok=True)
    first = fault.splitlines()[0][:110]
    (folder / f"seed_{seed}.txt").write_text(f"# {first}\n{program!r}\n")


if __name__ == "__main__":
    main()
