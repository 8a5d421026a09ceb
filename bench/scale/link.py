"""A worker: what the check of `scale` starts from, and what it is compared with.

On all ranks at once: the plain model's forward, backward and update; gathers and reductions of two sizes, gloo's own
and as dbuffer makes them; a large copy. Then the systems' own steps.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..systems.adapters import Job, build_plain
from ..times.clock import Clock, build_all

SMALL, LARGE = 1 << 14, 1 << 21  # elements of a shard


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Measure parts and wholes, in turns."""
    import torch
    import torch.distributed as dist

    from dbuffer.transport import transport_of

    job = Job.of(request)
    size = dist.get_world_size()
    trainers, skipped = build_all(request["systems"], job)
    trainers = {"plain": build_plain(job), **trainers}
    clock = Clock(job)
    for trainer in trainers.values():
        clock.mean_losses(trainer, 2)
    whole, out = torch.zeros(size * LARGE), torch.zeros(LARGE)
    transports = {"": "collectives", "ours_": "auto"}  # by what the names of the parts begin with

    def exchange(which: str, what: str, n: int) -> None:
        transport = transport_of(job.mesh.get_group(), transports[which])
        if what == "gather":
            transport.all_gather([(whole[: n * size], out[:n])], what).wait()
        else:
            transport.reduce_scatter([(out[:n], whole[: n * size])], "sum", what).wait()

    other = torch.zeros_like(whole)
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: other.copy_(whole)}
    for which in transports:
        for what in ("gather", "reduce"):
            for name, n in (("small", SMALL), ("large", LARGE)):
                calls[f"{which}{what}_{name}"] = partial(exchange, which, what, n)
    parts: dict[str, list[float]] = {name: [] for name in calls}
    samples: dict[str, list[Any]] = {name: [] for name in trainers}
    for _ in range(request["rounds"]):
        for name, call in calls.items():
            parts[name].append(_time(call))
        for name, trainer in trainers.items():
            samples[name].append(clock.measure(trainer, 1))
    return {
        "ranks": size,
        "shard_bytes": [4 * SMALL, 4 * LARGE],
        "copied_bytes": whole.nbytes,
        "parts": {name: statistics.median(values) for name, values in parts.items()},
        "steps": {
            name: {key: statistics.median(s[key] for s in found) for key in found[0]}
            for name, found in samples.items()
        },
        "skipped": skipped,
    }


def _time(call: Callable[[], Any]) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start
