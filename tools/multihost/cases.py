"""Cases of a run on several hosts: training ends with the curve of one process, or with one error that says where.

Every case trains the tiny model with torchrun's c10d rendezvous, two ranks a host, and saves every ten steps.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_runtime.train import TrainError
from fsdp_runtime.train.checkpoint import check_files

from .hosts import SHARED, Host, Hosts, Process, wait_until

STEPS, TIMEOUT = 40, 20.0  # of the runs
_PATIENCE, _START = 240.0, 90.0  # seconds for a launch, and for its first steps, which import torch
_SETTLED = 1e-4  # relative distance of two curves that are the same
_FAKETIME = {"LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1", "FAKETIME": "+3600"}
# torch 2.13 does not tell a host that joins a later round where the ranks' store is if it is shared
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_LINE = re.compile(r"^fsdp-train: .*$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """Outcome of a case: seconds from the fault to the end of the last rank.

    `line` is the error; `wrong` is "" if the case ended as it should, with the losses
    of one process and valid checkpoints.
    """

    case: str
    finished: bool
    seconds: float
    line: str
    wrong: str


class Bench:
    """A shared, at first empty folder with text to train on, the losses of one process, and a way to start runs."""

    def __init__(self, folder: Path, reference: dict[int, float]) -> None:
        self.folder, self.run, self.reference = folder, folder / "run", reference
        write_text(folder / "text")

    def start(
        self, hosts: Sequence[Host], *more: str, nodes: int | None = None, restarts: int = 0, run_id: str = "job",
        variables: Callable[[Host], dict[str, str]] = lambda host: {},
    ) -> dict[Host, Process]:  # fmt: skip
        """Start torchrun on hosts; the first one serves the rendezvous."""
        launch = f"--rdzv-backend c10d --rdzv-endpoint alpha:29400 --rdzv-id {run_id} --nproc-per-node 2"
        launch += f" --nnodes {nodes or len(hosts)} --max-restarts {restarts} -m fsdp_runtime.train"
        saved = f"--save-every 10 --keep 9 --out {SHARED / 'run'} --timeout {TIMEOUT:g}"
        program = [*launch.split(), *options(SHARED / "text", *saved.split(), *more)]
        command = [sys.executable, "-m", "torch.distributed.run", *program]
        return {
            host: host.start(command, self._log(host), {"OMP_NUM_THREADS": "1", **variables(host)})
            for host in hosts
        }

    def _log(self, host: Host) -> Path:
        return self.folder / f"{host.name}.log"

    def _text(self, host: Host) -> str:
        return self._log(host).read_text(errors="replace")

    def reach(self, step: int) -> None:
        """Wait until rank 0 has written the figures of a step."""
        wait_until(_START, lambda: len(losses(self.run)) >= step, f"step {step}")

    def wait(self, running: dict[Host, Process], seconds: float = _PATIENCE, torchrun: bool = False) -> str:
        """Wait until no rank is left; return "", or the problem if some are. `torchrun`: wait for it too."""

        def ended(host: Host) -> bool:
            # torchrun may stay for minutes after its ranks, where its store is cut off.
            failed = not torchrun and bool(errors(self._text(host)))
            return running[host].poll() is not None or (failed and not ranks_of(host))

        try:
            wait_until(seconds, lambda: all(map(ended, running)), "end of all ranks")
        except TimeoutError as error:
            return str(error)
        return ""

    def result(
        self, case: str, begin: float, hosts: Sequence[Host], expected: str = "", wrong: str = ""
    ) -> Result:
        """Outcome of a case. `expected`: a pattern of the error; "" if training must finish."""
        curve, log = losses(self.run), "".join(map(self._text, hosts))
        shared = curve.keys() & self.reference.keys()
        distance = max((abs(curve[n] / self.reference[n] - 1) for n in shared), default=0.0)
        finished, valid = len(curve) == STEPS, self._verified()
        matching = [line for line in errors(log) if re.search(expected, line)]
        problems = {
            f"the curve is {distance:.1e} apart": distance > _SETTLED,
            f"{valid[0]} of {valid[1]} checkpoints are valid": not valid[1] or valid[0] != valid[1],
            f"no error like {expected!r}": expected and not matching,
            f"training did not finish: {(matching or ['no error'])[0]}": not expected and not finished,
        }
        wrong = wrong or "; ".join(problem for problem, holds in problems.items() if holds)
        line = (matching or [""])[0]
        seconds = time.monotonic() - begin
        return Result(case, finished, seconds, line.removeprefix("fsdp-train: "), wrong)

    def _verified(self) -> tuple[int, int]:
        complete = [path for path in (self.run / "checkpoints").glob("step-*") if path.suffix != ".part"]
        return sum(map(_valid, complete)), len(complete)


def _valid(checkpoint: Path) -> bool:
    try:
        check_files(checkpoint)
    except TrainError:
        return False
    return True


def options(text: Path, *more: str) -> list[str]:
    """Arguments of `fsdp-train`."""
    fixed = "--preset tiny --seq-len 32 --batch 12 --optimizer torch-adamw --device cpu --no-plot"
    return [*f"{fixed} --steps {STEPS} --warmup 2 --eval-every 0 --data {text}".split(), *more]


def one_process(folder: Path) -> dict[int, float]:
    """Train in one process, in an empty folder; returns the losses by step."""
    write_text(folder / "text")
    where = f"--ranks 1 --system one --save-every 0 --out {folder / 'run'}".split()
    command = [sys.executable, "-m", "fsdp_runtime.train", *options(folder / "text", *where)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return losses(folder / "run")


def losses(run: Path) -> dict[int, float]:
    """Training losses by step."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {entry["step"]: entry["loss"] for entry in entries if entry["kind"] == "train"}


