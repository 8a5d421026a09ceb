"""Long runs with every optimizer: memory, descriptors, threads and host time per step, at the end as at the start.

`python -m checks.soak --steps 20000` prints the growth; `--write` puts it into RELIABILITY.md. Two ranks; every few
hundred steps the run stops with a checkpoint and a new trainer in the same process resumes from it.
"""

import argparse
import gc
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train_helpers import text_folder, tiny

from checks.page import write_section
from fsdp_runtime.train import Trainer
from fsdp_runtime.train.model import ModelConfig
from fsdp_runtime.train.optimizers import OPTIMIZERS
from ragged_shard.testing import run_ranks

RANKS = 2
SIZES = ModelConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ff_dim=24)


@dataclass(frozen=True)
class Sample:
    steps: int
    memory: int  # bytes that are resident
    descriptors: int
    threads: int
    cpu_s: float  # per step


def part_of_run(folder: Path, optimizer: str, steps: int, part: int, resume: bool) -> Sample | None:
    """On a rank: `part` steps of a run of `steps`, from its checkpoint to its next one. None: it was complete."""
    config = tiny(
        folder, model=SIZES, steps=steps, batch=4, seq_len=16, optimizer=optimizer, save_every=max(1, part // 2),
        eval_every=max(1, part // 2), eval_batches=1, resume=resume, log_every=10,
    )  # fmt: skip
    asked = 0

    def stop() -> int:
        nonlocal asked
        asked += 1
        return signal.SIGTERM if asked >= part else 0

    out = folder / optimizer
    out.mkdir(exist_ok=True)
    trainer = Trainer(config, out, quiet=True, stop=stop)
    before, begun = trainer.step, time.process_time()
    trainer.run()
    taken = trainer.step - before
    cpu = time.process_time() - begun
    done = trainer.step
    del trainer
    gc.collect()
    return Sample(done, *_held(), cpu / taken) if taken else None


def _held() -> tuple[int, int, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    native = len(list(Path("/proc/self/task").iterdir()))
    assert native >= threading.active_count()
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir())), native


def soaked(folder: Path, optimizer: str, steps: int, part: int) -> list[Sample]:
    """On a rank: a whole run in parts; a sample after each."""
    samples: list[Sample] = []
    while (sample := part_of_run(folder, optimizer, steps, part, bool(samples))) is not None:
        samples.append(sample)
        if sample.steps >= steps:
            break
    return samples


@dataclass(frozen=True)
class Row:
    """One optimizer: the median of the first and of the last quarter of the samples, the worst rank."""

    optimizer: str
    steps: int
    resumes: int
    memory: tuple[float, float]  # MB
    descriptors: tuple[float, float]
    threads: tuple[float, float]
    cpu_ms: tuple[float, float]

    @property
    def problems(self) -> list[str]:
        """What grew."""
        grew = (
            ("memory", self.memory, max(self.memory[0] + 16.0, 1.05 * self.memory[0]), " MB"),
            ("descriptors", self.descriptors, self.descriptors[0], ""),
            ("threads", self.threads, self.threads[0], ""),
            ("host time", self.cpu_ms, 1.25 * self.cpu_ms[0], " ms a step"),
        )
        return [f"{what} from {a:.1f} to {b:.1f}{unit}" for what, (a, b), limit, unit in grew if b > limit]


def soak(folder: Path, optimizer: str, steps: int, part: int) -> Row:
    """Run one optimizer and compare the ends. The first part, in which memory is taken, is left out."""
    ranks = run_ranks(RANKS, soaked, folder, optimizer, steps, part, timeout=24 * 3600)

    def ends(name: str, scale: float = 1.0) -> tuple[float, float]:
        pairs = [_ends([scale * getattr(sample, name) for sample in samples[1:]]) for samples in ranks]
        return max(pairs, key=lambda pair: pair[1] - pair[0])

    return Row(
        optimizer, ranks[0][-1].steps, len(ranks[0]) - 1, ends("memory", 1e-6), ends("descriptors"), ends("threads"),
        ends("cpu_s", 1e3),
    )  # fmt: skip


def _ends(values: Sequence[float]) -> tuple[float, float]:
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def sentence(rows: Sequence[Row], part: int) -> str:
    """The largest growth of each number over all optimizers."""
    numbers = {
        "resident memory": "memory",
        "descriptors": "descriptors",
        "threads": "threads",
        "CPU time": "cpu_ms",
    }
    grew = {
        what: max(last / first for first, last in (getattr(r, n) for r in rows))
        for what, n in numbers.items()
    }
    return (
        f"{rows[0].steps:,} steps of each of {', '.join(f'`{row.optimizer}`' for row in rows)} on {RANKS} ranks, a "
        f"resume about every {part}, two checkpoints and two evaluations in between. The median of the last quarter of "
        "the samples, of the first quarter's, the worst rank and optimizer: "
        f"{', '.join(f'{what} {factor:.0%}' for what, factor in grew.items())}."
    )


def main() -> int:
    """Print the growth, and problems one a line; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20_000, help="of each optimizer (default: 20000)")
    parser.add_argument("--part", type=int, default=400, help="steps from resume to resume (default: 400)")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="default: all")
    parser.add_argument("--write", action="store_true", help="put the growth into docs/RELIABILITY.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        text_folder(folder)
        names = options.optimizers.split(",")
        rows = []
        for optimizer in names:
            rows.append(soak(folder, optimizer, options.steps, options.part))
            print(rows[-1], file=sys.stderr, flush=True)
    text = sentence(rows, options.part)
    print(text)
    for row in rows:
        for problem in row.problems:
            print(f"PROBLEM {row.optimizer}: {problem}")
    if options.write:
        write_section("soak", text)
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
