"""Large gathers and reductions on CPU by each transport of dbuffer, the three taking turns on 2, 3 and 4 ranks.

python -m bench exchange      a table

Wall milliseconds of one gather or reduction of 12 MiB, the median over rounds on rank 0, one thread a rank.
"""

import statistics
import time
from typing import Any

from ..common import store
from ..common.ranks import launch

NBYTES = 12 << 20
RANKS = (2, 3, 4)
TRANSPORTS = ("collectives", "sends", "peer_memory")
KINDS = ("gather", "reduce")
WARM_UP = 3


def run(request: dict[str, Any]) -> dict[str, list[float | None]]:
    """On a rank: `{kind: [milliseconds by each transport]}`; None where this machine does not allow it."""
    import torch
    import torch.distributed as dist

    from dbuffer.transport import Transport, transport_of

    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    full = torch.randn(NBYTES // 4 // ranks * ranks)
    shard = torch.randn(full.numel() // ranks)

    def move(kind: str, transport: Transport) -> None:
        if kind == "gather":
            transport.all_gather([(full, shard)], "full").wait()
        else:
            transport.reduce_scatter([(shard, full)], "sum", "full").wait()

    times: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in KINDS for name in TRANSPORTS}
    missing: set[str] = set()
    for _ in range(request["rounds"] + WARM_UP):
        for (kind, name), found in times.items():
            if name in missing:
                continue
            dist.barrier()
            began = time.perf_counter()
            try:
                move(kind, transport_of(group, name))
            except ValueError as error:  # the same on all ranks
                print(error, flush=True)
                missing.add(name)
            found.append(1e3 * (time.perf_counter() - began))
    return {
        kind: [
            None if name in missing else statistics.median(times[kind, name][WARM_UP:]) for name in TRANSPORTS
        ]
        for kind in KINDS
    }


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = store.parser_of("exchange", __doc__)
    parser.add_argument("--rounds", type=int, default=27)
    options = parser.parse_args(arguments)
    rows = []
    for ranks in RANKS:
        found = launch(run, ranks, {"rounds": options.rounds})
        rows.append([ranks, *("-" if ms is None else f"{ms:.1f}" for kind in KINDS for ms in found[kind])])
    print(store.table(["ranks", *(f"{kind}: {name}, ms" for kind in KINDS for name in TRANSPORTS)], rows))
    return 0
