"""GPU tests and GPU benchmarks, each in a process of its own, within a stated time. Started by `gpu.sh`.

    step-SYSTEM[-expandable] one step of rank 0 of 8, which only a GPU shows: launches, copies, host time, gaps of the
                             computation, communication under it, calls of cudaMalloc, memory by stream; a trace and
                             a snapshot of the allocator
    tests-PACKAGE            pytest -m gpu, verbose; tracebacks are written as they come
    one-rank                 NCCL with one rank: host time and copies, no wire; losses are compared
    real                     NCCL on all GPUs, where there are several
    unused-SYSTEM[-expandable]
                             what the allocator holds and nobody uses after 100 steps of Qwen3-30B-A3B's layers
    memory-...-R-SYSTEM      peak reserved and allocated memory of one system, as rank 0 of R
    longest-LAYERS-SIDE      the longest context of an 8B full fine-tune, tokens/s and peak memory; see below
    rates                    Newton-Schulz, 8-bit AdamW, FP8 and NF4 decoding: TFLOP/s and GB/s; see rates.py
    simulated-...-R          one process for rank 0 of R, a wire of 50 GB/s into each rank; in turns with no delay at
                             all, the difference being exposed communication

A piece that fails or runs out of time is written down as such and the next one starts. `--only unused,rates` chooses
pieces by the beginnings of their names; `--resume` leaves out those whose result in OUT is no failure.
"""

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from block_optim import AdamW8bit, local_of
from fsdp_runtime.train import ModelConfig, RunConfig, Transformer
from fsdp_runtime.train.model import losses_of
from fsdp_runtime.train.systems import make_system
from ragged_shard.testing import RankError, run_ranks, shut_down

from . import measure
from .compare import PARTS, Clock, build, footprint, peaks, rounds, summarise
from .measure import ROOT, launch, mib, table, table_of
from .rates import measure_rates, rates_table
from .systems import SYSTEMS as KNOWN
from .systems import Job

BUDGET = 360.0  # seconds of one call
SYSTEMS = ["plain", "ours", "fsdp2"]
PEERS = ("ours", "fsdp2")
WIRE = {"bandwidth": 50e9, "latency": 20e-6}  # one 400 Gb/s port for each GPU
SIMULATED = (8, 64)
TESTED = ("ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")


@dataclass(frozen=True)
class Piece:
    """One launch: a worker, its ranks and request, and the most seconds it may take."""

    name: str
    worker: Callable[..., Any]
    ranks: int
    request: dict[str, Any]
    limit: float


def pieces(gpus: int, dry: bool, layers: int = 32) -> list[Piece]:
    """The pieces, in the order of their importance; `layers`: of the model of `longest`."""
    device, precision = ("cpu", "float32") if dry else ("cuda", "bfloat16")
    rounds_and_steps = {"rounds": 2, "steps": 1} if dry else {"rounds": 6, "steps": 3}
    base: dict[str, Any] = {"device": device, "precision": precision, **rounds_and_steps}
    sizes = ("tiny", "tiny-moe", "tiny-moe") if dry else ("gpu-dense", "gpu-stacked", "gpu-experts")
    dense, stacked, experts = sizes
    everyone = ["plain", "ours", "fsdp2", "ddp", "fsdp1"]
    request = {**base, "workload": "tiny" if dry else "gpu-small", "systems": everyone}

    def world(ranks: int, workload: str, **more: Any) -> dict[str, Any]:
        return {**base, "workload": workload, "simulate": {"ranks": ranks, **WIRE}, **more}

    allocators = (("", ""), ("-expandable", "" if dry else "expandable_segments:True"))
    out = []
    for name, settings in allocators:
        for system in PEERS:
            step = world(8, dense, system=system, allocator=settings, called=f"{system}{name}")
            out.append(Piece(f"step-{step['called']}", profiled, 1, step, 50))
    out.append(Piece("one-rank", rounds, 1, request, 110))
    if gpus > 1 or dry:
        request = {**base, "workload": dense, "systems": ["ddp", "ours", "fsdp2", "fsdp1"]}
        out.append(Piece("real", rounds, 2 if dry else gpus, request, 110))

    for system in PEERS:
        for name, settings in allocators:
            request = world(8, experts, system=system, steps=2 if dry else 100, allocator=settings)
            out.append(Piece(f"unused-{system}{name}", footprint, 1, request, 60))
    for ranks in SIMULATED:
        for system in PEERS:
            request = world(ranks, dense, system=system)
            out.append(Piece(f"memory-{dense}-{ranks}-{system}", footprint, 1, request, 60))
    for side in SIDES:
        request = {"device": device, "side": side, "sizes": {**SHAPE, "num_layers": layers}}
        request |= {"least": 1024, "most": 1 << 20, "steps": 3}
        if dry:
            request |= {"sizes": TINY, "least": 16, "most": 128, "steps": 1}
            request["pretended_limit"] = 0 if side == "fsdp2" else 100
        name = f"longest-{request['sizes']['num_layers']}-{side}"
        out.append(Piece(name, trained, max(1, gpus), request, 100))
    out.append(Piece("rates", measure_rates, 1, {"device": device, "tiny": dry}, 200))
    for workload in (dense, stacked):
        for ranks in SIMULATED:
            request = world(ranks, workload, systems=SYSTEMS)
            out.append(Piece(f"simulated-{workload}-{ranks}", rounds, 1, request, 100))
    return out


