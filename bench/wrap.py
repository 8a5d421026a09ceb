"""What `fully_shard` of a large model on the meta device costs the host, and how that grows.

python -m bench wrap                        Llama 405B by layers, on 1024 ranks, ours and FSDP2
python -m bench wrap --tensors 50000        and ours alone, with as many layers as make so many tensors

One process stands for rank 0 (torch's fake process group). Thread CPU time of all `fully_shard` calls, and Python calls
of our own code in them, which are exact. DeepSpeed is tried on one layer, and its error printed.
"""

import gc
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from . import store
from .calls import PACKAGES, Calls
from .ranks import fake_ranks

RANKS, LAYERS, IN_LAYER = 1024, 126, 9
WIDTH, HIDDEN, KEYS, WORDS = 16384, 53248, 1024, 128256


def llama(layers: int) -> Any:
    """The tensors of Llama-3.1-405B, on meta, in so many layers."""
    import torch
    from torch import nn

    def layer() -> Any:
        shapes = [(WIDTH, WIDTH), (WIDTH, KEYS), (WIDTH, KEYS), (WIDTH, WIDTH)]
        shapes += [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
        linears = [nn.Linear(*shape, bias=False) for shape in shapes]
        return nn.Sequential(*linears, nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH))

    with torch.device("meta"):
        ends = {"embed": nn.Embedding(WORDS, WIDTH), "norm": nn.RMSNorm(WIDTH)}
        model = nn.ModuleDict({**ends, "head": nn.Linear(WIDTH, WORDS, bias=False)})
        model["layers"] = nn.Sequential(*(layer() for _ in range(layers)))
    return nn.Sequential(*model.values())


def wrap(system: str, layers: int, *, count: bool = False) -> tuple[float, int]:
    """Thread CPU seconds, and our own Python calls where they are counted, which takes longer."""
    import torch.distributed.fsdp as fsdp2

    import fsdp_runtime

    fully_shard: Any = {"ours": fsdp_runtime, "fsdp2": fsdp2}[system].fully_shard
    folders = [Path(str(importlib.import_module(name).__file__)).parent for name in PACKAGES]
    gc.collect()  # layouts of models before, which equal ones would share
    with fake_ranks(RANKS) as mesh:
        model = llama(layers)
        calls = Calls(folders)
        began = time.thread_time()
        if count:
            calls.__enter__()
        try:
            for module in (*model[-1], model):
                fully_shard(module, mesh=mesh)
        finally:
            sys.setprofile(None)
        return time.thread_time() - began, sum(calls.functions.values())


def why_not_deepspeed() -> str:
    """What its `zero.Init` says of one layer of the same model.

    Raises:
        RuntimeError: nothing, so it can be measured like the others.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return "the package deepspeed is not installed"
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    import torch

    config = {"train_batch_size": RANKS, "zero_optimization": {"stage": 3}}
    with fake_ranks(RANKS):
        try:
            deepspeed.zero.Init(module=llama(1), config_dict_or_path=config, dtype=torch.float32)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".!")
    raise RuntimeError("DeepSpeed shards a model on meta now: measure it like the others")


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = store.parser_of("wrap", __doc__)
    parser.add_argument("--tensors", type=int, default=0, help="also ours with so many")
    options = parser.parse_args(arguments)
    for system in ("ours", "fsdp2"):
        wrap(system, 2)  # what is imported and looked up once
    rows = []
    sizes = [
        ("FSDP2", "fsdp2", LAYERS),
        ("fsdp_runtime", "ours", LAYERS),
        ("fsdp_runtime", "ours", 2 * LAYERS),
    ]
    if options.tensors:
        sizes.append(("fsdp_runtime", "ours", options.tensors // IN_LAYER))
    for label, system, layers in sizes:
        seconds, _ = wrap(system, layers)
        calls = wrap(system, layers, count=True)[1] if system == "ours" else 0
        tensors = layers * IN_LAYER + 3
        each = f"{1e6 * seconds / tensors:.0f}"
        rows.append([label, layers + 1, tensors, f"{seconds:.2f}", each, f"{calls:,}" if calls else ""])
    print(store.table(["system", "units", "tensors", "CPU s", "us a tensor", "own Python calls"], rows))
    print(f"\nDeepSpeed ZeRO-3 is not in the table: {why_not_deepspeed()}.")
    return 0
