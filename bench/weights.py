"""Weights in and out of a model of a billion parameters: bytes read and peak memory, next to torch's way.

python -m bench weights [--parameters 1e9] [--ranks 2 4] [--dtype bfloat16]

Random weights of a Llama-like model are written to a temporary folder. Each way then loads them into a model on meta,
sharded over as many fresh gloo ranks, and writes the full model again. Memory is what a rank has over what it had
before, without pages of files, looked at every few milliseconds: the most of any rank, and rank 0's. The shard counts.
"""

import importlib
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import store
from .ranks import launch

LOAD = {
    "ours": "load_safetensors",
    "ours, from rank 0": "set_full_state_dict(rank0_only=True)",
    "torch, from rank 0": "set_model_state_dict(broadcast_from_rank0=True)",
    "torch, by all ranks": "distribute_tensor of each tensor",
}
SAVE = {"ours": "save_safetensors", "torch": "get_model_state_dict(full, cpu_offload) and save_file"}
WIDTH, INNER = 2048, 5632
MIB = 1 << 20


def _shapes(parameters: float) -> dict[str, tuple[int, int]]:
    layer = {
        **dict.fromkeys("qkvo", (WIDTH, WIDTH)), "gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER),
    }  # fmt: skip
    embedding = 2 * 32000 * WIDTH
    count = max(1, round((parameters - embedding) / sum(a * b for a, b in layer.values())))
    shapes = {f"layers.{i}.{name}": shape for i in range(count) for name, shape in layer.items()}
    return {"embed": (32000, WIDTH), **shapes, "head": (32000, WIDTH)}


def _write(folder: Path, shapes: dict[str, tuple[int, int]], dtype: str) -> int:
    """A file for each gigabyte or so; the bytes of all tensors."""
    import torch
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
    """On meta, sharded layer by layer."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        """Its matrices."""

    model: Any = Layer()
    model.layers = nn.ModuleList()
    for name, shape in shapes.items():
        param = nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        if name.startswith("layers."):
            _, index, inner = name.split(".")
            if int(index) == len(model.layers):
                model.layers.append(Layer())
            setattr(model.layers[int(index)], inner, param)
        else:
            setattr(model, name, param)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


class Peak:
    """Looks at this process's memory, without pages of files, from another thread."""

    def __init__(self) -> None:
        self._before = self._peak = _memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.003):
            self._peak = max(self._peak, _memory())

    def end(self) -> int:
        """The most over what there was at first, in bytes."""
        self._ended.set()
        self._thread.join()
        return max(self._peak, _memory()) - self._before


def _memory() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: load in one way, then save; bytes and memory of all ranks."""
    import torch.distributed as dist

    ours = request["way"].startswith("ours")
    folder, shapes = Path(request["folder"]), request["shapes"]
    shard: Any = importlib.import_module("fsdp_runtime" if ours else "torch.distributed.fsdp").fully_shard
    model = _model(shapes, request["dtype"], shard)
    results = {}
    for what, act in (("load", _load), ("save", _save)):
        dist.barrier()
        began, peak = time.perf_counter(), Peak()
        read = act(request["way"], model, folder)
        own = {"peak": peak.end(), "read": read, "seconds": time.perf_counter() - began}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        results[what] = every
    return results


def _load(way: str, model: Any, folder: Path) -> int:
    """Load; the bytes of files that this rank used."""
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.tensor import distribute_tensor

    from fsdp_runtime import load_safetensors, set_full_state_dict

    if way == "ours":
        return load_safetensors(model, folder).bytes_read
    state: dict[str, Any] = {}
    if way.endswith("from rank 0"):
        if dist.get_rank() == 0:
            for file in sorted(folder.glob("part-*")):
                state.update(load_file(file))
        read = sum(tensor.nbytes for tensor in state.values())
        if way.startswith("ours"):
            set_full_state_dict(model, state, rank0_only=True)
        else:
            model.to_empty(device="cpu")
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, state, options=options)
        return read
    model.to_empty(device="cpu")
    params, read = dict(model.named_parameters()), 0
    for file in sorted(folder.glob("part-*")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                whole = opened.get_tensor(name)
                read += whole.nbytes
                with torch.no_grad():
                    placed = distribute_tensor(whole, params[name].device_mesh, params[name].placements)
                    params[name].copy_(placed)
    return read


def _save(way: str, model: Any, folder: Path) -> int:
    """Write the full model; the bytes read, which are none."""
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fsdp_runtime import save_safetensors

    target = folder / "saved"
    if way.startswith("ours"):
        save_safetensors(model, target, bucket_bytes=256 * MIB, max_file_bytes=512 * MIB)
        return 0
    target.mkdir(exist_ok=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        save_file(state, target / "model.safetensors")
    return 0


def main(arguments: list[str]) -> int:
    """Print the tables."""
    parser = store.parser_of("weights", __doc__)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    shapes = _shapes(options.parameters)
    rows: dict[str, list[list[str]]] = {"load": [], "save": []}
    with tempfile.TemporaryDirectory() as folder:
        total = _write(Path(folder), shapes, options.dtype)
        count = sum(a * b for a, b in shapes.values())
        print(f"{count / 1e9:.3f}B parameters in {options.dtype}: {total / MIB:.0f} MiB in files")
        for ranks in options.ranks:
            for way in LOAD:
                request = {"way": way, "folder": folder, "shapes": shapes, "dtype": options.dtype}
                results = launch(run, ranks, request)
                for what, names in (("load", LOAD), ("save", SAVE)):
                    if way not in names and not (what == "save" and way == "torch, from rank 0"):
                        continue
                    rows[what].append(_row(ranks, names.get(way, SAVE["torch"]), results[what], total, what))
    heads = ["ranks", "way", "peak MiB, most", "peak MiB, rank 0", "share of the model", "s"]
    print(store.table([*heads[:2], "read / file", *heads[2:]], rows["load"]))
    print()
    print(store.table(heads, rows["save"]))
    return 0


def _row(ranks: int, way: str, results: list[dict[str, Any]], total: int, what: str) -> list[str]:
    most = max(result["peak"] for result in results)
    read = [f"{sum(result['read'] for result in results) / total:.3f}"] if what == "load" else []
    memory = [f"{most / MIB:.0f}", f"{results[0]['peak'] / MIB:.0f}", f"{most / total:.2f}"]
    return [str(ranks), way, *read, *memory, f"{max(result['seconds'] for result in results):.1f}"]
