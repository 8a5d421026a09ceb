"""Quantized gathers and reductions over a slow network: two hosts on one machine, and a link of a known rate.

python -m bench network [--rates 100,1000,10000]      writes results/network.json; needs root and `ip`, `tc`
python -m bench network --plot                        draws results/network.svg from that file; needs matplotlib

Each host is a network namespace with one gloo rank; a veth pair joins them, and the kernel's token bucket limits what
either end sends. Systems are built in the same two ranks from the same weights and take turns, a step at a time.
Bytes are those that the link counted, headers and acknowledgements included.
"""

import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import measure
from .compare import PARTS, Clock, build_all, noise_of, summarise
from .measure import FOLDER, ROOT, add_keep_noisy, mib, options_of, print_tables, record, table_of
from .models import WORKLOADS
from .systems import SYSTEMS, Job, Trainer, left_out

COMPARED = ("fsdp2", "ours", "ours-quantized")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
BURST_SECONDS, BURST_LEAST = 0.004, 65536  # of the bucket; a packet of a veth pair has up to 64 KiB
TIMEOUT = 1800.0
# Of the arithmetic: parameters, GPUs, bytes a second into each, FLOP/s that a step reaches.
MODEL, GPUS, PORT, REACHED = 8.0e9, 64, 400e9 / 8, 400e12
WIRES = {"bf16 gathers and reductions": (2, 2), "fp8 gathers, int8 reductions": (1, 1)}  # bytes an element


@contextmanager
def hosts(mbits: float) -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, joined by a link of a rate; they are gone on leaving."""
    names = (f"bench-{os.getpid()}-0", f"bench-{os.getpid()}-1")
    rate = mbits * 1e6
    burst = max(BURST_LEAST, int(rate / 8 * BURST_SECONDS))
    limit = f"tbf rate {rate:.0f}bit burst {burst} latency 100ms"
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(*f"ip link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}".split())
        for name, address in zip(names, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", name)
            _run(*inside, *f"ip address add {address}/24 dev eth0".split())
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, *f"tc qdisc add dev eth0 root {limit}".split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def run(mbits: float, request: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's answer, of two ranks on two hosts."""
    with hosts(mbits) as names:
        code = "import sys; from bench.network import answer; answer(int(sys.argv[1]), sys.argv[2])"
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", code, str(rank), json.dumps(request)],
                env=environment, stdout=subprocess.PIPE, text=True,
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


def answer(rank: int, request: str) -> None:
    """Train all systems in turns on this rank, and print the samples."""
    asked = json.loads(request)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29577", rank=rank, world_size=2)
    job = Job.of(asked)
    trainers, skipped = build_all(list(COMPARED), job)
    clock = Clock(job)
    losses = {name: clock.mean_losses(trainer, 2) for name, trainer in trainers.items()}

    def sample(trainer: Trainer) -> dict[str, float]:
        before = _sent()
        return {**clock.measure(trainer, 1), "sent": _sent() - before}

    samples, calibration = clock.samples(trainers, asked["rounds"], sample)
    for name, trainer in trainers.items():
        losses[name] += clock.mean_losses(trainer, 1)
    print(json.dumps({"samples": samples, "losses": losses, "skipped": skipped, "calibration": calibration}))
    dist.destroy_process_group()


def _sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def times_of(figures: dict[str, Any], mbits: str) -> dict[str, dict[str, float]]:
    """Medians and ratios of the systems at a rate, from the recorded figures."""
    about = {"workload": {"tokens_per_rank": figures["tokens_per_rank"]}, "ranks": 2}
    return summarise({**figures["rates"][mbits], **about})