# -- on a rank ---------------------------------------------------------------------------------------------------------


def profiled(request: dict[str, Any], simulation: Any = None) -> dict[str, Any]:
    """One step of a system, alone in its process; its trace and a snapshot of the allocator are files in `out`."""
    job = Job.of(request)
    on_gpu = job.device == "cuda"
    if settings := request["allocator"]:  # before anything is allocated
        torch.cuda.memory._set_allocator_settings(settings)
    trainer, clock, out = build(request["system"], job), Clock(job), Path(request["out"])
    clock.mean_losses(trainer, 3)
    batch = clock.batch(trainer)
    before = _mallocs() if on_gpu else 0
    with torch.profiler.profile() as profile:
        began = time.perf_counter()
        trainer.train(batch)
        host = time.perf_counter() - began
        torch.accelerator.synchronize() if on_gpu else None
    trace = out / f"trace-{request['called']}.json"
    profile.export_chrome_trace(str(trace))
    work = {"host_ms": 1e3 * host, **steps_work(json.loads(trace.read_text())["traceEvents"])}
    work |= {"mallocs": _mallocs() - before if on_gpu else 0, "by_stream": []}
    if on_gpu:
        snapshot = torch.cuda.memory_snapshot()
        (out / f"snapshot-{request['called']}.json").write_text(json.dumps(snapshot, default=str))
        by_stream: Counter[int] = Counter()
        for segment in snapshot:
            by_stream[segment["stream"]] += segment["total_size"]
        work["by_stream"] = sorted(by_stream.values(), reverse=True)
    return {"step": work}


def _mallocs() -> int:
    return int(torch.cuda.memory_stats()["num_device_alloc"])


def steps_work(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels, copies and launches in a profiler's events; how long the stream with the most kernels is idle, and which
    share of the other streams' work runs while it is busy.
    """
    launches = sum(event.get("name", "").startswith(("cudaLaunch", "cuLaunch")) for event in events)
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    streams: dict[Any, list[tuple[float, float]]] = {}
    for event in work:
        streams.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    compute = max(streams, key=lambda stream: len(streams[stream]), default=None)
    busy = _joined(streams.pop(compute, []))
    others = _joined([span for spans in streams.values() for span in spans])
    common = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in busy
        for other_begin, other_end in others
    )
    return {
        "kernels": sum(event["cat"] == "kernel" for event in work),
        "copies": sum(event["cat"] == "gpu_memcpy" for event in work),
        "launches": launches,
        "idle": 1 - _length(busy) / (busy[-1][1] - busy[0][0]) if busy else 0.0,
        "overlapped": common / _length(others) if others else 0.0,
    }


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that one of the spans covers, in order, without overlaps."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


# -- all of it ---------------------------------------------------------------------------------------------------------


def pytest_runtest_logreport(report: Any) -> None:
    """Pytest's hook: print a failure when it happens, not at an end that a limit may cut off."""
    if report.failed:
        print(f"\n{report.longreprtext}", flush=True)


def run_tests(package: str, out: Path, limit: float) -> dict[str, Any]:
    """pytest -m gpu over a package; the counts it printed. The log is in `out` too."""
    if importlib.util.find_spec("pytest") is None:
        return {"failed": "pytest is not installed: the GPU tests were not run"}
    options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "bench.gpu"]
    log = out / f"tests-{package}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *options, f"packages/{package}"],
                cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit,
                env=measure.environment(),
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            failed = f"the GPU tests took longer than {limit:.0f} s"
            return {"failed": failed, "counts": outcome(log.read_text())}
    result = {"counts": outcome(log.read_text())}
    # Exit code 5: nothing collected, which on a machine without a GPU is no failure.
    return result if code in (0, 5) else {"failed": f"pytest ended with {code}; see {log.name}", **result}


