"""Tokens/s, step time and its parts, CPU seconds and peak memory of all systems on the same work.

python -m bench speed [--workload dense] [--ranks 2] ...      table; writes results/speed-WORKLOAD-RANKS.json
python -m bench ablation                                      the same step without one idea; results/ablation.json
python -m bench network [--rates 100,1000,10000]              two hosts and a link of a known rate; results/network.json

"Alone" is the same model on each rank without communication: the limit of what any system can reach.

Times: one launch, every system built in the same ranks from the same weights, in alternating rounds. Losses are
compared first; a system whose losses differ is dropped and reported. Ratios are taken within a round and the median
over rounds is reported, so that a slow minute hits all systems equally. Memory: one launch for each system, since a
process's peak cannot be divided among systems. Exit code 3, and nothing written, if the machine was too busy.

Network: root, `ip` and `tc` make each host, a network namespace with one gloo rank; a veth pair joins them, and the
kernel's token bucket limits what either end sends. Bytes are those that the link counted, with headers.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ragged_shard.testing import Network

from . import counts, measure
from .measure import fake_ranks, interleave, launch, mib, options_of, record, table_of
from .models import WORKLOADS, batch_of, describe
from .systems import OPTIMIZERS, SYSTEMS, CannotRunError, Job, Trainer, build, left_out, reason_of

OURS = ["ours", "ours-peer-memory", "ours-collectives"]
ALL = ["alone", "ddp", *OURS, "fsdp2", "fsdp1", "deepspeed"]
PEERS = ("alone", "ddp", "fsdp2")  # ratios are taken to these
PARTS = ("forward", "backward", "update")
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
LAYOUT = ["ours", "ours-staged", "ours-given-order", "ours-lcm", "fsdp2"]
BLOCKS = {"block_policy": "rows:32"}

# -- on a rank ---------------------------------------------------------------------------------------------------------


def build_all(names: list[str], job: Job) -> tuple[dict[str, Trainer], dict[str, str]]:
    """Trainers by name, and the reasons why others are missing."""
    trainers, skipped = {}, {}
    for name in names:
        try:
            trainers[name] = build(name, job)
        except Exception as error:  # a peer that does not work here must not cost the others their figures
            skipped[name] = reason_of(error)
    return trainers, skipped


def parts_of(trainer: Trainer, batch: Any, now: Callable[[], float]) -> list[float]:
    """Seconds of the three parts of a step by a clock."""
    marks = [now()]
    loss = trainer.forward(batch)
    marks.append(now())
    trainer.backward(loss)
    marks.append(now())
    trainer.update()
    marks.append(now())
    return [end - begin for begin, end in itertools.pairwise(marks)]


class Clock:
    """Steps a trainer and times it. Each system sees the same sequence of batches."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._began = time.perf_counter()
        self._steps: dict[str, int] = {}

    def batch(self, trainer: Trainer) -> Any:
        """The next batch of this rank for this system."""
        step = self._steps.get(trainer.name, 0)
        self._steps[trainer.name] = step + 1
        return batch_of(self.job.workload, step, dist.get_rank(), self.job.device)

    def elapsed(self) -> float:
        """Seconds since the start by rank 0's clock; the same on all ranks."""
        return self.sum(time.perf_counter() - self._began if dist.get_rank() == 0 else 0.0)

    def calibrate(self) -> float:
        """Rank 0's fixed loop while the others wait: four ranks on two cores would only measure each other."""
        dist.barrier()
        seconds = measure.calibrate() if dist.get_rank() == 0 else 0.0
        dist.barrier()
        return seconds

    def mean_losses(self, trainer: Trainer, steps: int) -> list[float]:
        """The loss of each of some steps, averaged over ranks."""
        return [self.sum(trainer.step(self.batch(trainer))) / dist.get_world_size() for _ in range(steps)]

    def measure(self, trainer: Trainer, steps: int) -> dict[str, float]:
        """Seconds of a step: wall, CPU of this rank and the three parts; and others' share of the CPUs.

        On a GPU the parts are those of a step more, since each ends by waiting for the device.
        """
        batches = [self.batch(trainer) for _ in range(steps)]
        parts: list[list[float]] = []
        self._now()
        dist.barrier()
        before, cpu, start = measure.CpuTimes.now(), time.process_time(), time.perf_counter()
        for batch in batches:
            if self.job.device == "cuda":
                trainer.train(batch)
            else:
                parts.append(parts_of(trainer, batch, self._now))
        self._now()
        dist.barrier()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        foreign = before.foreign(self.sum(cpu))
        parts = parts or [parts_of(trainer, self.batch(trainer), self._now)]
        means = dict(zip(PARTS, map(statistics.mean, zip(*parts, strict=True)), strict=True))
        return {"wall": wall / steps, "cpu": cpu / steps, **means, "foreign": foreign}

    def samples(
        self,
        trainers: dict[str, Trainer],
        num_rounds: int,
        sample: Callable[[Trainer], dict[str, float]],
        seconds: float = float("inf"),
    ) -> tuple[dict[str, list[dict[str, float]]], list[float]]:
        """Samples of trainers that take turns, and a calibration for each round; after `seconds` none begins."""
        calibration: list[float] = []

        def begin() -> bool:
            if calibration and self.elapsed() > seconds:
                return False
            calibration.append(self.calibrate())
            return True

        return interleave(trainers, num_rounds, warm_up=0, timer=sample, begin=begin), calibration

    def _now(self) -> float:
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def sum(self, value: float) -> float:
        """The sum over ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(total)
        return float(total)


def rounds(request: dict[str, Any], simulation: Any = None) -> dict[str, Any]:
    """Build all systems, compare their losses, and measure them in turns; raw samples of rank 0.

    Walls are taken between barriers, so they are the slowest rank's. In a simulated world each measurement is repeated
    with a network that takes no time, which shows exposed communication; losses mean nothing there. Over a link (a
    network interface) the bytes sent are counted, and losses are not compared: one system quantizes.
    """
    job = Job.of(request)
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    check_steps = request.get("check_steps", 3)
    losses = {name: clock.mean_losses(trainer, check_steps) for name, trainer in trainers.items()}
    link = request.get("link")
    if simulation is None and not link:
        compared = {name: curve for name, curve in losses.items() if SYSTEMS[name].communicates}
        differ = compare_losses(compared, TOLERANCE[job.precision] * (1 if job.optimizer == "adamw" else 10))
        skipped.update(differ)
        for name in differ:
            del trainers[name]
    if not trainers:
        raise RuntimeError(f"no system is left to measure: {skipped}")
    free: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}

    def sample(trainer: Trainer) -> dict[str, float]:
        before = _sent(link) if link else 0
        taken = clock.measure(trainer, request["steps"])
        if link:
            taken["sent"] = _sent(link) - before
        if simulation is not None:  # again with a network that takes no time: a step without waiting for it
            network, simulation.network = simulation.network, Network()
            free[trainer.name].append(clock.measure(trainer, request["steps"]))
            simulation.network = network
        return taken

    limit = request.get("seconds", float("inf"))
    samples, calibration = clock.samples(trainers, request["rounds"], sample, seconds=limit)
    about = {"ranks": dist.get_world_size(), "simulate": request.get("simulate"), "device": job.device}
    about |= {"optimizer": job.optimizer, "precision": job.precision, "workload": describe(job.workload)}
    measured = {"samples": samples, "free": free, "calibration": calibration}
    return {**about, "losses": losses, "skipped": skipped, **measured}


def compare_losses(losses: dict[str, list[float]], tolerance: float) -> dict[str, str]:
    """Systems whose losses differ from the first one's by more than `tolerance` of the loss, and how."""
    differ = {}
    reference, expected = next(iter(losses.items()), ("", []))
    for name, curve in losses.items():
        gaps = [abs(a - b) / abs(b) for a, b in zip(curve, expected, strict=True)]
        if not all(gap <= tolerance for gap in gaps):  # NaN is not
            differ[name] = f"its losses {curve} differ from {reference}'s {expected}"
    return differ


