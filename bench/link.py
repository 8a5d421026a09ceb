"""Worker: what the check of `scale` starts from, and what it is compared with.

On all ranks at once: the plain model's forward, backward and update; gathers and reductions of two sizes, gloo's own
and as dbuffer makes them; a large copy. Then the systems' own steps. Started by `launch`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from .ranks import all_gather, job_of, reduce_scatter, run_worker

SMALL, LARGE = 1 << 14, 1 << 21  # elements of a shard


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Measure parts and wholes, in turns."""
    import torch
    import torch.distributed as dist

    from dbuffer import _direct

    from .rounds import Clock, build_all
    from .systems import _plain

    job = job_of(request)
    size = dist.get_world_size()
    trainers, skipped = build_all(request["systems"], job)
    trainers = {"plain": _plain("plain", job.workload.model(job.device), job), **trainers}
    clock = Clock(job)
    for trainer in trainers.values():
        clock.mean_losses(trainer, 2)
    whole, out = torch.zeros(size * LARGE), torch.zeros(LARGE)

    def gather(n: int) -> None:
        all_gather(whole[: n * size], out[:n])

    def reduce(n: int) -> None:
        reduce_scatter(out[:n], whole[: n * size])

    # As in dbuffer: rank to rank where that pays, else the collective. `ours_` is a prefix of the parts' names.
    def gather_ours(n: int) -> None:
        pairs, group = [(whole[: n * size], out[:n])], dist.group.WORLD
        if _direct.pays(pairs, group):
            _direct.all_gather(pairs, group).wait()
        else:
            gather(n)

    def reduce_ours(n: int) -> None:
        pairs, group = [(out[:n], whole[: n * size])], dist.group.WORLD
        if _direct.pays(pairs, group):
            _direct.reduce_scatter(pairs, True, group).wait()
        else:
            reduce(n)

    other = torch.zeros_like(whole)
    parts: dict[str, list[float]] = {}
    samples: dict[str, list[Any]] = {name: [] for name in trainers}
    for _ in range(request["rounds"]):
        for name, call in {
            "gather_small": lambda: gather(SMALL),
            "gather_large": lambda: gather(LARGE),
            "reduce_small": lambda: reduce(SMALL),
            "reduce_large": lambda: reduce(LARGE),
            "ours_gather_small": lambda: gather_ours(SMALL),
            "ours_gather_large": lambda: gather_ours(LARGE),
            "ours_reduce_small": lambda: reduce_ours(SMALL),
            "ours_reduce_large": lambda: reduce_ours(LARGE),
            "copy": lambda: other.copy_(whole),
        }.items():
            parts.setdefault(name, []).append(_time(call))
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


if __name__ == "__main__":
    run_worker(run)
