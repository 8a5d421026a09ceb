"""Large gathers and reductions on CPU: gloo's collectives, plain sends and receives, and reading the other's memory.

    python bench/exchange.py          a table, of the three ways alternating on 2, 3 and 4 ranks

Wall milliseconds of one gather or reduction of 12 MiB, the median over rounds on rank 0, one thread a rank.
"""

import statistics
import time

NBYTES = 12 << 20
ROUNDS = 30


def measure():
    """`{(what, way): ms}`; on every rank."""
    import torch
    import torch.distributed as dist

    from dbuffer import _direct
    from dbuffer import _torch_compat as collectives
    from dbuffer._peer_memory import connect

    torch.set_num_threads(1)
    group, ranks = dist.group.WORLD, dist.get_world_size()
    full = torch.randn(NBYTES // 4 // ranks * ranks)
    shard = torch.randn(full.numel() // ranks)
    wires = {"sent": _direct.Sends(group), "read": connect(group)}
    if wires["read"] is None:
        raise SystemExit("this machine does not let processes read each other's memory")

    def rank_to_rank(wire, what, *arguments):
        _direct._wires[group] = wires[wire]
        return what(*arguments, group)

    ways = {
        ("gather", "gloo"): lambda: collectives.all_gather([(full, shard)], group),
        ("gather", "sent"): lambda: rank_to_rank("sent", _direct.all_gather, [(full, shard)]),
        ("gather", "read"): lambda: rank_to_rank("read", _direct.all_gather, [(full, shard)]),
        ("reduce", "gloo"): lambda: collectives.reduce_scatter([(shard, full)], dist.ReduceOp.SUM, group),
        ("reduce", "sent"): lambda: rank_to_rank("sent", _direct.reduce_scatter, [(shard, full)], False),
        ("reduce", "read"): lambda: rank_to_rank("read", _direct.reduce_scatter, [(shard, full)], False),
    }
    times = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, start in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            start().wait()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(found[3:]) for name, found in times.items()}


def main():
    """Print the table."""
    from ragged_shard.testing import run_ranks

    print("| ranks | gather: gloo, ms | sent | read | reduce: gloo, ms | sent | read |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in (2, 3, 4):
        figures = run_ranks(ranks, measure)[0]
        print(f"| {ranks} | " + " | ".join(f"{ms:.1f}" for ms in figures.values()) + " |")


if __name__ == "__main__":
    main()
