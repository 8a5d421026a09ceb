"""What can happen to a run on several hosts, and what is to come of it: the same curve, or one error that says where.

Every case trains the tiny model with torchrun's c10d rendezvous, two ranks a host, and saves every ten steps.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .hosts import SHARED, Host, Hosts, wait_until

STEPS = 40
TIMEOUT = 20.0  # --timeout of the runs
LATE = 5.0  # --late
_PATIENCE = 240.0  # seconds for a launch
_START = 90.0  # for its first steps: two processes import torch, one after the other
_SETTLED = 1e-4  # relative distance of two curves that are the same
_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
_ERROR = re.compile(
    r"^fsdp-train: (?!rank \d+ \(\w+\) has ).*$", re.MULTILINE
)  # the watchdog's reports begin so


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        case: what was done.
        finished: whether training came to its last step; else it ended with an error.
        seconds: from the fault, or the start where there is none, to the end of the last rank.
        distance: of the curve from one process's, relative, over all steps.
        line: the error, or the report of the watchdog; "" if none was printed.
        valid: checkpoints that `fsdp-train verify` found as written, of how many.
        wrong: what is not as it should be, or "".
    """

    case: str
    finished: bool
    seconds: float
    distance: float
    line: str
    valid: tuple[int, int]
    wrong: str


