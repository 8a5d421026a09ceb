"""Large gathers and reductions of a buffer on CPU by each transport of dbuffer, taking turns on 2 to 16 ranks.

python -m bench exchange [--ranks 2,3,4,8,16] [--mib 12]      a table

Milliseconds of one gather or reduction of so many MiB gathered, medians over rounds, one thread a rank. Wall is rank
0's; CPU is that of all ranks together, which tells more where there are more ranks than cores.
"""

import statistics
import time
from typing import Any

from . import store
from .ranks import launch

RANKS = (2, 3, 4, 8, 16)
TRANSPORTS = ("collectives", "peer_memory")
KINDS = ("gather", "reduce")
WARM_UP = 3
REPEATS = 4  # of one move between barriers, which take time themselves


def run(request: dict[str, Any]) -> dict[str, dict[str, tuple[float, float] | None]]:
    """On a rank: `{kind: {transport: (wall, CPU) milliseconds}}`; None where this machine does not allow it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from dbuffer import DBuffer, Gather, ReduceScatter
    from layout_planner import TensorSpec, plan

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    layout = plan([TensorSpec("full", (request["nbytes"] // 4 // ranks * ranks,))], ranks)
    buffers = {name: DBuffer(layout, mesh, dtype=torch.float32, transport=name) for name in TRANSPORTS}
    for buffer in buffers.values():
        buffer.materialize()
        for flat in (*buffer.shard, *buffer.full):
            flat.normal_()
    moves: dict[tuple[str, str], Any] = {}
    for name, buffer in buffers.items():
        moves["gather", name] = Gather([buffer]).start
        moves["reduce", name] = ReduceScatter([buffer], op="sum").start

    walls: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in KINDS for name in TRANSPORTS}
    cpus: dict[tuple[str, str], list[float]] = {key: [] for key in walls}
    missing: set[str] = set()
    for turn in range(request["rounds"] + WARM_UP):
        for kind, name in sorted(walls, reverse=bool(turn % 2)):
            if name in missing:
                continue
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            try:
                for _ in range(REPEATS):
                    moves[kind, name]().wait()
            except ValueError as error:  # the same on all ranks
                print(error, flush=True)
                missing.add(name)
            walls[kind, name].append(1e3 * (time.perf_counter() - began) / REPEATS)
            dist.barrier()  # peers may be busy with this rank's memory
            cpus[kind, name].append(1e3 * (time.process_time() - cpu) / REPEATS)

    def medians(key: tuple[str, str]) -> tuple[float, float]:
        everyones = torch.tensor(cpus[key], dtype=torch.float64)
        dist.all_reduce(everyones)
        return statistics.median(walls[key][WARM_UP:]), float(everyones[WARM_UP:].quantile(0.5))

    return {
        kind: {name: None if name in missing else medians((kind, name)) for name in TRANSPORTS}
        for kind in KINDS
    }


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = store.parser_of("exchange", __doc__)
    parser.add_argument("--rounds", type=int, default=27)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="separated by commas")
    parser.add_argument("--mib", default="12", help="gathered; several are separated by commas")
    options = parser.parse_args(arguments)
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        for mib in map(float, options.mib.split(",")):
            results = launch(run, ranks, {"rounds": options.rounds, "nbytes": int(mib * 2**20)})
            for kind, by_transport in results.items():
                cells = [
                    "-" if both is None else f"{both[of]:.2f}"
                    for of in (0, 1)
                    for both in by_transport.values()
                ]
                rows.append([ranks, f"{mib:g}", kind, *cells])
    header = [f"{what}: {name}, ms" for what in ("wall", "CPU") for name in TRANSPORTS]
    print(store.table(["ranks", "MiB", "", *header], rows))
    return 0
