"""Weights and states out of a model and into it: checkpoints, files, engines, CPU memory; compared with torch's ways.

python -m bench checkpoint     torch.distributed.checkpoint, save and load in turns; writes results/checkpoint.json
python -m bench weights [--parameters 1e9] [--ranks 2 4] [--dtype bfloat16]
python -m bench convert [--parameters 1e9] [--width 2048] [--ranks 2] [--dtype bfloat16] [--folder DIR];
                               writes results/convert-SIZE.json

Checkpoints: each rank writes its part into one folder (in memory, /dev/shm, where there is one, so that no disk is
measured) and loads it back into the same world.

Weights: random ones of a Llama-like model are written to a temporary folder. Each way loads them into a model on meta,
sharded over new gloo ranks, and writes the full model again. Memory is a rank's rise, without pages of files, looked
at every few milliseconds: the most of any rank, and rank 0's. The shard counts.

Conversion: random weights are written, loaded by the ranks, exported by them, converted to DCP by one process and
converted back; each folder goes when the next is complete, and all tensors must have the bytes that were written.
"""

import shutil
import statistics
import tempfile
import threading
import time
import zlib
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_states
from torch.distributed.tensor import distribute_tensor

from fsdp_runtime import load_safetensors, save_safetensors, set_full_state_dict
from fsdp_runtime.checkpoint import convert_checkpoint

from . import measure
from .compare import Clock, build_all, noise_of
from .measure import launch, mib, options_of, record, table, table_of
from .systems import SYSTEMS, Job, Trainer, fully_shard_of, left_out

COMPARED = ["ddp", "ours", "fsdp2"]
LOAD = {
    "ours": "load_safetensors",
    "ours, from rank 0": "set_full_state_dict(rank0_only=True)",
    "torch, from rank 0": "set_model_state_dict(broadcast_from_rank0=True)",
    "torch, by all ranks": "distribute_tensor of each tensor",
}
SAVE = {
    "ours": "save_safetensors",
    "torch, from rank 0": "get_model_state_dict(full, cpu_offload) and save_file",
}
WIDTH = 2048
MIB = 1 << 20


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: build, train a little, then save and load in turns."""
    job = Job.of(request)
    trainers, skipped = build_all(request["systems"], job)
    clock = Clock(job)
    for trainer in trainers.values():
        clock.mean_losses(trainer, 2)
    samples, calibration = clock.samples(trainers, request["rounds"], partial(_save_and_load, clock=clock))
    about = {"workload": job.workload.name, "ranks": dist.get_world_size(), "skipped": skipped}
    return {**about, "samples": samples, "calibration": calibration}


def _save_and_load(trainer: Trainer, clock: Clock) -> dict[str, float]:
    folder = [tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)]
    dist.broadcast_object_list(folder)
    try:
        dist.barrier()
        before, cpu, start = measure.CpuTimes.now(), time.process_time(), time.perf_counter()
        model, optimizer = dcp_states.get_state_dict(trainer.module, trainer.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        dist.barrier()
        saved = time.perf_counter()
        model, optimizer = dcp_states.get_state_dict(trainer.module, trainer.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
        dcp_states.set_state_dict(
            trainer.module, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        dist.barrier()
        loaded, foreign = time.perf_counter(), before.foreign(clock.sum(time.process_time() - cpu))
        size = sum(path.stat().st_size for path in Path(folder[0]).rglob("*") if path.is_file())
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return {"save": saved - start, "load": loaded - saved, "foreign": foreign, "bytes": size}


def tables(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's table."""
    rows = []
    for name, times in raw["samples"].items():
        saving, loading = (1e3 * statistics.median(s[key] for s in times) for key in ("save", "load"))
        varied = measure.spread([s["save"] for s in times])
        size = mib(times[-1]["bytes"])
        rows.append([SYSTEMS[name].label, f"{saving:.0f}", f"{loading:.0f}", size, f"{varied:.0%}"])
    text = f"{raw['workload']}, {raw['ranks']} ranks, model and AdamW state." + left_out(raw["skipped"])
    return [table_of("Checkpoints", text, "system; save ms; load ms; MiB on disk; spread", rows)]


def main_checkpoint(parser: ArgumentParser, arguments: list[str]) -> int:
    """Measure, print, record."""
    o = options_of(parser, arguments, workload="dense", ranks=2, rounds=5, keep_noisy=False)
    before = measure.busy_share()
    raw = launch(run, o.ranks, {"workload": o.workload, "systems": COMPARED, "rounds": o.rounds})
    return record("checkpoint", tables(raw), noise_of(before, raw), keep_noisy=o.keep_noisy, **raw)