def outcome(log: str) -> dict[str, int]:
    """`{"passed": 12, "skipped": 3}` from pytest's last line."""
    words = r"(\d+) (passed|failed|skipped|error|deselected)"
    counts = [pairs for line in log.splitlines() if (pairs := re.findall(words, line))]
    return {word: int(n) for n, word in counts[-1] if word != "deselected"} if counts else {}


def run_piece(piece: Piece, out: Path, limit: float) -> dict[str, Any]:
    """A piece's answer, or how it failed; a failure's log is in `out`."""
    try:
        if piece.worker is trained:
            return run_side(piece.ranks, piece.request, limit)
        request = {**piece.request, "out": str(out)}
        answer: dict[str, Any] = launch(piece.worker, piece.ranks, request, timeout=limit)
    except RankError as error:
        (out / f"{piece.name}.log").write_text(str(error))
        return {"failed": "; ".join(map(repr, error.causes.values())) or str(error)}
    return {**answer, "times": summarise(answer)} if piece.worker is rounds else answer


def run(
    out: Path,
    *,
    dry: bool,
    budget: float,
    skip_tests: bool,
    only: str = "",
    resume: bool = False,
    layers: int = 32,
) -> dict[str, Any]:
    """Everything that fits into the budget; what each piece gave, also as JSON of its own in `out`."""
    start = time.monotonic()
    work: list[tuple[str, float, Callable[[float], dict[str, Any]]]] = [
        (piece.name, piece.limit, partial(run_piece, piece, out))
        for piece in pieces(torch.cuda.device_count(), dry, layers)
    ]
    first = sum(name.startswith("step-") for name, *_ in work)
    if not skip_tests:
        work[first:first] = [(f"tests-{name}", 200, partial(run_tests, name, out)) for name in TESTED]
    results: dict[str, Any] = {}
    for name, limit, call in work:
        if not name.startswith(tuple(only.split(","))):
            continue
        file, began = out / f"{name}.json", time.monotonic()
        left = budget - (began - start)
        earlier = json.loads(file.read_text()) if resume and file.exists() else {"failed": "not run"}
        if "failed" not in earlier:
            results[name] = earlier
            continue
        answer = call(min(limit, left - 5)) if left >= 25 else {"failed": f"no time left of {budget:.0f} s"}
        file.write_text(json.dumps(answer, indent=1))
        results[name] = answer
        word = str(answer.get("failed", answer.get("line", "done"))).splitlines()[0]
        print(f"{name}: {word} ({time.monotonic() - began:.0f} s)", flush=True)
    return {"dry_run": dry, "pieces": results, "seconds": time.monotonic() - start}


