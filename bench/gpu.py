"""GPU tests and GPU benchmarks, each in a process of its own, within a stated time. Started by `gpu.sh`.

    tests                  pytest -m gpu over all packages
    one-rank               NCCL with one rank: host time and copies, no wire; losses are compared
    simulated-R            one process for rank 0 of R, a wire of 50 GB/s into each rank; in turns with no delay at all,
                           the difference being exposed communication
    memory-R-SYSTEM        peak reserved and allocated memory of one system in that world
    real-N                 NCCL on all GPUs, where there are several

A piece that fails or runs out of time is written down as such and the next one starts.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compare import PARTS, footprint, rounds, summarise
from .measure import ROOT, commit, describe, launch, mib, parser_of, table, table_of
from .systems import SYSTEMS as KNOWN

BUDGET = 540.0  # seconds for everything
SYSTEMS = ["plain", "ours", "fsdp2"]
WIRE = {"bandwidth": 50e9, "latency": 20e-6}  # one 400 Gb/s port for each GPU
SIMULATED = (8, 64)


@dataclass(frozen=True)
class Piece:
    """One launch: a worker, its ranks and request, and the most seconds it may take."""

    name: str
    worker: Callable[..., Any]
    ranks: int
    request: dict[str, Any]
    limit: float


def pieces(gpus: int, dry: bool) -> list[Piece]:
    """What to run, the most telling first."""
    device, precision = ("cpu", "float32") if dry else ("cuda", "bfloat16")
    rounds_and_steps = {"rounds": 2, "steps": 1} if dry else {"rounds": 6, "steps": 3}
    base: dict[str, Any] = {"device": device, "precision": precision, **rounds_and_steps}
    dense, stacked = ("tiny", "tiny-moe") if dry else ("gpu-dense", "gpu-stacked")
    everyone = ["plain", "ours", "fsdp2", "ddp", "fsdp1"]
    request = {**base, "workload": "tiny" if dry else "gpu-small", "systems": everyone}
    out = [Piece("one-rank", rounds, 1, request, 110)]
    for workload in (dense, stacked):
        for ranks in SIMULATED:
            request = {**base, "workload": workload, "systems": SYSTEMS, "simulate": {"ranks": ranks, **WIRE}}
            out.append(Piece(f"simulated-{workload}-{ranks}", rounds, 1, request, 100))
    for ranks in SIMULATED:
        for system in ("ours", "fsdp2"):
            request = {**base, "workload": dense, "system": system, "simulate": {"ranks": ranks, **WIRE}}
            out.append(Piece(f"memory-{dense}-{ranks}-{system}", footprint, 1, request, 60))
    if gpus > 1 or dry:
        request = {**base, "workload": dense, "systems": ["ddp", "ours", "fsdp2", "fsdp1"]}
        out.insert(1, Piece("real", rounds, 2 if dry else gpus, request, 110))
    return out


def run_tests(out: Path, limit: float, dry: bool) -> dict[str, Any]:
    """pytest -m gpu; the counts it printed. The log is in `out` too."""
    if importlib.util.find_spec("pytest") is None:
        return {"failed": "pytest is not installed: the GPU tests were not run"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "packages"]
    log = out / "tests.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"the GPU tests took longer than {limit:.0f} s", **outcome(log.read_text())}
    result = outcome(log.read_text())
    # Exit code 5: nothing collected, which on a machine without a GPU is no failure.
    return result if code in (0, 5) else {"failed": f"pytest ended with {code}; see tests.log", **result}


def outcome(log: str) -> dict[str, int]:
    """`{"passed": 12, "skipped": 3}` from pytest's last line."""
    lines = [
        line for line in log.splitlines() if re.search(r"\d+ (passed|failed|skipped|error|deselected)", line)
    ]
    return (
        {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
        if lines
        else {}
    )


def run(out: Path, *, dry: bool, budget: float, skip_tests: bool) -> dict[str, Any]:
    """Everything that fits into the budget; what each piece found, also as JSON of its own in `out`."""
    import torch

    from ragged_shard.testing import RankError

    start = time.monotonic()

    def left() -> float:
        return budget - (time.monotonic() - start)

    gpus = torch.cuda.device_count()
    found: dict[str, Any] = {"dry_run": dry, "pieces": {}}
    if not skip_tests:
        found["tests"] = run_tests(out, min(left() - 120, 200), dry)
        print(f"tests: {found['tests']}", flush=True)
    for piece in pieces(gpus, dry):
        began = time.monotonic()
        if left() < 25:
            answer: Any = {"failed": f"no time left of {budget:.0f} s"}
        else:
            limit = min(piece.limit, left() - 5)
            try:
                answer = launch(piece.worker, piece.ranks, piece.request, timeout=limit)
                if piece.worker is rounds:
                    answer["times"] = summarise(answer)
            except RankError as error:
                answer = {"failed": "; ".join(map(repr, error.causes.values())) or str(error)}
                (out / f"{piece.name}.log").write_text(str(error))
        seconds = time.monotonic() - began
        found["pieces"][piece.name] = answer
        (out / f"{piece.name}.json").write_text(json.dumps(answer, indent=1))
        word = answer.get("failed", "done").splitlines()[0]
        print(f"{piece.name}: {word} ({seconds:.0f} s)", flush=True)
    found["seconds"] = time.monotonic() - start
    return found


def report_tables(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything as tables."""
    where, figures = content["machine"], content["figures"]
    pieces = figures["pieces"]
    title = f"GPU: {where['gpus']} x {where['gpu'] or 'no GPU'}"
    text = f"GPU tests: {figures.get('tests', 'not run')}. All took {figures['seconds']:.0f} s."
    if figures["dry_run"]:
        text += " A DRY RUN on a CPU with tiny models: the path works, the figures mean nothing."
    text += "".join(
        f" {n} failed: {p['failed'].splitlines()[0]}." for n, p in pieces.items() if "failed" in p
    )
    rows, exposed = [], []
    for name, piece in pieces.items():
        for system, t in piece.get("times", {}).items():
            parts = (f"{1e3 * t[part]:.2f}" for part in PARTS)
            ratio = f"{t['wall_ratio_fsdp2']:.2f}" if "wall_ratio_fsdp2" in t else ""
            rows.append(
                [name, KNOWN[system].label, f"{1e3 * t['wall']:.2f}", ratio, *parts, f"{t['spread']:.1%}"]
            )
            if "exposed" in t:
                exposed.append([name, system, f"{1e3 * t['exposed']:.2f}", f"{t['exposed'] / t['wall']:.1%}"])
    header = "world; system; step ms; x FSDP2; forward ms; backward ms; optimizer ms; spread"
    keys = ("cuda_reserved", "cuda_allocated", "start")
    memory = [
        [name.removeprefix("memory-"), *(mib(piece[key]) if key in piece else "" for key in keys)]
        for name, piece in pieces.items()
        if name.startswith("memory-") and "start" in piece
    ]
    skipped = {(KNOWN[s].label, why) for p in pieces.values() for s, why in p.get("skipped", {}).items()}
    delay, by_world = (
        "Step minus the same step with no delay on the wire.",
        "world and system; reserved MiB; ",
    )
    tables = [
        table_of(title, text, header, rows),
        table_of(f"{title}: peak memory", "One process each.", by_world + "allocated MiB; RSS MiB", memory),
        table_of(
            f"{title}: exposed communication", delay, "world; system; exposed ms; share of the step", exposed
        ),
        table_of(f"{title}: not measured", "", "system; why", [list(pair) for pair in sorted(skipped)]),
    ]
    return [tables[0], *(part for part in tables[1:] if part["rows"])]


def summary(content: dict[str, Any]) -> str:
    """Markdown of everything."""
    where = content["machine"]
    lines = [f"# GPU benchmarks, torch {where['torch']}, {where['date']}, commit {content['commit']}"]
    for part in content["figures"]["tables"]:
        lines += [f"## {part['title']}", part["text"], table(part["header"], part["rows"])]
    return "\n\n".join(line for line in lines if line) + "\n"


def main(arguments: list[str]) -> int:
    """Run everything; write figures.json and summary.md."""
    import torch

    parser = parser_of("gpu", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU, to try the path")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything (540)")
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA device; --dry-run tries the path on a CPU", file=sys.stderr)
        return 1
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options.out.mkdir(parents=True, exist_ok=True)
    figures = run(options.out, dry=options.dry_run, budget=options.budget, skip_tests=options.skip_tests)
    content: dict[str, Any] = {"machine": describe(), "commit": commit(), "noise": [], "figures": figures}
    figures["tables"] = report_tables(content)
    (options.out / "figures.json").write_text(json.dumps(content, indent=1))
    (options.out / "summary.md").write_text(summary(content))
    print(f"\n{summary(content)}\nwritten to {options.out}")
    failed = [name for name, piece in figures["pieces"].items() if "failed" in piece]
    return 1 if failed or "failed" in figures.get("tests", {}) else 0