@dataclass
class Launch:
    """One start of a run on some hosts: torchrun's processes, and where they print."""

    running: dict[str, "subprocess.Popen[bytes]"]
    hosts: dict[str, Host]
    folder: Path

    def wait(self, seconds: float = _PATIENCE) -> None:
        """Wait until no rank is left on any host that is there. Raises TimeoutError."""
        wait_until(seconds, lambda: all(self._over(name) for name in self.running), "end of all ranks")

    def _over(self, name: str) -> bool:
        """torchrun may stay for minutes after its ranks, where its store is cut off; it is not waited for."""
        return self.running[name].poll() is not None or (
            bool(errors(self.log(name))) and not ranks_of(self.hosts[name])
        )

    def log(self, name: str) -> str:
        """What was printed on a host."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


class Bench:
    """A shared folder with text to train on, the curve of one process, and ways to start runs.

    Args:
        folder: an empty one.
        reference: losses of one process by step, as `one_process` finds them.
    """

    def __init__(self, folder: Path, reference: dict[int, float]) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.reference = reference
        write_text(folder / "text")

    @contextmanager
    def hosts(self, *names: str) -> Iterator[list[Host]]:
        """Hosts that share the folder."""
        with Hosts(names, self.folder) as hosts:
            yield hosts

    def start(
        self,
        hosts: Sequence[Host],
        *more: str,
        nodes: int | None = None,
        restarts: int = 0,
        run_id: str = "job",
        environment: Callable[[Host], dict[str, str]] = lambda host: {},
    ) -> Launch:
        """Start torchrun on hosts; the first of the names serves the rendezvous."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "alpha:29400", "--rdzv-id", run_id]
        size = [
            "--nnodes",
            str(nodes or len(hosts)),
            "--nproc-per-node",
            "2",
            "--max-restarts",
            str(restarts),
        ]
        saved = ["--save-every", "10", "--keep", "9", "--out", str(SHARED / "run")]
        times = ["--timeout", f"{TIMEOUT:g}", "--late", f"{LATE:g}"]
        program = ["-m", "fsdp_runtime.train", *options(SHARED / "text", *saved, *times, *more)]
        command = [sys.executable, "-m", "torch.distributed.run", *meeting, *size, *program]
        running = {}
        for host in hosts:
            variables = {"OMP_NUM_THREADS": "1", **environment(host)}
            running[host.name] = host.start(command, self.folder / f"{host.name}.log", variables)
        return Launch(running, {host.name: host for host in hosts}, self.folder)

    def reach(self, step: int) -> None:
        """Wait until rank 0 has written the figures of a step."""
        wait_until(_START, lambda: len(losses(self.run)) >= step, f"step {step}")

    def result(self, case: str, begun: float, logs: str, expected: str, wrong: str = "") -> Result:
        """What came of a case. `expected`: a pattern of the error; "" if training is to finish."""
        curve = losses(self.run)
        shared = curve.keys() & self.reference.keys()
        distance = max((abs(curve[n] / self.reference[n] - 1) for n in shared), default=0.0)
        finished = len(curve) == STEPS
        valid = self._verified()
        lines = errors(logs)
        matching = [line for line in lines if re.search(expected, line)] if expected else lines
        if not wrong:
            wrong = "; ".join(self._doubts(finished, distance, valid, matching, expected))
        line = (matching or reports(logs) or [""])[0].removeprefix("fsdp-train: ")
        return Result(case, finished, time.monotonic() - begun, distance, line, valid, wrong)

    def _doubts(
        self, finished: bool, distance: float, valid: tuple[int, int], found: Sequence[str], expected: str
    ) -> Iterator[str]:
        if distance > _SETTLED:
            yield f"the curve is {distance:.1e} apart"
        if not valid[1] or valid[0] != valid[1]:
            yield f"{valid[0]} of {valid[1]} checkpoints are valid"
        if expected and not found:
            yield f"no error like {expected!r}"
        if not expected and not finished:
            yield f"training did not finish: {found[0] if found else 'no error'}"

    def _verified(self) -> tuple[int, int]:
        command = [sys.executable, "-m", "fsdp_runtime.train", "verify", str(self.run)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        complete = [path for path in (self.run / "checkpoints").glob("step-*") if path.suffix != ".part"]
        return sum("as written" in line for line in lines), len(complete)


def options(text: Path, *more: str) -> list[str]:
    """Arguments of `fsdp-train`."""
    model = ["--preset", "tiny", "--seq-len", "32", "--batch", "12", "--optimizer", "torch-adamw"]
    times = ["--steps", str(STEPS), "--warmup", "2", "--eval-every", "0", "--no-plot", "--device", "cpu"]
    return [*model, *times, "--data", str(text), *more]


def one_process(folder: Path) -> dict[int, float]:
    """Train in one process, in an empty folder; returns the losses by step."""
    write_text(folder / "text")
    where = ["--ranks", "1", "--system", "one", "--save-every", "0", "--out", str(folder / "run")]
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
    return _ERROR.findall(log)


def reports(log: str) -> list[str]:
    """The lines that say what is late."""
    return [line for line in log.splitlines() if line.startswith("fsdp-train: ") and line not in errors(log)]


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


def train_and_move(bench: Bench) -> Result:
    """Stop and resume on two, three and one hosts."""
    begun, logs = time.monotonic(), ""
    with bench.hosts("alpha", "beta", "gamma") as hosts:
        for count, step in ((2, 12), (3, 24), (1, STEPS)):
            resume = ["--resume"] if count != 2 else []
            launch = bench.start(hosts[:count], *resume, run_id=f"job-{count}")
            bench.reach(step)
            if step < STEPS:
                os.kill(ranks_of(hosts[count - 1])[2 * count - 1], signal.SIGTERM)  # any one rank
            launch.wait()
        logs = "".join(launch.log(host.name) for host in hosts)
    return bench.result("2 hosts, resumed on 3, then on 1", begun, logs, "")


@dataclass(frozen=True)
class Fault:
    """A fault of the second of two hosts while they train.

    Attributes:
        step: step from which it happens.
        begin: what happens.
        expected: pattern of the error; "" if training is to finish.
        most: seconds within which all ranks must end.
        lasts: seconds until `end`; 0 if the fault stays.
        end: how it ends.
    """

    step: int
    begin: Callable[[Host], None]
    expected: str = ""
    most: float = _PATIENCE
    lasts: float = 0.0
    end: Callable[[Host], None] = lambda host: None

    def happen(self, case: str, bench: Bench) -> Result:
        """Train, let it happen, and wait for the ranks."""
        with bench.hosts("alpha", "beta") as hosts:
            launch = bench.start(hosts)
            bench.reach(self.step)
            begun, wrong = time.monotonic(), ""
            self.begin(hosts[1])
            if self.lasts:
                time.sleep(self.lasts)
                self.end(hosts[1])
            try:
                launch.wait(self.most)
            except TimeoutError as error:
                wrong = str(error)
            logs = "".join(launch.log(host.name) for host in hosts)
        return bench.result(case, begun, logs, self.expected, wrong)


def _lost(*hosts: str) -> str:
    return rf"rank \d \((?:{'|'.join(hosts)})\): .*(?:all_(?:gather|reduce)|reduce_scatter)"


def _down(host: Host) -> None:
    host.link(down=True)


def _up(host: Host) -> None:
    host.link(down=False)


def _freeze(host: Host) -> None:
    host.signal(signal.SIGSTOP)


def _thaw(host: Host) -> None:
    host.signal(signal.SIGCONT)


def _fill_disk(host: Host) -> None:
    host.run("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(SHARED / "run" / "checkpoints"))


FAULTS = {
    "link of a host down": Fault(22, _down, _lost("alpha", "beta"), 2 * TIMEOUT + 20),
    "link of a host down for 8 s": Fault(22, _down, lasts=8, end=_up),
    "200 ms delay": Fault(34, lambda host: host.link(delay=0.2)),
    "5 % loss": Fault(22, lambda host: host.link(loss=0.05)),
    "1 Mbit/s": Fault(34, lambda host: host.link(rate=1e6)),
    "host frozen for 8 s": Fault(22, _freeze, lasts=8, end=_thaw),
    "host frozen for 35 s": Fault(
        22, _freeze, rf"{_lost('alpha')}.*ranks 2, 3 \(beta\)", 2 * TIMEOUT + 20, lasts=35, end=_thaw
    ),
    "full disk on a host": Fault(
        12, _fill_disk, r"cannot save .*rank [23] \(beta\): No space left on device", 2 * TIMEOUT
    ),
}


def power_cut(bench: Bench) -> Result:
    """End a host without a word, and start another one with the same command."""
    with bench.hosts("alpha", "beta", "gamma") as hosts:

        def own_store(host: Host) -> dict[str, str]:
            # torch 2.13 does not tell a host that joins a later round where the ranks' store is if it is shared
            return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

        launch = bench.start(hosts[:2], restarts=3, environment=own_store)
        bench.reach(22)
        begun, wrong = time.monotonic(), ""
        hosts[1].link(down=True)
        hosts[1].kill()
        joined = bench.start(hosts[2:], nodes=2, restarts=3, environment=own_store)
        both = Launch({**launch.running, **joined.running}, {**launch.hosts, **joined.hosts}, bench.folder)
        del both.running["beta"]
        try:
            wait_until(_PATIENCE, lambda: all(p.poll() is not None for p in both.running.values()), "end")
        except TimeoutError as error:
            wrong = str(error)
        logs = "".join(both.log(name) for name in ("alpha", "gamma"))
    return bench.result("host killed, another one joined", begun, logs, "", wrong)


def rank_killed(bench: Bench) -> Result:
    """End one rank; torchrun starts all again."""
    with bench.hosts("alpha", "beta") as hosts:
        launch = bench.start(hosts, restarts=3)
        bench.reach(22)
        begun, wrong = time.monotonic(), ""
        os.kill(ranks_of(hosts[1])[3], signal.SIGKILL)
        try:
            wait_until(_PATIENCE, lambda: all(p.poll() is not None for p in launch.running.values()), "end")
        except TimeoutError as error:
            wrong = str(error)
        logs = "".join(launch.log(host.name) for host in hosts)
    return bench.result("rank killed, started again by torchrun", begun, logs, "", wrong)


def clocks_apart(bench: Bench) -> Result:
    """The clock of a host is an hour ahead."""

    def ahead(host: Host) -> dict[str, str]:
        if host.name == "alpha":
            return {}
        return {"LD_PRELOAD": _FAKETIME, "FAKETIME": "+3600"}

    begun, wrong = time.monotonic(), ""
    with bench.hosts("alpha", "beta") as hosts:
        launch = bench.start(hosts, environment=ahead)
        try:
            launch.wait()
        except TimeoutError as error:
            wrong = str(error)
        logs = "".join(launch.log(host.name) for host in hosts)
    return bench.result("clocks an hour apart", begun, logs, "", wrong)


CASES: dict[str, Callable[[Bench], Result]] = {
    **{case: partial(fault.happen, case) for case, fault in FAULTS.items()},
    **{case.__name__: case for case in (train_and_move, rank_killed, power_cut, clocks_apart)},
}
