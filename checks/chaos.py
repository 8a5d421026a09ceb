"""Kills and freezes ranks and launchers at random moments; checkpoints must verify and curves must be the same.

`python -m checks.chaos --attacks 300` prints the sums; `--write` puts them into RELIABILITY.md. Same seed, same plan;
what the operating system does in between differs.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from train_helpers import read_model, text_folder

from checks.launches import Attack, Ended, adopt_orphans, launch
from checks.page import write_section
from fsdp_runtime.train import TrainError
from fsdp_runtime.train.checkpoint import CHECKPOINTS, check_files, latest
from fsdp_runtime.train.report import METRICS, read_metrics

OPTIONS = [
    "--dim", "16", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ff-dim", "24", "--seq-len", "16",
    "--batch", "6", "--steps", "10", "--warmup", "2", "--optimizer", "adamw", "--save-every", "2", "--keep", "3",
    "--eval-every", "0", "--no-plot", "--device", "cpu", "--timeout", "30", "--data", "text",
    "--out", "run",
]  # fmt: skip
PATIENCE = 90.0  # seconds until a launch that goes on is called a hang
# Where a rank attacks itself: functions, and how often they are called or left in a run, about.
PLACES: dict[str, tuple[frozenset[str], int]] = {
    "step": (frozenset({"_train_step", "backward", "_reduce", "_read"}), 60),
    "gather": (frozenset({"all_gather", "all_gather_into_tensor", "gather", "unshard"}), 60),
    "save": (
        frozenset({"save", "write_data", "fsync", "_digest", "finish"}),
        60,
    ),
    "rename": (frozenset({"_publish", "rename", "_sync_folder", "rmtree"}), 40),
    "resume": (
        frozenset({"check_same_run", "check_files", "load", "set_state_dict", "read_metadata", "load_bytes"}),
        12,
    ),
}
ANYWHERE = ("any moment of a rank", "any moment of the launcher")


@dataclass
class Row:
    place: str
    kills: int = 0
    freezes: int = 0
    checkpoints: int = 0
    damaged: int = 0
    hangs: int = 0
    left: int = 0
    unnamed: int = 0
    curves: int = 0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What a finished run has: figures of every step, and its weights."""

    curve: tuple[tuple[int, float, float], ...]
    weights: dict[str, torch.Tensor]

    def same(self, other: "Result") -> bool:
        """Bit for bit."""
        names = self.weights.keys() == other.weights.keys()
        equal = names and all(torch.equal(self.weights[name], other.weights[name]) for name in self.weights)
        return equal and self.curve == other.curve


def result_of(run: Path) -> Result:
    newest = latest(run)
    assert newest is not None
    entries = [entry for entry in read_metrics(run / METRICS) if entry["kind"] == "train"]
    return Result(tuple((e["step"], e["loss"], e["grad_norm"]) for e in entries), read_model(newest))


