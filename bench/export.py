"""Bytes and memory of exporting weights to an engine, and of offloading activations, gradients and states.

python -m bench export [--ranks 2 4] [--width 512] [--layers 8] [--lr 1e-6]
python -m bench offload [--workload dense] [--ranks 8] [--rounds 5]     writes results/offload.json

Export: whole weights, or what one small step changed, out of a sharded model, by each way. Linear layers with fp32
shards on gloo ranks make one AdamW step; then each way exports bf16. Bytes are those that all ranks send, memory is a
rank's most in tensors beyond its shards and its copy of the last export.

Offload: one rank of a simulated world on the simulated device, which counts what a caching allocator would hold and the
bytes copied to page-locked memory and back, and raises for an access without order. Times are taken without its checks
and with nothing on the wire, all kinds in turns: copies run on the CPU, where they are queued, so that nothing
overlaps, and "device" and CPU memory are equally fast.
"""

import statistics
import time
from argparse import ArgumentParser
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .measure import interleave, launch, mib, options_of, save_tables, seconds_of, table, table_of

WAYS = {
    "full_tensor": "full_tensor() of each parameter",
    "whole": "iter_full_params",
    "rank 0": "iter_full_params(ranks=(0,))",
    "blocks": "iter_full_params(ranks=(0,), changed_since=), rows",
    "elements": "weight_patches, elements",
}


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: bytes, memory and values that each way exports after the step."""
    from fsdp_runtime import fully_shard, iter_full_params
    from fsdp_runtime.checkpoint import ExportedParams
    from fsdp_runtime.checkpoint.export import Exporter
    from ragged_shard.testing import record_collectives, record_memory

    torch.manual_seed(0)
    width, bf16 = request["width"], torch.bfloat16
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(request["layers"])))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    blocks, elements = ExportedParams(), ExportedParams()

    def values_of(way: str) -> int:
        if way == "full_tensor":
            full: Any = model.parameters()
            return sum(param.full_tensor().to(bf16).numel() for param in full)
        options: dict[str, Any] = {"dtype": bf16, "bucket_bytes": 1 << 22}
        if way == "whole":
            return sum(tensor.numel() for _, tensor in iter_full_params(model, **options))
        if way == "rank 0":
            return sum(tensor.numel() for _, tensor in iter_full_params(model, ranks=(0,), **options))
        if way == "blocks":
            changed = iter_full_params(model, ranks=(0,), changed_since=blocks, **options)
            return sum(one.values.numel() for one in changed)
        exporter = Exporter(model, bf16, 1 << 22, (0,), buffers=True)
        return sum(one.values.numel() for one in exporter.elements(elements))

    for way in ("blocks", "elements"):
        values_of(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=request["lr"])
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    results: dict[str, Any] = {"total": sum(param.numel() for param in model.parameters())}
    for way in WAYS:
        with record_collectives() as sent, record_memory() as live:
            count = values_of(way)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (sent.bytes_sent, live.peak))
        results[way] = (sum(b for b, _ in every), max(peak for _, peak in every), count)
    return results


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = options_of(parser, arguments, width=512, layers=8, lr=1e-6)
    rows = []
    for ranks in options.ranks:
        results = launch(run, ranks, vars(options))
        total = results.pop("total")
        for way, (sent, peak, count) in results.items():
            rows.append(
                [ranks, WAYS[way], f"{sent / 2**20:.2f}", f"{peak / 2**20:.1f}", f"{1 - count / total:.2%}"]
            )
    print(f"{total / 1e6:.2f}M parameters, {mib(2 * total)} MiB in bf16, one AdamW step of lr {options.lr}")
    print(table(["ranks", "way", "MiB sent", "peak MiB", "values not sent"], rows))
    return 0


# -- offload -----------------------------------------------------------------------------------------------------------

KINDS = ("none", "activations", "states", "gradients,states", "activations,gradients,states")


def _trainer(workload: Any, kinds: str) -> Any:
    """A function that runs a step and calls back between forward and backward."""
    from fsdp_runtime import fully_shard
    from fsdp_runtime.checkpoint import OffloadedOptimizer
    from fsdp_runtime.memory import SelectiveOffloadPolicy
    from fsdp_runtime.train.model import losses_of

    from .models import batch_of, build

    policy = SelectiveOffloadPolicy("activations" in kinds, "gradients" in kinds)
    model = build(workload.shape)
    for module in (*model.blocks, model):
        fully_shard(module, offload_policy=policy)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if "states" in kinds:
        optimizer = OffloadedOptimizer(optimizer, bucket_bytes=1 << 22)

    def step(number: int, between: Any = lambda: None) -> None:
        loss = losses_of(model, *batch_of(workload, number, 0))[0]
        between()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def count_offload(workload: Any, kinds: str, ranks: int) -> dict[str, int]:
    """Bytes of the third step: on the device between steps, after forward and at the peak; copied out and back."""
    from ragged_shard.testing import SimulatedDevice, simulated_ranks

    with SimulatedDevice("cpu:0") as device, simulated_ranks(ranks):

        def held() -> int:
            return sum(device.pools.used.values())

        step, figures = _trainer(workload, kinds), {}
        for number in range(2):
            step(number)
        figures["rest"], device.pools.peak = held(), dict(device.pools.used)
        device.copied_out = device.copied_in = 0
        step(2, lambda: figures.update(forward=held()))
        return {**figures, "peak": device.pools.reserved, "out": device.copied_out, "back": device.copied_in}


def offload_seconds(workload: Any, ranks: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each kind, in turns."""
    from ragged_shard import DeviceLayer, use_device_layer
    from ragged_shard.testing import simulated_ranks

    class Tier(DeviceLayer):
        """A device that does its work where it is called."""

        asynchronous = registers_memory = True

        def register_memory(self, address: int, nbytes: int) -> None:
            pass

        def unregister_memory(self, address: int) -> None:
            pass

    with use_device_layer(Tier(torch.device("cpu:0"))), simulated_ranks(ranks):
        by_wall = partial(seconds_of, clock=time.perf_counter)
        steps = {kinds: partial(_trainer(workload, kinds), 0) for kinds in KINDS}
        times = interleave(steps, rounds, warm_up=2, timer=by_wall, shuffled=True)
    return {kinds: statistics.median(seconds) for kinds, seconds in times.items()}