def errors(log: str) -> list[str]:
    """The lines with which ranks ended."""
    return _LINE.findall(log)


def ranks_of(host: Host) -> dict[int, int]:
    """The processes of the ranks on a host."""
    results = {}
    for pid in host.processes():
        try:
            pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        variables = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
        if b"TORCHELASTIC_RUN_ID" in variables and b"RANK" in variables:
            results[int(variables[b"RANK"])] = pid
    return results


def write_text(folder: Path) -> None:
    """Some files of text, enough for both sides of the split."""
    text = "".join(f"def f{i}(x):\n    return x + {i * i % 97}\n\n" for i in range(3000))
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.py").write_text(text[number * 700 : number * 700 + 4000])


def train_and_move(case: str, bench: Bench) -> Result:
    """Stop and resume on two, three and one hosts."""
    begin, wrong = time.monotonic(), ""
    with Hosts(("alpha", "beta", "gamma"), bench.folder) as hosts:
        for count, step in ((2, 12), (3, 24), (1, STEPS)):
            running = bench.start(hosts[:count], *["--resume"] * (count != 2), run_id=f"job-{count}")
            bench.reach(step)
            if step < STEPS:
                os.kill(ranks_of(hosts[count - 1])[2 * count - 1], signal.SIGTERM)  # any one rank
            wrong = wrong or bench.wait(running)
        return bench.result(case, begin, hosts, wrong=wrong)


def power_cut(case: str, bench: Bench) -> Result:
    """End a host without notice, and start another one with the same command."""
    with Hosts(("alpha", "beta", "gamma"), bench.folder) as hosts:
        running = bench.start(hosts[:2], restarts=3, variables=lambda host: _OWN_STORE)
        bench.reach(22)
        begin = time.monotonic()
        hosts[1].link(down=True)
        hosts[1].kill()
        running |= bench.start(hosts[2:], nodes=2, restarts=3, variables=lambda host: _OWN_STORE)
        del running[hosts[1]]
        wrong = bench.wait(running, torchrun=True)
        return bench.result(case, begin, list(running), wrong=wrong)


def clocks_apart(case: str, bench: Bench) -> Result:
    """The clock of a host is an hour ahead."""
    begin = time.monotonic()
    with Hosts(("alpha", "beta"), bench.folder) as hosts:
        running = bench.start(hosts, variables=lambda host: {} if host.name == "alpha" else _FAKETIME)
        wrong = bench.wait(running)
        return bench.result(case, begin, hosts, wrong=wrong)


def fault(
    step: int, begin: Callable[[Host], None], expected: str = "", most: float = _PATIENCE, *,
    lasts: float = 0.0, end: Callable[[Host], None] = lambda host: None, restarts: int = 0,
) -> Callable[[str, Bench], Result]:  # fmt: skip
    """A case: a fault of the second of two hosts while they train.

    Args:
        step: step from which it happens.
        begin: causes it.
        expected: pattern of the error; "" if training is to finish.
        most: seconds within which all ranks must end.
        lasts: seconds until `end`; 0 if the fault stays.
        end: ends it.
        restarts: how often torchrun starts all ranks again.
    """

    def run(case: str, bench: Bench) -> Result:
        with Hosts(("alpha", "beta"), bench.folder) as hosts:
            running = bench.start(hosts, restarts=restarts)
            bench.reach(step)
            began = time.monotonic()
            begin(hosts[1])
            if lasts:
                time.sleep(lasts)
                end(hosts[1])
            wrong = bench.wait(running, most, torchrun=restarts > 0)
            return bench.result(case, began, hosts, expected, wrong)

    return run


def _link(**change: float) -> Callable[[Host], None]:
    return lambda host: host.link(**change)


def _signal(number: signal.Signals) -> Callable[[Host], None]:
    return lambda host: host.signal(number)


def _fill_disk(host: Host) -> None:
    host.run("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(SHARED / "run" / "checkpoints"))


def _kill_a_rank(host: Host) -> None:
    os.kill(ranks_of(host)[3], signal.SIGKILL)


_LOST = r"rank \d \((?:%s)\): .*(?:all_(?:gather|reduce)|reduce_scatter)"
_FROZEN = rf"{_LOST % 'alpha'}.*ranks 2, 3 \(beta\)"
_FULL = r"cannot save .*: rank [23]: No space left on device"
_STOP, _GO = _signal(signal.SIGSTOP), _signal(signal.SIGCONT)
_RUNS = {
    "link of a host down": fault(22, _link(down=True), _LOST % "alpha|beta", 2 * TIMEOUT + 20),
    "link of a host down for 8 s": fault(22, _link(down=True), lasts=8, end=_link(down=False)),
    "200 ms delay": fault(34, _link(delay=0.2)),
    "5 % loss": fault(22, _link(loss=0.05)),
    "1 Mbit/s": fault(34, _link(rate=1e6)),
    "host frozen for 8 s": fault(22, _STOP, lasts=8, end=_GO),
    "host frozen for 35 s": fault(22, _STOP, _FROZEN, 2 * TIMEOUT + 20, lasts=35, end=_GO),
    "full disk on a host": fault(12, _fill_disk, _FULL, 2 * TIMEOUT),
    "rank killed, started again by torchrun": fault(22, _kill_a_rank, restarts=3),
    "2 hosts, resumed on 3, then on 1": train_and_move,
    "host killed, another one joined": power_cut,
    "clocks an hour apart": clocks_apart,
}
CASES: dict[str, Callable[[Bench], Result]] = {case: partial(run, case) for case, run in _RUNS.items()}