class Chaos:
    """Runs under attack, below `folder`, with the results of undisturbed ones to compare with."""

    def __init__(self, folder: Path, seed: int) -> None:
        adopt_orphans()
        self.folder, self.draw = folder, Random(seed)
        self.rows = {place: Row(place) for place in (*PLACES, *ANYWHERE)}
        self.expected: dict[int, Result] = {}
        self.seconds: dict[int, float] = {}

    def undisturbed(self, ranks: int) -> Result:
        """The result on this number of ranks; made once."""
        if ranks not in self.expected:
            place, begun = self._folder(f"undisturbed-{ranks}"), time.monotonic()
            ended = launch(["--ranks", str(ranks), *OPTIONS], place, None, PATIENCE)
            assert ended.status == 0, ended.said
            self.expected[ranks] = result_of(place / "run")
            self.seconds[ranks] = time.monotonic() - begun
        return self.expected[ranks]

    def _folder(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir()
        text_folder(place)
        return place

    def attack(self, attacks: int, deadline: float) -> None:
        """Run after run is attacked up to three times, resumed, finished and compared, until there are enough."""
        number = 0
        while self.attacks < attacks and time.monotonic() < deadline:
            ranks = self.draw.choice((2, 2, 3))
            expected = self.undisturbed(ranks)
            place = self._folder(f"run-{number}")
            touched = [row for row in self._attacked(place, ranks, min(3, attacks - self.attacks)) if row]
            if touched:
                ended = launch(self._argv(place, ranks), place, None, PATIENCE)
                self._compare(touched[-1], place, ended, expected)
            shutil.rmtree(place)
            number += 1

    @property
    def attacks(self) -> int:
        return sum(row.kills + row.freezes for row in self.rows.values())

    def _attacked(self, place: Path, ranks: int, times: int) -> Iterator[Row | None]:
        for turn in range(times):
            name = self.draw.choice(list(PLACES) if turn else [n for n in PLACES if n != "resume"])
            if self.draw.random() < 0.4:
                name = self.draw.choice(ANYWHERE)
            attack = self._plan(name, ranks)
            exact = attack.at is not None and self.draw.random() < 0.05
            ended = launch(self._argv(place, ranks), place, attack, PATIENCE, exact=exact)
            yield self._note(self.rows[name], attack, ended, place / "run") if ended.attacked else None

    def _plan(self, name: str, ranks: int) -> Attack:
        freeze = self.draw.choice((0.0, 0.0, 0.0, self.draw.uniform(0.05, 1.5)))
        if name in PLACES:
            calls, often = PLACES[name]
            return Attack(self.draw.randrange(ranks), freeze, None, calls, 1 + self.draw.randrange(often))
        victim = -1 if name == ANYWHERE[1] else self.draw.randrange(ranks)
        return Attack(victim, freeze, self.draw.uniform(0.0, self.seconds[ranks]))

    def _argv(self, place: Path, ranks: int) -> list[str]:
        resume = ["--resume"] if latest(place / "run") else []
        return ["--ranks", str(ranks), *OPTIONS, *resume]

    def _note(self, row: Row, attack: Attack, ended: Ended, run: Path) -> Row:
        row.kills += not attack.freeze
        row.freezes += bool(attack.freeze)
        row.hangs += ended.status is None
        row.left += len(ended.left)
        for checkpoint in (path for path in (run / CHECKPOINTS).glob("step-*") if path.suffix != ".part"):
            row.checkpoints += 1
            try:
                check_files(checkpoint)
            except TrainError as error:
                row.damaged += 1
                row.problems.append(str(error))
        if ended.status is None:
            row.problems.append(f"{attack} hung: {ended.said[-300:]}")
        elif attack.freeze and ended.status:
            row.problems.append(f"{attack} ended with {ended.status}: {ended.said[-300:]}")
        elif not attack.freeze and attack.victim >= 0 and ended.status and not _named(attack, ended):
            row.unnamed += 1
            row.problems.append(f"{attack} is not named: {ended.said[-300:]}")
        return row

    def _compare(self, row: Row, place: Path, ended: Ended, expected: Result) -> None:
        row.curves += 1
        if ended.status != 0:
            row.wrong += 1
            row.problems.append(f"the resumed run ended with {ended.status}: {ended.said[-300:]}")
        elif not result_of(place / "run").same(expected):
            row.wrong += 1
            row.problems.append("the resumed run has another curve or other weights")


def _named(attack: Attack, ended: Ended) -> bool:
    return f"rank {attack.victim} was ended by SIGKILL" in ended.said


def sentence(rows: list[Row], seed: int) -> str:
    """The sums over all places."""

    def total(*names: str) -> int:
        return sum(getattr(row, name) for row in rows for name in names)

    return (
        f"{total('kills')} kills and {total('freezes')} freezes of runs of 2 and 3 ranks, seed {seed}, up to three "
        f"of one run, which is resumed after each: {total('checkpoints')} checkpoints and {total('curves')} resumed "
        f"curves compared, {total('damaged', 'hangs', 'left', 'unnamed', 'wrong')} faults (damaged checkpoints, hangs, "
        "processes left, killed ranks not named, wrong curves)."
    )


def main() -> int:
    """Print the sums, and problems one a line; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--attacks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no further run after that long")
    parser.add_argument("--write", action="store_true", help="put the sums into docs/RELIABILITY.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), options.seed)
        chaos.attack(options.attacks, time.monotonic() + options.seconds)
    rows = list(chaos.rows.values())
    text = sentence(rows, options.seed)
    print(text)
    for row in rows:
        print(
            f"{row.place}: {row.kills} kills, {row.freezes} freezes, {row.checkpoints} checkpoints, {row.curves} curves"
        )
    problems = [f"PROBLEM {row.place}: {problem}" for row in rows for problem in row.problems]
    print("\n".join(problems))
    if options.write:
        write_section("chaos", text)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
