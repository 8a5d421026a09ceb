"""How long a checkpoint takes: torch.distributed.checkpoint, model and optimizer, save and load, systems taking turns.

python -m bench checkpoint      writes results/checkpoint.json

Each rank writes what it holds into one folder (in memory, /dev/shm, where there is one, so that no disk is measured),
and loads it back into the same world.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from . import machine, store
from .clock import Clock, build_all, in_turns
from .ranks import launch
from .systems import SYSTEMS, Job, Trainer

COMPARED = ["ddp", "ours", "fsdp2"]


def measure(workload: str, ranks: int, rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Figures and why they are not to be trusted."""
    before = machine.busy_share()
    raw = launch(run, ranks, {"workload": workload, "systems": COMPARED, "rounds": rounds})
    foreign = [s["foreign"] for times in raw["samples"].values() for s in times]
    return raw, machine.verdict(before, raw["calibration"], foreign)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: build, train a little, then save and load in turns."""
    import torch.distributed as dist

    job = Job.of(request)
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    for trainer in trainers.values():
        clock.mean_losses(trainer, 2)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    sizes: dict[str, int] = {}
    calibration = []
    for names in in_turns(list(trainers), request["rounds"]):
        calibration.append(clock.calibrate())
        for name in names:
            found, sizes[name] = _round_trip(trainers[name])
            samples[name].append(found)
    return {
        "workload": job.workload.name,
        "ranks": dist.get_world_size(),
        "samples": samples,
        "bytes": sizes,
        "skipped": skipped,
        "calibration": calibration,
    }


def _round_trip(trainer: Trainer) -> tuple[dict[str, float], int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = [tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)]
    dist.broadcast_object_list(folder)
    try:
        dist.barrier()
        before, cpu, start = machine.CpuTimes.now(), time.process_time(), time.perf_counter()
        model, optimizer = get_state_dict(trainer.module, trainer.optimizers)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        dist.barrier()
        saved = time.perf_counter()
        model, optimizer = get_state_dict(trainer.module, trainer.optimizers)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        set_state_dict(trainer.module, trainer.optimizers, model_state_dict=model, optim_state_dict=optimizer)
        dist.barrier()
        loaded, after = time.perf_counter(), machine.CpuTimes.now()
        used = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
        dist.all_reduce(used)
        size = sum(path.stat().st_size for path in Path(folder[0]).rglob("*") if path.is_file())
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    foreign = (after.busy - before.busy - float(used)) / max(after.total - before.total, 1e-9)
    return {"save": saved - start, "load": loaded - saved, "foreign": max(foreign, 0.0)}, size


def tables(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's table."""
    rows = []
    for name, times in raw["samples"].items():
        save, load = (statistics.median(s[key] for s in times) for key in ("save", "load"))
        spread = machine.spread([s["save"] for s in times])
        cells = (f"{1e3 * save:.0f}", f"{1e3 * load:.0f}", store.mib(raw["bytes"][name]), f"{spread:.0%}")
        rows.append([SYSTEMS[name].label, *cells])
    text = f"{raw['workload']}, {raw['ranks']} ranks, model and AdamW state. "
    text += " ".join(f"{SYSTEMS[n].label} is missing: {why}." for n, why in raw["skipped"].items())
    header = ["system", "save ms", "load ms", "MiB on disk", "spread"]
    return [{"title": "Checkpoints", "text": text, "header": header, "rows": rows}]


def main(arguments: list[str]) -> int:
    """Measure, print, record."""
    parser = store.parser_of("checkpoint", __doc__, timed=True)
    parser.add_argument("--workload", default="dense")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    raw, noise = measure(options.workload, options.ranks, options.rounds)
    raw["tables"] = tables(raw)
    store.print_tables(raw["tables"])
    return store.record("checkpoint", raw, noise, options.keep_noisy)