# -- weights -----------------------------------------------------------------------------------------------------------


def _shapes(parameters: float, width: int = WIDTH) -> dict[str, tuple[int, int]]:
    inner = width * 11 // 4
    layer = dict.fromkeys("qkvo", (width, width))
    layer |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    embedding = 2 * 32000 * width
    count = max(1, round((parameters - embedding) / sum(a * b for a, b in layer.values())))
    shapes = {f"layers.{i}.{name}": shape for i in range(count) for name, shape in layer.items()}
    return {"embed": (32000, width), **shapes, "head": (32000, width)}


def _write(folder: Path, shapes: dict[str, tuple[int, int]], dtype: str) -> int:
    """Write a file for each gigabyte or so; returns the bytes of all tensors."""
    from safetensors.torch import save_file

    total, batch, number = 0, dict[str, Any](), 0
    for name, shape in shapes.items():
        batch[name] = torch.randn(shape, dtype=getattr(torch, dtype))
        total += batch[name].nbytes
        if sum(t.nbytes for t in batch.values()) > 1e9 or name == "head":
            save_file(batch, folder / f"part-{number}.safetensors")
            batch, number = {}, number + 1
    return total


def _model(shapes: dict[str, tuple[int, int]], dtype: str, fully_shard: Callable[..., Any]) -> Any:
    """A model on meta, sharded layer by layer."""
    model: Any = nn.Module()
    model.layers = nn.ModuleList()
    for name, shape in shapes.items():
        param = nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        if not name.startswith("layers."):
            setattr(model, name, param)
            continue
        _, index, inner = name.split(".")
        if int(index) == len(model.layers):
            model.layers.append(nn.Module())
        setattr(model.layers[int(index)], inner, param)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


class Peak:
    """Looks at this process's memory, without pages of files, from another thread."""

    def __init__(self) -> None:
        self._before = self._peak = self._memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.003):
            self._peak = max(self._peak, self._memory())

    def end(self) -> int:
        """The largest rise since the start, in bytes."""
        self._ended.set()
        self._thread.join()
        return max(self._peak, self._memory()) - self._before

    @staticmethod
    def _memory() -> int:
        return measure.memory_field("status", "RssAnon", "RssShmem")