def footprint(request: dict[str, Any], simulation: Any = None) -> dict[str, Any]:
    """Memory of one system alone in new processes, in bytes, the most of any rank.

    `start` is the peak of resident memory, with building and wrapping the model. `pss` is that after the last step,
    where a page that n processes share counts 1/n. On CUDA also the most that torch's allocator reserved and allocated,
    and what it has reserved and not allocated in the end; `request["allocator"]`: its settings.
    """
    job = Job.of(request)
    if settings := request.get("allocator"):  # before anything is allocated; the variable came too early
        torch.cuda.memory._set_allocator_settings(settings)
    try:
        trainer = build(request["system"], job)
    except CannotRunError as error:
        return {"skipped": str(error)}
    loss = Clock(job).mean_losses(trainer, 2 + request.get("steps", 3))[-1]
    return {"loss": loss, **peaks(job.device)}


def peaks(device: str) -> dict[str, int]:
    """Bytes of memory of this process until now, the most of any rank; see `footprint`."""
    nbytes = {
        "start": measure.memory_field("status", "VmHWM"),
        "pss": measure.memory_field("smaps_rollup", "Pss"),
    }
    if device == "cuda":
        nbytes["cuda_reserved"] = torch.cuda.max_memory_reserved()
        nbytes["cuda_allocated"] = torch.cuda.max_memory_allocated()
        nbytes["cuda_unused"] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    values = torch.tensor(list(nbytes.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {name: int(value) for name, value in zip(nbytes, values, strict=True)}


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(
    workload: str, ranks: int, *, memory: bool = True, **request: Any
) -> tuple[dict[str, Any], list[str]]:
    """Figures of one workload, and reasons not to trust their times; `request`: of `rounds`, and of the job."""
    before = measure.busy_share()
    request = {"workload": workload, "rounds": 8, "steps": 2, **request}
    raw = launch(rounds, ranks, request)
    noise = noise_of(before, raw)
    figures = {**raw, "times": summarise(raw), "memory": {}}
    for name in raw["samples"] if memory else ():
        figures["memory"][name] = launch(footprint, ranks, {**request, "system": name, "steps": 3})
    return figures, noise


def noise_of(before: float, *raws: dict[str, Any]) -> list[str]:
    """Reasons not to trust the times of some launches."""
    foreign = [s["foreign"] for raw in raws for samples in raw["samples"].values() for s in samples]
    return measure.verdict(before, [c for raw in raws for c in raw["calibration"]], foreign)


def summarise(raw: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians, spread, and each system's ratios to alone, DDP and FSDP2, from the raw samples."""
    samples = raw["samples"]
    tokens = raw["workload"]["tokens_per_rank"] * raw["ranks"]
    out = {}
    for name, runs in samples.items():
        medians = {key: statistics.median(r[key] for r in runs) for key in runs[0] if key != "foreign"}
        spread = measure.spread([r["wall"] for r in runs])
        out[name] = {**medians, "tokens_per_second": tokens / medians["wall"], "spread": spread}
        if free := raw.get("free", {}).get(name):
            pairs = zip(runs, free, strict=True)
            out[name]["exposed"] = statistics.median(a["wall"] - b["wall"] for a, b in pairs)
        for peer in PEERS:
            if peer in samples:
                for key in ("wall", "cpu"):
                    pairs = zip(samples[peer], runs, strict=True)
                    out[name][f"{key}_ratio_{peer}"] = statistics.median(p[key] / r[key] for p, r in pairs)
    return out


def speed_table(figures: dict[str, Any]) -> dict[str, Any]:
    """One row a system; in the text the systems that could not run, and why."""
    work, rows = figures["workload"], []
    for name, t in figures["times"].items():
        memory = (figures["memory"].get(name, {}).get(kind) for kind in ("start", "pss"))
        ratios = (t.get(f"wall_ratio_{peer}") for peer in ("fsdp2", "ddp"))
        cells = [f"{t['tokens_per_second']:,.0f}", *(f"{ratio:.2f}" if ratio else "" for ratio in ratios)]
        cells += [f"{t['cpu']:.3f}", *(f"{1e3 * t[part]:.0f}" for part in PARTS), f"{t['spread']:.1%}"]
        rows.append([SYSTEMS[name].label, *cells, *(mib(nbytes) if nbytes else "" for nbytes in memory)])
    done = max(map(len, figures["samples"].values()))
    title = f"Speed: {work['name']}, {figures['ranks']} ranks, {figures['optimizer']}, {figures['precision']}"
    text = f"{work['parameters'] / 1e6:.1f}M parameters in {work['tensors']} tensors, {work['tokens_per_rank']} tokens"
    text += f" on each rank; rounds: {done}.{left_out(figures['skipped'])}"
    parts = "; ".join(f"{part} ms" for part in PARTS)
    header = f"system; tokens/s; x FSDP2; x DDP; CPU s/step; {parts}; spread; peak RSS MiB; PSS MiB"
    return table_of(title, text, header, rows)


def main_speed(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    parser.add_argument("--workload", choices=list(WORKLOADS), default="dense")
    parser.add_argument("--systems", default=",".join(ALL), help="separated by commas")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=2, help="of each system in each round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after these")
    parser.add_argument("--no-memory", action="store_true", help="skip the launches that measure peak memory")
    o = options_of(parser, arguments, ranks=2, rounds=8, keep_noisy=False)
    keys = ("rounds", "steps", "seconds", "optimizer", "precision")
    request = {"systems": o.systems.split(","), **{key: getattr(o, key) for key in keys}}
    figures, noise = speed(o.workload, o.ranks, memory=not o.no_memory, **request)
    suffix = "".join(f"-{x}" for x in (o.optimizer, o.precision) if x not in ("adamw", "float32"))
    name = f"speed-{o.workload}-{o.ranks}{suffix}"
    return record(name, [speed_table(figures)], noise, keep_noisy=o.keep_noisy, **figures)


# -- ablation ----------------------------------------------------------------------------------------------------------


def main_ablation(parser: ArgumentParser, arguments: list[str]) -> int:
    """Count on 64 simulated ranks, print, record.

    Experts in stacked tensors with biases, in sizes whose blocks share no small multiple; blocks of 32 rows.
    """
    parser.parse_args(arguments)
    base = counts.plain("ablation")
    with fake_ranks(64) as mesh:
        job = Job(WORKLOADS["ablation"], mesh, options=BLOCKS)
        exact = {name: counts.outside(counts.count(name, job), base) for name in LAYOUT}
    rows = [
        [SYSTEMS[n].label, f"{f['padding']:.1%}", mib(f["wire_bytes"]), mib(f["copied"]["forward"]),
         mib(f["copied"]["backward"]), sum(f["calls"].values()), mib(f["peak"])]
        for n, f in exact.items()
    ]  # fmt: skip
    header = "runtime; padding; wire MiB; copied forward MiB; copied backward MiB; calls; peak MiB"
    text = "Exact, beyond the model's own step; blocks of 32 rows, which FSDP2 does not keep whole."
    tables = [table_of("Ablation, 64 simulated ranks", text, header, rows, exact=True)]
    return record("ablation", tables, counts=exact)


# -- two hosts and a slow network --------------------------------------------------------------------------------------

LINKED = ("fsdp2", "ours", "ours-quantized")
LINK = "eth0"
ADDRESSES = ("10.78.0.1", "10.78.0.2")
BURST_SECONDS, BURST_LEAST = 0.004, 65536  # of the bucket; a packet of a veth pair has up to 64 KiB
TIMEOUT = 1800.0


@contextmanager
def hosts(mbits: float) -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, joined by a link of a rate; they are gone on leaving."""
    names = (f"bench-{os.getpid()}-0", f"bench-{os.getpid()}-1")
    rate = mbits * 1e6
    burst = max(BURST_LEAST, int(rate / 8 * BURST_SECONDS))
    limit = f"tbf rate {rate:.0f}bit burst {burst} latency 100ms"
    try:
        for name in names:
            _run(f"ip netns add {name}")
        _run(f"ip link add {LINK} netns {names[0]} type veth peer name {LINK} netns {names[1]}")
        for name, address in zip(names, ADDRESSES, strict=True):
            _run(f"ip -n {name} address add {address}/24 dev {LINK}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {LINK} up")
            _run(f"tc -n {name} qdisc add dev {LINK} root {limit}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def on_hosts(mbits: float, workload: str, num_rounds: int) -> dict[str, Any]:
    """Rank 0's answer of `rounds`, of two ranks on two hosts."""
    request = {"workload": workload, "systems": LINKED, "rounds": num_rounds, "steps": 1, "link": LINK}
    with hosts(mbits) as names:
        code = "import sys; from bench.compare import answer_host; answer_host(int(sys.argv[1]), sys.argv[2])"
        env = measure.environment(GLOO_SOCKET_IFNAME=LINK, OMP_NUM_THREADS="1")
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", code, str(rank), json.dumps(request)],
                env=env, stdout=subprocess.PIPE, text=True,
            )
            for rank, name in enumerate(names)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=TIMEOUT)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
    if any(process.returncode for process in running):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in running]}; see above")
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return result


