"""GPU tests and GPU benchmarks, each in a process of its own, within a stated time. Started by `gpu.sh`.

    tests                  pytest -m gpu over all packages
    one-rank               NCCL with one rank: host time and copies, no wire; losses are compared
    simulated-R            one process for rank 0 of R, a wire of 50 GB/s into each rank; and the same with no delay, the
                           difference being exposed communication
    memory-R-SYSTEM        peak reserved and allocated memory of one system in that world
    real-N                 NCCL on all GPUs, where there are several

A piece that fails or runs out of time is written down as such and the next one starts.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine, results
from .launch import ROOT, LaunchError, launch

BUDGET = 540.0  # seconds for everything
SYSTEMS = ["plain", "ours", "fsdp2"]
WIRE = {"bandwidth": 50e9, "latency": 20e-6}  # one 400 Gb/s port for each GPU
SIMULATED = (8, 64)


@dataclass(frozen=True)
class Piece:
    """One launch: a worker, its ranks and request, and the most seconds it may take."""

    name: str
    worker: str
    ranks: int
    request: dict[str, Any]
    limit: float


def pieces(gpus: int, dry: bool) -> list[Piece]:
    """What to run, the most telling first."""
    device, precision = ("cpu", "float32") if dry else ("cuda", "bfloat16")
    base = {"device": device, "precision": precision, "rounds": 6, "steps": 3}
    dense, stacked = ("tiny", "tiny-moe") if dry else ("gpu-dense", "gpu-stacked")
    out = [
        Piece(
            "one-rank",
            "rounds",
            1,
            {
                **base,
                "workload": "tiny" if dry else "gpu-small",
                "systems": ["plain", "ours", "fsdp2", "ddp", "fsdp1"],
            },
            110,
        )
    ]
    for workload in (dense, stacked):
        for ranks in SIMULATED:
            for wire, label in ((WIRE, ""), ({"bandwidth": None}, "-nowire")):
                simulate = {"ranks": ranks, **wire}
                request = {**base, "workload": workload, "systems": SYSTEMS, "simulate": simulate}
                out.append(Piece(f"simulated-{workload}-{ranks}{label}", "rounds", 1, request, 80))
    for ranks in SIMULATED:
        for system in ("ours", "fsdp2"):
            request = {
                **base, "workload": dense, "system": system, "simulate": {"ranks": ranks, **WIRE}
            }  # fmt: skip
            out.append(Piece(f"memory-{dense}-{ranks}-{system}", "footprint", 1, request, 60))
    if gpus > 1 or dry:
        request = {**base, "workload": dense, "systems": ["ddp", "ours", "fsdp2", "fsdp1", "megatron-fsdp"]}
        out.insert(1, Piece("real", "rounds", 2 if dry else gpus, request, 110))
    return out


def run_tests(out: Path, limit: float, dry: bool) -> dict[str, Any]:
    """pytest -m gpu; the counts it printed. The log lies beside."""
    if importlib.util.find_spec("pytest") is None:
        return {"failed": "pytest is not installed: the GPU tests were not run"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "packages"]
    if importlib.util.find_spec("pytest_timeout") is None:  # the setting of that plug-in is then not known
        command += ["-o", "addopts=--import-mode=importlib --strict-markers -ra", "-o", "filterwarnings="]
    log = out / "tests.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"the GPU tests took longer than {limit:.0f} s", **outcome(log.read_text())}
    found = outcome(log.read_text())
    # Exit code 5: nothing collected, which on a machine without a GPU is no failure.
    return found if code in (0, 5) else {"failed": f"pytest ended with {code}; see tests.log", **found}


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
            try:
                answer = launch(
                    piece.worker, piece.ranks, piece.request, timeout=min(piece.limit, left() - 5)
                )
                if piece.worker == "rounds":
                    from .speed import summarise

                    answer["times"] = summarise(answer)
            except LaunchError as error:
                answer = {"failed": str(error)}
        seconds = time.monotonic() - began
        found["pieces"][piece.name] = answer
        (out / f"{piece.name}.json").write_text(json.dumps(answer, indent=1))
        word = answer.get("failed", "done").splitlines()[0]
        print(f"{piece.name}: {word} ({seconds:.0f} s)", flush=True)
    found["seconds"] = time.monotonic() - start
    return found


def summary(content: dict[str, Any]) -> str:
    """Markdown of everything."""
    from .systems import SYSTEMS as LABELS

    where, found = content["machine"], content["figures"]
    lines = [
        f"# GPU benchmarks: {where['gpus']} x {where['gpu'] or 'no GPU'}, torch {where['torch']}, {where['date']}"
    ]
    if found["dry_run"]:
        lines.append(
            "\nA DRY RUN on a CPU with tiny models: it shows that the path works, its figures mean nothing."
        )
    lines.append(f"\nGPU tests: {found.get('tests', 'not run')}. All took {found['seconds']:.0f} s.\n")
    header = ["system", "step ms", "x FSDP2", "forward ms", "backward ms", "optimizer ms", "spread"]
    for name, piece in found["pieces"].items():
        if "failed" in piece:
            lines.append(f"\n**{name}**: {piece['failed'].splitlines()[0]}\n")
            continue
        if "times" not in piece:
            continue
        lines.append(f"\n**{name}**\n")
        rows = [
            [
                LABELS[system].label,
                f"{1e3 * t['wall']:.2f}",
                f"{t['wall_ratio_fsdp2']:.2f}" if "wall_ratio_fsdp2" in t else "",
                *(f"{1e3 * t[part]:.2f}" for part in ("forward", "backward", "update")),
                f"{t['spread']:.1%}",
            ]
            for system, t in piece["times"].items()
        ]
        lines.append(results.table(header, rows))
        lines += [f"\n{LABELS[system].label}: {reason}" for system, reason in piece["skipped"].items()]
    lines += _memory(found["pieces"]) + _exposed(found["pieces"])
    return "\n".join(lines) + "\n"


def _memory(found: dict[str, Any]) -> list[str]:
    rows = [
        [name.removeprefix("memory-"), *(results.mib(piece[k]) if k in piece else "" for k in _MEMORY_KEYS)]
        for name, piece in found.items()
        if name.startswith("memory-") and "start" in piece
    ]
    return (
        ["\n**Peak memory, MiB**\n", results.table(["world and system", *_MEMORY_KEYS], rows)] if rows else []
    )


_MEMORY_KEYS = ("cuda_reserved", "cuda_allocated", "start")


def _exposed(found: dict[str, Any]) -> list[str]:
    rows = []
    for name, piece in found.items():
        free = found.get(f"{name}-nowire", {})
        if "times" in piece and "times" in free:
            for system, t in piece["times"].items():
                if system in free["times"]:
                    seconds = t["wall"] - free["times"][system]["wall"]
                    rows.append([name, system, f"{1e3 * seconds:.2f}", f"{seconds / t['wall']:.1%}"])
    header = ["world", "system", "exposed ms", "share of the step"]
    return [
        "\n**Exposed communication** (step minus the same step with no delay)\n",
        results.table(header, rows),
    ]


def main(arguments: list[str]) -> int:
    """Run, write figures.json and summary.md."""
    import torch

    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__.split("\n")[0])
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
    found = run(options.out, dry=options.dry_run, budget=options.budget, skip_tests=options.skip_tests)
    content = {"machine": machine.describe(), "commit": results.commit(), "noise": [], "figures": found}
    (options.out / "figures.json").write_text(json.dumps(content, indent=1))
    (options.out / "summary.md").write_text(summary(content))
    print(f"\n{summary(content)}\nwritten to {options.out}")
    failed = [name for name, piece in found["pieces"].items() if "failed" in piece]
    return 1 if failed or "failed" in found.get("tests", {}) else 0