def run_weights(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: load in one way, then save; bytes and memory of all ranks."""
    ours = request["way"].startswith("ours")
    folder, shapes = Path(request["folder"]), request["shapes"]
    model = _model(shapes, request["dtype"], fully_shard_of("ours" if ours else "fsdp2"))
    results = {}
    for action, act in (("load", _load), ("save", _save)):
        dist.barrier()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, rise(partial(act, request["way"], model, folder)))
        results[action] = every
    return results


def rise(act: Callable[[], int | None]) -> dict[str, Any]:
    """The most that this process's memory rises in a call, its seconds, and the bytes that it says it has read."""
    began, peak = time.perf_counter(), Peak()
    read = act()
    return {"peak": peak.end(), "read": read, "seconds": time.perf_counter() - began}


def tensors_in(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and tensors of the safetensors files of a folder, one at a time."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                yield name, opened.get_tensor(name)


def _load(way: str, model: Any, folder: Path) -> int:
    """Load; the bytes of files that this rank used."""
    if way == "ours":
        return load_safetensors(model, folder).bytes_read
    state: dict[str, Any] = {}
    if way.endswith("from rank 0"):
        if dist.get_rank() == 0:
            state = dict(tensors_in(folder))
        read = sum(tensor.nbytes for tensor in state.values())
        if way.startswith("ours"):
            set_full_state_dict(model, state, rank0_only=True)
        else:
            model.to_empty(device="cpu")
            options = dcp_states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            dcp_states.set_model_state_dict(model, state, options=options)
        return read
    model.to_empty(device="cpu")
    params, read = dict(model.named_parameters()), 0
    for name, whole in tensors_in(folder):
        read += whole.nbytes
        with torch.no_grad():
            params[name].copy_(distribute_tensor(whole, params[name].device_mesh, params[name].placements))
    return read


def _save(way: str, model: Any, folder: Path) -> int:
    """Write the full model; the bytes read, which are none."""
    from safetensors.torch import save_file

    target = folder / "saved"
    if way.startswith("ours"):
        save_safetensors(model, target, bucket_bytes=256 * MIB, max_file_bytes=512 * MIB)
        return 0
    target.mkdir(exist_ok=True)
    options = dcp_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = dcp_states.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        save_file(state, target / "model.safetensors")
    return 0


def main_weights(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the tables."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = options_of(parser, arguments, parameters=1e9, dtype="bfloat16")
    shapes = _shapes(options.parameters)
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        total = _write(Path(folder), shapes, options.dtype)
        count = sum(a * b for a, b in shapes.values())
        print(f"{count / 1e9:.3f}B parameters in {options.dtype}: {mib(total)} MiB in files")
        for ranks in options.ranks:
            for way in LOAD:
                request = {"way": way, "folder": folder, "shapes": shapes, "dtype": options.dtype}
                results = launch(run_weights, ranks, request)
                for names, every in zip((LOAD, SAVE), results.values(), strict=True):
                    if way in names:
                        most, seconds = (
                            max(figures[key] for figures in every) for key in ("peak", "seconds")
                        )
                        read = (
                            f"{sum(figures['read'] for figures in every) / total:.3f}"
                            if names is LOAD
                            else ""
                        )
                        cells = (mib(most), mib(every[0]["peak"]), f"{most / total:.2f}", f"{seconds:.1f}")
                        rows.append([ranks, names[way], read, *cells])
    heads = ["ranks", "way", "read / file", "peak MiB, most", "peak MiB, rank 0", "share of the model", "s"]
    print(table(heads, rows))


# -- conversion --------------------------------------------------------------------------------------------------------


def run_convert(request: dict[str, Any]) -> dict[str, Any]:
    """In one process: convert a folder; the rise of its memory and the seconds."""

    def convert() -> None:
        convert_checkpoint(**request, max_file_bytes=1 << 30)

    return rise(convert)


def _digests(folder: Path) -> dict[str, int]:
    """A checksum of each tensor in the safetensors files of a folder."""
    return {name: zlib.crc32(whole.view(torch.uint8).numpy()) for name, whole in tensors_in(folder)}


def round_trip(folder: Path, shapes: dict[str, tuple[int, int]], dtype: str, ranks: int) -> list[list[Any]]:
    """Rows (step, processes, MiB of the folder written, peak MiB, s) of a conversion round trip.

    Raises:
        ValueError: a tensor has other bytes at the end of a step.
    """
    names = ("source", "source/saved", "converted", "back")
    source, exported, converted, back = (folder / name for name in names)
    source.mkdir(parents=True)
    total = _write(source, shapes, dtype)
    expected, rows = _digests(source), []

    def check(step: str, where: Path) -> None:
        if (sums := _digests(where)) != expected:
            wrong = [name for name in expected if sums.get(name) != expected[name]]
            raise ValueError(f"{step}: {len(wrong)} tensors differ from what was written, {wrong[:3]} first")

    request = {"folder": str(source), "shapes": shapes, "dtype": dtype, "way": "ours"}
    for step, every in launch(run_weights, ranks, request, timeout=3600).items():
        name = "load_safetensors" if step == "load" else "save_safetensors"
        most, seconds = (max(figures[key] for figures in every) for key in ("peak", "seconds"))
        rows.append([name, ranks, mib(total), mib(most), f"{seconds:.1f}"])
    check("save_safetensors", exported)
    shutil.move(exported, folder / "exported")
    shutil.rmtree(source)
    conversions = {
        "safetensors to DCP": (folder / "exported", converted),
        "DCP to safetensors": (converted, back),
    }
    for step, (start, end) in conversions.items():
        figures = launch(run_convert, 1, {"source": str(start), "destination": str(end)}, timeout=3600)
        rows.append([step, 1, mib(total), mib(figures["peak"]), f"{figures['seconds']:.1f}"])
        shutil.rmtree(start)
    check("the round trip", back)
    return rows


def main_convert(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model")
    parser.add_argument("--ranks", type=int, default=2, help="that load and export")
    parser.add_argument("--folder", help="for temporary files: twice the model (default: the system's)")
    options = options_of(parser, arguments, parameters=1e9, dtype="bfloat16")
    shapes = _shapes(options.parameters, options.width)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = round_trip(Path(folder), shapes, options.dtype, options.ranks)
    billions = f"{sum(a * b for a, b in shapes.values()) / 1e9:.2f}B"
    text = f"{billions} parameters in {options.dtype}, each with its bytes at the end. "
    text += "Peak: the most that a process's memory rises, without pages of files."
    title = f"Weights through files, {billions}"
    tables = [table_of(title, text, "step; processes; MiB; peak MiB; s", rows, exact=True)]
    return record(f"convert-{billions}", tables)
