"""Where measurements run: ranks that exist, one rank of many that do not, and the process that asks.

    launch(rounds.run, 2, request)     two fresh gloo ranks of one thread each call `rounds.run(request)`
    fake_ranks(64)                     torch's fake process group: collectives return at once and send nothing

A request is plain data. With `simulate` = {"ranks", "bandwidth", "latency"} the one rank launched stands for rank 0 of
a simulated world on its device (`ragged_shard.testing.simulated_ranks`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def launch(run: Callable[..., Any], ranks: int, request: dict[str, Any], *, timeout: float = 1200.0) -> Any:
    """What `run(request)` returned on rank 0 of as many new processes.

    They end with the call, so that nothing an earlier one left in memory counts.

    Raises:
        RankError: a rank raised, died, or did not answer within `timeout` seconds.
    """
    from ragged_shard.testing import run_ranks, shut_down

    if str(ROOT) not in sys.path:  # asv finds this package by a way of its own; other processes do not
        sys.path.insert(0, str(ROOT))
    device = request.get("device", "cpu")
    shut_down()
    try:
        return run_ranks(ranks, answer, run, request, timeout=timeout, device=device, seed=0)[0]
    finally:
        shut_down()


def answer(run: Callable[..., Any], request: dict[str, Any]) -> Any:
    """What a rank does with a request; in a simulated world `run` also gets the `Simulation`."""
    if "simulate" not in request:
        return run(request)
    import torch.distributed as dist

    from ragged_shard.testing import Network, simulated_ranks

    dist.destroy_process_group()
    wanted = request["simulate"]
    network = Network(wanted["bandwidth"], wanted.get("latency", 0.0))
    with simulated_ranks(wanted["ranks"], network=network) as simulation:
        return run(request, simulation)


@contextmanager
def fake_ranks(ranks: int, *, rank: int = 0) -> Iterator[Any]:
    """A mesh of that many ranks, of which only this process exists; it uses one thread meanwhile."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
