"""Shared by all commands: processes, clocks, the state of the machine, result files, tables and the report.

    launch(compare.rounds, 2, request)     two new gloo ranks of one thread each call `compare.rounds(request)`
    fake_ranks(64)                         torch's fake process group: collectives return at once and send nothing
    interleave(calls, 20)                  seconds of each call, all taking turns
    record("name", tables, noise)          prints tables and writes results/name.json
    python -m bench report [--readme F]    writes results/REPORT.md of all files; puts the summary into a README

bench/results/NAME.json        {"machine": ..., "commit": ..., "noise": [], "figures": ...}
bench/results/MACHINE/*.json   asv's own files, its history

A time is kept only if the machine was quiet:

    before        share of all CPU time in use, over one second
    calibration   spread of a fixed loop that is timed before every measurement
    meanwhile     CPU time of other processes during each measurement
"""

import argparse
import datetime
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results"
TOO_BUSY = 3  # exit code
BUSY_BEFORE = 0.15  # of all cores
CALIBRATION_SPREAD = 0.15  # interquartile range over median; a quiet virtual machine has .10 to .11
FOREIGN = 0.10  # of all cores, in the median measurement

Table = dict[str, Any]  # of `table_of`

# -- processes ---------------------------------------------------------------------------------------------------------


def launch(run: Callable[..., Any], ranks: int, request: dict[str, Any], *, timeout: float = 1200.0) -> Any:
    """Result of `run(request)` on rank 0 of new processes, which end with the call and leave no memory behind.

    With `request["simulate"]` = {"ranks", "bandwidth", "latency"} the one rank launched stands for rank 0 of a
    simulated world on its device (`ragged_shard.testing.simulated_ranks`).

    Raises:
        RankError: a rank raised, died, or did not answer within `timeout` seconds.
    """
    from ragged_shard.testing import run_ranks, shut_down

    if str(ROOT) not in sys.path:  # asv has its own way to find this package, other processes do not
        sys.path.insert(0, str(ROOT))
    device = request.get("device", "cpu")
    shut_down()
    try:
        return run_ranks(ranks, answer, run, request, timeout=timeout, device=device, seed=0)[0]
    finally:
        shut_down()


def answer(run: Callable[..., Any], request: dict[str, Any]) -> Any:
    """Answer a request on a rank; in a simulated world `run` also gets the `Simulation`."""
    if "simulate" not in request:
        return run(request)
    from ragged_shard.testing import Network, simulated_ranks

    dist.destroy_process_group()
    wanted = request["simulate"]
    network = Network(wanted["bandwidth"], wanted.get("latency", 0.0))
    with simulated_ranks(wanted["ranks"], network=network) as simulation:
        return run(request, simulation)


def environment(**more: str) -> dict[str, str]:
    """This process's environment for another one, which finds `bench`."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **more}


@contextmanager
def fake_ranks(ranks: int, *, rank: int = 0) -> Iterator[Any]:
    """A mesh of ranks of which only this process exists; torch uses one thread inside.

    Torch's own fake group, unlike `simulated_ranks`, passes the dispatcher, where collectives are counted.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # a launched rank that stands for one of many
        dist.destroy_process_group()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


# -- clocks ------------------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of a call by a clock, this thread's CPU time by default."""
    began = clock()
    call()
    return clock() - began