def run_offload(request: dict[str, Any]) -> dict[str, Any]:
    """In one process: the counts and times of all kinds."""
    from .models import WORKLOADS

    workload, ranks = WORKLOADS[request["workload"]], request["ranks"]
    counts = {kinds: count_offload(workload, kinds, ranks) for kinds in KINDS}
    return {"counts": counts, "seconds": offload_seconds(workload, ranks, request["rounds"])}


def main_offload(parser: ArgumentParser, arguments: list[str]) -> int:
    """Count, time, print and save."""
    options = options_of(parser, arguments, workload="dense", ranks=8, rounds=5)
    figures = run_offload(vars(options))
    base, rows = figures["seconds"]["none"], []
    for kinds, counts in figures["counts"].items():
        cells = [mib(counts[key]) for key in ("rest", "forward", "peak", "out", "back")]
        rows.append([kinds, *cells, f"{figures['seconds'][kinds] / base:.2f}"])
    text = (
        f"{options.workload}, fp32, torch's AdamW, rank 0 of {options.ranks} simulated ones. MiB on the device between "
        "steps, after forward and at the peak of a step; copied to the CPU and back. Step time is of that without "
        "offload: medians in turns, copies overlap nothing."
    )
    header = "in CPU memory; at rest; after forward; peak; out; back; step time"
    return save_tables("offload", [table_of("Offload", text, header, rows, exact=True)], **figures)