def answer_host(rank: int, request: str) -> None:
    """Run `rounds` on this host's rank, and print the answer."""
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29577", rank=rank, world_size=2)
    print(json.dumps(rounds(json.loads(request))))
    dist.destroy_process_group()


def _sent(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def network_table(figures: dict[str, Any]) -> dict[str, Any]:
    """A row for each rate and system."""
    rows = []
    for mbits, raw in figures["rates"].items():
        for name, t in summarise(raw).items():
            cells = [f"{t['tokens_per_second']:,.0f}", f"{t['wall_ratio_fsdp2']:.2f}", mib(int(t["sent"]))]
            cells += [*(f"{1e3 * t[part]:.0f}" for part in PARTS), f"{raw['losses'][name][-1]:.3f}"]
            rows.append([f"{float(mbits):,.0f}", SYSTEMS[name].label, *cells, f"{t['spread']:.0%}"])
    header = (
        "Mbit/s; system; tokens/s; x FSDP2; MiB sent a step; forward ms; backward ms; update ms; loss; spread"
    )
    text = (
        f"Workload {figures['workload']}, fp32, one gloo rank on each of two hosts, which the kernel's token bucket"
        " limits. *Sent* by one rank, as the link counted. *Loss* after as many steps on the same batches."
    )
    text += left_out(next(iter(figures["rates"].values()))["skipped"])
    return table_of("Two hosts and a slow network", text, header, rows)


def main_network(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    parser.add_argument("--workload", default="dense", choices=list(WORKLOADS))
    parser.add_argument("--rates", default="100,1000,10000", help="Mbit/s, separated by commas")
    o = options_of(parser, arguments, rounds=5, keep_noisy=False)
    before = measure.busy_share()
    rates = {rate: on_hosts(float(rate), o.workload, o.rounds) for rate in o.rates.split(",")}
    noise = noise_of(before, *rates.values())
    figures = {"workload": o.workload, "rates": rates}
    return record("network", [network_table(figures)], noise, keep_noisy=o.keep_noisy, **figures)