def report_tables(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything as tables."""
    where, figures = content["machine"], content["figures"]
    pieces = figures["pieces"]
    title = f"GPU: {where['gpus']} x {where['gpu'] or 'no GPU'}"
    tests = {name: piece for name, piece in pieces.items() if name.startswith("tests-")}
    text = "".join(f"{name}: {piece.get('counts', 'not run')}. " for name, piece in tests.items())
    text += f"All took {figures['seconds']:.0f} s."
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
    keys = ("cuda_reserved", "cuda_allocated", "cuda_unused", "start")
    memory = [
        [name, *(mib(piece[key]) if key in piece else "" for key in keys)]
        for name, piece in pieces.items()
        if "start" in piece
    ]
    work = [
        [name.removeprefix("step-"), *(piece["step"][key] for key in ("kernels", "copies", "launches")),
         f"{piece['step']['host_ms']:.2f}", f"{piece['step']['idle']:.1%}", f"{piece['step']['overlapped']:.1%}",
         piece["step"]["mallocs"], " + ".join(map(mib, piece["step"]["by_stream"]))]
        for name, piece in pieces.items() if "step" in piece
    ]  # fmt: skip
    contexts = [context_row(name, p) for name, p in pieces.items() if "trials" in p]
    skipped = {(KNOWN[s].label, why) for p in pieces.values() for s, why in p.get("skipped", {}).items()}
    tables: list[tuple[str, str, str, list[list[Any]]]] = [
        ("", text, "world; system; step ms; x FSDP2; forward ms; backward ms; optimizer ms; spread", rows),
        (": memory", "One process each; *unused* is reserved and not allocated in the end.",
         "world and system; reserved MiB; allocated MiB; unused MiB; RSS MiB", memory),
        (": one step", "Host time is without waiting. *idle*: the stream with most kernels. *overlapped*: the share of "
         "the others' work that runs while it is busy. *mallocs*: calls of cudaMalloc.",
         "system; kernels; copies; launches; host ms; idle; overlapped; mallocs; reserved MiB by stream", work),
        (": the longest context of an 8B full fine-tune", CONTEXT_ABOUT, CONTEXT_HEADER, contexts),
        (": exposed communication", "Step minus the same step with no delay on the wire.",
         "world; system; exposed ms; share of the step", exposed),
        (": not measured", "", "system; why", [list(pair) for pair in sorted(skipped)]),
    ]  # fmt: skip
    made = [table_of(title + n, about, header, rows) for n, about, header, rows in tables if rows or not n]
    return [*made, *(rates_table(piece) for piece in pieces.values() if "rates" in piece)]


def summary(content: dict[str, Any]) -> str:
    """Markdown of everything."""
    where = content["machine"]
    lines = [f"# GPU benchmarks, torch {where['torch']}, {where['date']}, commit {content['commit']}"]
    for part in content["figures"]["tables"]:
        lines += [f"## {part['title']}", part["text"], table(part["header"], part["rows"])]
    return "\n\n".join(line for line in lines if line) + "\n"


def main_gpu(parser: ArgumentParser, arguments: list[str]) -> int:
    """Run everything; write figures.json and summary.md."""
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU, to try the path")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds of this call ({BUDGET:.0f})")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--only", default="", help="pieces whose names begin so; several separated by commas")
    parser.add_argument("--resume", action="store_true", help="keep results that OUT has already")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B model in longest-LAYERS-SIDE (32)")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA device; --dry-run tries the path on a CPU", file=sys.stderr)
        return 1
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {key: getattr(options, key) for key in ("only", "resume", "skip_tests", "layers")}
    figures = run(options.out, dry=options.dry_run, budget=options.budget, **chosen)
    content = measure.result_of(figures)
    figures["tables"] = report_tables(content)
    (options.out / "figures.json").write_text(json.dumps(content, indent=1))
    (options.out / "summary.md").write_text(summary(content))
    print(f"\n{summary(content)}\nwritten to {options.out}")
    return int(any("failed" in piece for piece in figures["pieces"].values()))


# -- the longest context -----------------------------------------------------------------------------------------------
#
# The model has the layers of Llama-3-8B and random weights; every side computes in bf16, reduces gradients in fp32, and
# recomputes each block in backward. One sequence on each rank; the loss is taken of all logits in fp32. A context fits
# if two steps do, the second with all states of the optimizer in memory. Each trial has new processes, so that one that
# ran out of memory leaves nothing behind.

SHAPE: dict[str, Any] = {
    "vocab_size": 128256, "dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ff_dim": 14336,
    "rope_theta": 5e5,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 128, "dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 96,
}  # fmt: skip
OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "ALLOC_FAILED")
FINER = 8  # the search ends with a context that is too long by an eighth or less


@dataclass(frozen=True)
class Side:
    """One of those compared."""

    system: Any  # name in `fsdp_runtime.train.systems`
    dtype: str  # of parameters and gradients between steps
    about: str  # the optimizer, and the bytes that a parameter takes with its gradient and states


SIDES = {
    "fsdp2": Side("fsdp2", "float32", "torch.optim.AdamW, fp32 parameters and states: 16 bytes a parameter"),
    "fsdp2-bf16": Side("fsdp2", "bfloat16", "torch.optim.AdamW, bf16 parameters and states: 8 bytes a parameter"),
    "ours": Side("fsdp_runtime", "bfloat16",
                 "AdamW8bit, bf16 parameters, rounded stochastically: 6 bytes a parameter, 12 in the embedding"),
}  # fmt: skip


def build_side(side: Side, sizes: dict[str, Any], device: str, mesh: Any) -> tuple[Any, Any]:
    """The sharded model with random weights, and its optimizer."""

    def start(model: Any) -> Any:
        model.to_empty(device=device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                local = local_of(param)
                local.fill_(1.0) if "norm" in name else local.normal_(std=0.02)
        if side.system == "fsdp2":
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return AdamW8bit(model.named_parameters(), lr=1e-4, stochastic_rounding=True)

    optimizer = "torch-adamw" if side.system == "fsdp2" else "adamw8bit"  # whose blocks are not cut
    config = RunConfig(system=side.system, optimizer=optimizer, precision="bf16", batch=mesh.size(), clip=0.0)
    with torch.device("meta"):
        model = Transformer(ModelConfig(**sizes, tied=False), checkpointing=True)
    model.to(getattr(torch, side.dtype))
    return make_system(config, torch.device(device), mesh).build(model, None, start)


def trained(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step with `request["length"]` tokens, and peaks of memory; raises torch.OutOfMemoryError."""
    length, device, sizes = request["length"], request["device"], request["sizes"]
    if length > request.get("pretended_limit", length):
        raise torch.OutOfMemoryError(f"a dry run pretends that {length} tokens are out of memory")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model, optimizer = build_side(SIDES[request["side"]], sizes, device, mesh)
    tokens = torch.randint(sizes["vocab_size"], (1, length + 1), device=device)

    def step() -> None:
        losses_of(model, tokens[:, :-1], tokens[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = [measure.timer_of(device)(step) for _ in range(1 + request["steps"])][1:]
    out = {"length": length, "seconds": statistics.median(times), **peaks(device)}
    out["tokens_per_second"] = length * mesh.size() / out["seconds"]
    dist.destroy_process_group()  # which also ends this process after the call, and so frees its memory
    return out


def search(trial: Callable[[int], Any | None], least: int, most: int) -> tuple[Any | None, int | None]:
    """Find the longest context that fits, by doubling, then by halving the gap.

    A trial returns a sample of a length, None where it does not fit, and raises TimeoutError where no time is left.
    Lengths are multiples of `least`. Returns the sample of the longest that fits, and the shortest that does not; None
    if there is none.
    """
    length, fits, best, over = least, 0, None, None
    while length <= most:
        try:
            sample = trial(length)
        except TimeoutError:
            break
        if sample is None:
            over = length
        else:
            best, fits = sample, length
        if over is None:
            length *= 2
            continue
        length = (fits + over) // 2 // least * least
        if length <= fits or (over - fits) * FINER <= fits:
            break
    return best, over


def out_of_memory(error: Any) -> str | None:
    """The cause of a `RankError` if a device's memory was full, else None."""
    causes = map(repr, error.causes.values())
    return next((cause for cause in causes if any(word in cause for word in OUT_OF_MEMORY)), None)


def run_side(ranks: int, request: dict[str, Any], limit: float) -> dict[str, Any]:
    """The longest context of a side, with all trials; `request` as of `trained`, with `least` and `most` lengths.

    Takes no more than `limit` seconds: with less left than twice the last trial took, the search ends where it is.
    """
    began = [time.monotonic()]  # of each trial, and of the next
    end, trials = began[0] + limit, list[dict[str, Any]]()

    def trial(length: int) -> dict[str, Any] | None:
        left, asked = end - began[-1], {**request, "length": length}
        if trials and left < 2 * (began[-1] - began[-2]):
            raise TimeoutError
        try:
            sample, *_ = run_ranks(ranks, trained, asked, timeout=left, device=request["device"], seed=0)
        except RankError as error:
            if trials and time.monotonic() >= end:
                raise TimeoutError from error
            if (cause := out_of_memory(error)) is None:
                raise
            sample, failed = None, {"length": length, "out_of_memory": cause}
        began.append(time.monotonic())
        trials.append(sample or failed)
        return sample

    shut_down()
    try:
        best, over = search(trial, request["least"], request["most"])
    finally:
        shut_down()
    side = SIDES[request["side"]]
    about = {"compared": CONTEXT_ABOUT, "about": side.about, "parameters": side.dtype, "ranks": ranks}
    about |= {key: request[key] for key in ("side", "sizes")}
    answer = {**about, "fits": best is not None, "longest": best, "too_long": over, "trials": trials}
    return {**answer, "line": line_of(answer)}


CONTEXT_HEADER = (
    "world and side; optimizer; ranks; layers; longest that fits; does not fit; tokens/s; peak GiB"
)
CONTEXT_ABOUT = (
    "Tokens of one sequence on each rank, layers of Llama-3-8B, computed in bf16, blocks recomputed in backward;"
    " tokens/s and reserved memory with the longest."
)


def context_row(name: str, answer: dict[str, Any]) -> list[str]:
    """The piece's row under CONTEXT_HEADER."""
    best, over = answer["longest"], answer["too_long"]
    row = [name, answer["about"], str(answer["ranks"]), str(answer["sizes"]["num_layers"])]
    too_long = f"{over:,}" if over else "not searched further"
    if best is None:
        return [*row, "none: out of memory", too_long, "", ""]
    peak = best.get("cuda_reserved", best["start"]) / 2**30
    return [*row, f"{best['length']:,}", too_long, f"{best['tokens_per_second']:,.0f}", f"{peak:.1f}"]


def line_of(answer: dict[str, Any]) -> str:
    """The result in a line."""
    cells = zip(CONTEXT_HEADER.split("; ")[2:], context_row("", answer)[2:], strict=True)
    return "; ".join(f"{name} {cell}" for name, cell in cells if cell)