def tables(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured table, and the arithmetic for GPUs."""
    rows = []
    for mbits, raw in figures["rates"].items():
        for name, t in times_of(figures, mbits).items():
            parts = (f"{1e3 * t[part]:.0f}" for part in PARTS)
            cells = [
                f"{t['tokens_per_second']:,.0f}",
                f"{t['wall_ratio_fsdp2']:.2f}",
                mib(int(t["sent"])),
                *parts,
            ]
            cells += [f"{raw['losses'][name][-1]:.3f}", f"{t['spread']:.0%}"]
            rows.append([f"{float(mbits):,.0f}", SYSTEMS[name].label, *cells])
    header = (
        "Mbit/s; system; tokens/s; x FSDP2; MiB sent a step; forward ms; backward ms; update ms; loss; spread"
    )
    text = (
        f"Workload {figures['workload']}, fp32, one gloo rank on each of two hosts, which the kernel's token bucket"
        " limits. *Sent* by one rank, as the link counted. *Loss* after as many steps on the same batches."
    )
    text += left_out(next(iter(figures["rates"].values()))["skipped"])
    return [
        table_of("Two hosts and a slow network", text, header, rows),
        table_of(
            "The same for GPUs, computed",
            f"{MODEL / 1e9:.0f}B parameters on {GPUS} GPUs, {PORT / 1e9:.0f} GB/s into each; two gathers, one reduction"
            f" a step. *Hidden from*: a GPU's tokens whose computation at {REACHED / 1e12:.0f} TFLOP/s takes as long.",
            "wire; GB a step; seconds; hidden from, tokens",
            [arithmetic(name, *sizes) for name, sizes in WIRES.items()],
            exact=True,
        ),
    ]


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw tokens/s by the link's rate, a line with the range of all rounds for each system, and the bytes sent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, bytes_sent) = pyplot.subplots(
        1, 2, figsize=(10, 4), layout="constrained", width_ratios=(2, 1)
    )
    rates, tokens = figures["rates"], 2 * figures["tokens_per_rank"]
    times = {float(rate): times_of(figures, rate) for rate in rates}
    for name in next(iter(times.values())):
        walls = [[run["wall"] for run in raw["samples"][name]] for raw in rates.values()]
        speed.plot(
            list(times),
            [t[name]["tokens_per_second"] for t in times.values()],
            "o-",
            label=SYSTEMS[name].label,
        )
        slowest, fastest = ([tokens / end(wall) for wall in walls] for end in (max, min))
        speed.fill_between(list(times), slowest, fastest, alpha=0.2)
        sent = statistics.median(t[name]["sent"] for t in times.values())
        bytes_sent.bar(SYSTEMS[name].label.replace(", ", "\n"), sent / 2**20)
    speed.set(xscale="log", yscale="log", xlabel="Mbit/s between two hosts", ylabel="tokens/s")
    speed.legend(frameon=False, fontsize="small")
    speed.grid(alpha=0.3, which="both")
    bytes_sent.set(ylabel="MiB that a rank sends in a step")
    bytes_sent.tick_params(axis="x", labelsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def arithmetic(name: str, gathered: float, reduced: float) -> list[str]:
    """Bytes of a step over the network, their seconds, and the tokens whose computation takes as long."""
    nbytes = (2 * gathered + reduced) * MODEL * (GPUS - 1) / GPUS
    seconds = nbytes / PORT
    return [name, f"{nbytes / 1e9:.1f}", f"{seconds:.2f}", f"{seconds * REACHED / (6 * MODEL):,.0f}"]


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    add_keep_noisy(parser)
    parser.add_argument("--workload", default="dense", choices=list(WORKLOADS))
    parser.add_argument("--rates", default="100,1000,10000", help="Mbit/s, separated by commas")
    parser.add_argument("--plot", action="store_true", help="draw the recorded figures, measure nothing")
    options = options_of(parser, arguments, rounds=5)
    if options.plot:
        (recorded,) = measure.load_all("network")
        plot(recorded["figures"], FOLDER / "network.svg")
        print(
            f"drawn in {FOLDER / 'network.svg'}",
            *(f"busy machine: {why}" for why in recorded["noise"]),
            sep="\n",
        )
        return 0
    before = measure.busy_share()
    request = {"workload": options.workload, "rounds": options.rounds}
    rates = {rate: run(float(rate), request) for rate in options.rates.split(",")}
    tokens = WORKLOADS[options.workload].tokens
    figures: dict[str, Any] = {"workload": options.workload, "tokens_per_rank": tokens, "rates": rates}
    figures["tables"] = print_tables(tables(figures))
    noise = noise_of(before, *rates.values())
    return record("network", figures, noise, options.keep_noisy)
