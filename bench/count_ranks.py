"""Worker: the counts of `counts` on real ranks. Started by `launch`; rank 0's figures are answered."""

from typing import Any

from .ranks import job_of, run_worker


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Each system's counts beyond those of the plain model, which the request brings."""
    import torch.distributed as dist

    from dbuffer import _direct

    from .counting import count, outside
    from .systems import why_not

    _direct.MIN_BYTES = 1 << 62  # counted as the collectives that they are on other backends

    job = job_of(request)
    figures: dict[str, Any] = {}
    for name in request["systems"]:
        if reason := why_not(name, job):
            figures[name] = {"skipped": reason}
        else:
            figures[name] = outside(count(name, job, rank=dist.get_rank()), request["base"])
    return figures


if __name__ == "__main__":
    run_worker(run)