def wall_and_cpu(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call on all ranks: by the wall until this one returns, and of its CPUs until all have.

    Peers may need this rank's CPU time after it has returned, when they read its memory.
    """
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall = time.perf_counter() - wall
    dist.barrier()
    return 1e3 * wall, 1e3 * (time.process_time() - cpu)


def cuda_seconds(call: Callable[[], Any]) -> float:
    """Seconds between the start and the end of a call on the current CUDA stream, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def timer_of(device: str) -> Callable[[Callable[[], Any]], float]:
    """The timer for work on a kind of device."""
    return cuda_seconds if device == "cuda" else seconds_of


def interleave(
    calls: Mapping[Any, Any],
    rounds: int,
    *,
    warm_up: int = 3,
    timer: Callable[[Any], Any] = seconds_of,
    before: Mapping[Any, Callable[[], Any]] | None = None,
    begin: Callable[[], bool] = lambda: True,
) -> dict[Any, list[Any]]:
    """Seconds of each call, round by round, all taking turns.

    In another order in each round, the same on all ranks: a call finds the caches as any of the others left them. The
    first `warm_up` rounds are not kept. A timer calls, and returns what is kept: seconds. `before` is called outside of
    the time, by the name of the call that follows; a false `begin` ends the rounds.
    """
    times: dict[Any, list[Any]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for turn in range(rounds + warm_up):
        if not begin():
            break
        shuffle(order)
        for name in order:
            if before and name in before:
                before[name]()
            seconds = timer(calls[name])
            if turn >= warm_up:
                times[name].append(seconds)
    return times


def medians_ms(times: Mapping[Any, list[float]]) -> dict[Any, float]:
    """Medians in milliseconds of what `interleave` returned."""
    return {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


def spread(values: list[float]) -> float:
    """Interquartile range over median; of fewer than four values the whole range."""
    if len(values) < 4:
        return (max(values) - min(values)) / statistics.median(values)
    first, middle, third = statistics.quantiles(values, n=4)
    return (third - first) / middle


# -- the machine -------------------------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Machine and date, as a results file has them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot, all cores together."""

    busy: float
    total: float

    @classmethod
    def now(cls) -> "CpuTimes":
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        idle = fields[3] + fields[4]  # waiting for disk is idle too; stolen time is busy
        return cls((sum(fields) - idle) / tick, sum(fields) / tick)

    def foreign(self, own: float) -> float:
        """Share of all CPU time since these times that other processes used; `own`: seconds of the ranks."""
        now = CpuTimes.now()
        return max((now.busy - self.busy - own) / max(now.total - self.total, 1e-9), 0.0)


def busy_share(seconds: float = 1.0) -> float:
    """Share of all CPU time that is in use."""
    before = CpuTimes.now()
    time.sleep(seconds)
    return before.foreign(0.0)


def calibrate() -> float:
    """Seconds of a fixed piece of single-threaded work: the best of five, so that one interruption is no verdict."""
    best = float("inf")
    for _ in range(5):
        a = torch.ones(192, 192)
        start = time.perf_counter()
        for _ in range(30):
            a = (a @ a).div_(192.0)
        best = min(best, time.perf_counter() - start)
    return best


def verdict(before: float, calibration: list[float], foreign: list[float]) -> list[str]:
    """Reasons not to trust times; empty if the machine was quiet."""
    reasons = []
    if before > BUSY_BEFORE:
        reasons.append(f"{before:.0%} of its CPU time was in use before the start (limit {BUSY_BEFORE:.0%})")
    if (measured := spread(calibration)) > CALIBRATION_SPREAD:
        reasons.append(f"a fixed loop varied by {measured:.0%} (limit {CALIBRATION_SPREAD:.0%})")
    if foreign and (measured := statistics.median(foreign)) > FOREIGN:
        reasons.append(f"others used {measured:.0%} of the CPUs meanwhile (limit {FOREIGN:.0%})")
    return reasons


def noise_now() -> list[str]:
    """Reasons not to trust times that are taken now, from the share of CPU time in use and the fixed loop alone."""
    return verdict(busy_share(), [calibrate() for _ in range(8)], [])


def memory_field(file: str, *fields: str) -> int:
    """Bytes of fields of a file in /proc/self, such as "VmHWM" (the peak of resident memory) of "status"."""
    lines = (line.split() for line in Path(f"/proc/self/{file}").read_text().splitlines())
    values = {words[0].rstrip(":"): words[1] for words in lines if len(words) == 3}
    return 1024 * sum(int(values[field]) for field in fields)


# -- results -----------------------------------------------------------------------------------------------------------


def options_of(
    parser: argparse.ArgumentParser, arguments: list[str], **defaults: int | float | str | bool
) -> argparse.Namespace:
    """Parse the rest of the line, with an option for each default, of the default's type; False is a switch."""
    for name, default in defaults.items():
        kind: Any = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    return parser.parse_args(arguments)


def record(
    name: str, tables: list[Table], noise: Sequence[str] = (), *, keep_noisy: bool = True, **figures: Any
) -> int:
    """Print tables from `table_of` and save them with other figures; returns the exit code.

    Args:
        noise: reasons not to trust times. With any nothing is saved, unless `keep_noisy`; then the file has them.
    """
    print_tables(tables)
    for reason in noise:
        print(f"too busy to tell: {reason}", file=sys.stderr)
    if noise and not keep_noisy:
        print("nothing is recorded; --keep-noisy records it, marked", file=sys.stderr)
        return TOO_BUSY
    print(f"written to {save(name, {**figures, 'tables': tables}, noise=noise)}")
    return 0


def result_of(figures: Any, noise: Sequence[str] = ()) -> dict[str, Any]:
    """Figures with machine, date and commit; `noise`: reasons not to trust their times."""
    return {"machine": describe(), "commit": commit(), "noise": list(noise), "figures": figures}


def save(name: str, figures: Any, *, noise: Sequence[str] = (), folder: Path | None = None) -> Path:
    """Write `result_of` figures."""
    path = (folder or FOLDER) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result_of(figures, noise), indent=1) + "\n")
    return path


def load_all(prefix: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """Every result whose name begins so, by name."""
    paths = sorted((folder or FOLDER).glob(f"{prefix}*.json"))
    return [{"name": path.stem, **json.loads(path.read_text())} for path in paths]


def commit() -> str | None:
    """The checkout's commit, with a plus sign if other files than results differ; None without git or a checkout."""
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"]
    changed = subprocess.run(status, capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table, columns aligned; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell[:1] in "-+<0123456789" for cell in column[1:]) for column in columns]
    rule = ["-" * (w - 1) + ":" if right else "-" * w for w, right in zip(widths, numeric, strict=True)]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        places = zip(row, widths, numeric, strict=True)
        lines.append(f"| {' | '.join(c.rjust(w) if right else c.ljust(w) for c, w, right in places)} |")
    return "\n".join(lines)


def table_of(title: str, text: str, header: str, rows: list[list[Any]], *, exact: bool = False) -> Table:
    """A table of the report: column names separated by "; "; `exact`: a busy machine does not change its figures."""
    return {"title": title, "text": text, "header": header.split("; "), "rows": rows, "exact": exact}


def print_tables(tables: list[Table]) -> None:
    """Print tables from `table_of`."""
    for part in tables:
        lines = (part["title"], part["text"], table(part["header"], part["rows"]))
        print(*(f"{line}\n" for line in lines if line), sep="\n", flush=True)


def mib(count: float) -> str:
    """Bytes as MiB."""
    value = count / 2**20
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


# -- the report --------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- bench summary: python -m bench report -->", "<!-- end of bench summary -->"
INTRODUCTION = """\
# Benchmarks: the newest figures

Written by `python -m bench report` from the JSON files in this folder, which have more: raw samples, parts of a step,
other numbers of ranks, losses. Counts are exact on any machine. Times are medians over five or more interleaved rounds,
ratios are taken within a round; times of a busy machine are left out, and rows with more than 10% spread. Each section
names machine, date and commit. [Commands and method](../README.md).
Padding: [known models](../../packages/layout-planner/docs/padding.md)."""
FIRST = ("counts", "speed")  # results whose tables come first
ROUNDS, SPREAD = 5, 0.10  # fewest rounds, and largest spread, of times
# Rows and tables that are left out here; the JSON files have them.
LEFT_OUT = {
    ("counts-counts", "ranks"): ("8 simulated", "2 real", "4 real"),
    ("host", "simulated ranks"): ("8", "1024"), ("muon", "ranks"): ("2", "64"), ("muon", "model"): ("llama-3-8b",),
}  # fmt: skip
LEFT_OUT_COLUMNS = ("parked MiB", "PSS MiB", "forward ms", "backward ms", "update ms")
LEFT_OUT_TABLES = (
    "Steps to that loss by learning rate", "8-bit AdamW on meshes", "A step on plain tensors", "Time of Muon",
)  # fmt: skip


def to_measure_again(items: list[dict[str, Any]]) -> list[str]:
    """Results that a report cannot show, and why: changes that no commit has, or too few rounds."""
    problems = []
    for item in items:
        if (item["commit"] or "+").endswith("+"):
            problems.append(
                f"{item['name']} was measured on {item['commit']}, with changes that no commit has"
            )
        if (rounds := min(_rounds(item["figures"]), default=ROUNDS)) < ROUNDS:
            problems.append(f"{item['name']} has {rounds} rounds; expected at least {ROUNDS}")
    return problems


def _rounds(figures: Any, samples: bool = False) -> list[int]:
    """How many samples there are, of each list of them in some figures."""
    if isinstance(figures, dict):
        parts = ((value, samples or key == "samples") for key, value in figures.items())
        return [count for part in parts for count in _rounds(*part)]
    return [len(figures)] if samples and isinstance(figures, list) else []


def write_report(folder: Path) -> Path:
    """Write REPORT.md of all results in `folder`; return its path. ValueError names results to be measured again."""
    items = load_all("", folder)
    if problems := to_measure_again(items):
        raise ValueError("; ".join(problems))
    out = [INTRODUCTION]
    for item in sorted(items, key=lambda item: not item["name"].startswith(FIRST)):
        where = item["machine"]
        device = f"{where['gpus']} x {where['gpu']}" if where["gpu"] else f"{where['cores']} x {where['cpu']}"
        for part in item["figures"].get("tables", []):
            if part["title"].startswith(LEFT_OUT_TABLES):
                continue
            title = f"## {part['title']}\n\n"
            if item["noise"] and not part.get("exact"):
                out.append(f"{title}Left out: {'; '.join(item['noise'])}.")
                continue
            hidden = [LEFT_OUT.get((item["name"], column), ()) for column in part["header"]]
            rows = [r for r in part["rows"] if not any(c in h for c, h in zip(r, hidden, strict=True))]
            rows, varied = _steady(part["header"], rows)
            about = f"{part['text']}{varied} *{device}, {where['date'][:10]}, {item['commit']}.*"
            kept = [n for n, column in enumerate(part["header"]) if column not in LEFT_OUT_COLUMNS]
            header, *rows = ([row[n] for n in kept] for row in (part["header"], *rows))
            out += [f"{title}{about}", table(header, rows)]
    path = folder / "REPORT.md"
    path.write_text("\n\n".join(out) + "\n")
    return path


def _steady(header: list[str], rows: list[list[Any]]) -> tuple[list[list[Any]], str]:
    """Rows whose times varied little, and a sentence, after a space, on the others."""
    if "spread" not in header:
        return rows, ""
    at = header.index("spread")
    steady = [row for row in rows if float(row[at].rstrip("%")) <= 100 * SPREAD]
    varied = [f"{row[0]} ({row[at]})" for row in rows if row not in steady]
    return steady, f" Left out for their spread: {', '.join(varied)}." if varied else ""


def summary(folder: Path) -> list[str]:
    """The summary for the README: exact counts."""
    out = []
    for item in load_all("counts-counts", folder):
        systems = item["figures"].get("64 simulated", {})
        rows = [
            [label, *(mib(f["copied"][part]) for part in ("forward", "backward")), sum(f["calls"].values()),
             mib(f["peak"])]
            for label, f in (
                ("fsdp_runtime", systems["ours"]), ("FSDP2", systems["fsdp2"]),
                ("fsdp_runtime, ends apart", systems["ours-apart"]), ("FSDP2, ends apart", systems["fsdp2-apart"]),
                ("fsdp_runtime, ends apart, no prefetch", systems["ours-lean"]),
            )
        ]  # fmt: skip
        header = "64 ranks; MiB copied in forward; in backward; dispatcher calls; peak MiB"
        about = (
            "One fp32 step of a 31.6M-parameter Llama, counted on one of 64 simulated ranks; copies and calls are those"
            "\nbeyond the same step without sharding. *Ends apart*: embedding and head are units of their own. *No "
            "prefetch*: nothing is gathered\nahead, which saves memory and gives up overlap; FSDP2 was not counted so."
        )
        out += [about, table(header.split("; "), rows)]
    return [*out, "Times, and DDP, FSDP1 and DeepSpeed: [bench/results/REPORT.md](bench/results/REPORT.md)."]


def put_into(readme: Path, folder: Path) -> None:
    """Replace the summary block of `readme`; raises ValueError if it has none."""
    text, block = readme.read_text(), "\n\n".join([BEGIN, *summary(folder), END])
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{readme} has no block from {BEGIN} to {END}; add the two lines where it should be")
    readme.write_text(pattern.sub(lambda _: block, text))


def main_report(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Write the page, and the summary of a README."""
    parser.add_argument("--folder", type=Path, default=FOLDER, help="results to read (bench/results)")
    parser.add_argument("--readme", type=Path, help="also put the summary into this file")
    options = parser.parse_args(arguments)
    try:
        print(f"written to {write_report(options.folder)}")
    except ValueError as error:
        parser.error(str(error))
    if options.readme:
        put_into(options.readme, options.folder)
        print(f"summary put into {options.readme}")
