"""block-optim: CPU time of an optimizer step on a sharded model, beside torch's optimizers and torchao's.

python bench/optimizer.py        the same figures as a table: medians, all in one process, in another order each time

Rank 0 of 64 ranks that are not there (torch's fake process group) holds its part of a Llama-style model of 31.6M
parameters: 75 tensors, 0.5M elements. Parameters and gradients are RaggedDTensors in flat buffers, as the runtime has
them, DTensors with `Shard(0)`, as FSDP2 has them, or plain local tensors. The check for non-finite gradients is off
where a row does not say otherwise: torch's optimizers have none. Thread CPU time of `step()`, milliseconds, one thread.
"""

import importlib.util
import os
import random
import statistics
import sys
import time
from pathlib import Path

RANKS = 64
ROUNDS = 25


def sharded(block=None):
    """`{form: [(name, parameter)]}` with gradients, for the three forms; no cut of ragged ones is in a ``block``."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    from dbuffer import DBuffer, Recycler
    from layout_planner import TensorSpec, plan

    buffers = neighbour("buffer")
    mesh: DeviceMesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    model = buffers.build_model()
    ragged, dtensors, plain, kept = [], [], [], []
    for tensors in buffers.groups_of(model):
        specs = []
        for name, p in tensors.items():
            chosen = block(name, p) if block is not None else None
            specs.append(TensorSpec(name, tuple(p.shape), *([chosen] if chosen is not None else [])))
        layout = plan(specs, RANKS)
        options = {"dtype": torch.float32, "check_ranks": False, "recycler": Recycler("cpu")}
        params, grads = DBuffer(layout, mesh, **options), DBuffer(layout, mesh, **options)
        kept.append((params, grads))
        gradients = grads.ragged_tensors()
        for name, p in params.ragged_tensors(requires_grad=True).items():
            gradients[name].to_local().normal_()
            p.grad = gradients[name]
            ragged.append((name, p))
        for name, p in tensors.items():
            local = p.detach().chunk(RANKS)[0].clone()
            shaped = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
            )
            dtensors.append((name, torch.nn.Parameter(shaped)))
            plain.append((name, torch.nn.Parameter(local.clone())))
    for _, p in (*dtensors, *plain):
        p.grad = torch.randn_like(p)
    return {"ragged": ragged, "DTensor": dtensors, "plain": plain, "kept": kept}


def neighbour(name):
    """Another file of this folder, whichever way this one was started."""
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def systems():
    """`{name: step}`, a call each."""
    import torch

    from block_optim import AdamW, AdamW8bit
    from layout_planner import Elements, Tile

    forms = sharded()
    off = {"skip_nonfinite": False}
    found = {}

    def add(name, make, form, **step):
        optimizer = make([(n, torch.nn.Parameter(p.detach())) for n, p in form])
        grads = [p.grad for _, p in form]
        for p, grad in zip((p for g in optimizer.param_groups for p in g["params"]), grads, strict=True):
            p.grad = grad
        found[name] = lambda: optimizer.step(**step)

    add("ours, AdamW fused, ragged", lambda named: AdamW(named, fused=True, **off), forms["ragged"])
    add(
        "ours, AdamW fused, ragged, checked",
        lambda named: AdamW(named, fused=True),
        forms["ragged"],
        grad_norm=1.0,
    )
    add("ours, AdamW, ragged", lambda named: AdamW(named, **off), forms["ragged"])
    add("ours, AdamW fused, DTensor", lambda named: AdamW(named, fused=True, **off), forms["DTensor"])
    add("ours, AdamW fused, plain", lambda named: AdamW(named, fused=True, **off), forms["plain"])
    for kind in ("fused", "foreach"):
        for form in ("ragged", "DTensor", "plain"):
            make = lambda named, kind=kind: torch.optim.AdamW([p for _, p in named], **{kind: True})  # noqa: E731
            add(f"torch, AdamW {kind}, {form}", make, forms[form])
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for _, p in forms["plain"]]))
    flat.grad = torch.randn_like(flat)
    add(
        "torch, AdamW fused, one flat tensor",
        lambda n: torch.optim.AdamW([n[0][1]], fused=True),
        [("flat", flat)],
    )
    for block in (Elements(256), Tile(32, 32)):
        cut = sharded(AdamW8bit.block_policy(block=block))
        found[f"kept {block}"] = cut["kept"]
        make = lambda named, block=block: AdamW8bit(named, block=block, **off)  # noqa: E731
        add(f"ours, AdamW8bit {block}, ragged", make, cut["ragged"])
    if importlib.util.find_spec("torchao") is not None:
        from torchao.optim import AdamW8bit as TorchAO

        add("torchao, AdamW8bit, plain", lambda named: TorchAO([p for _, p in named]), forms["plain"])
    found["kept"] = forms["kept"]
    return found


def measure(rounds):
    """`{name: milliseconds}`, medians."""
    buffers = neighbour("buffer")
    with buffers.fake_ranks(RANKS):
        found = systems()
        calls = {name: call for name, call in found.items() if callable(call)}
        times = {name: [] for name in calls}
        order, shuffle = list(calls), random.Random(0).shuffle
        for turn in range(rounds + 3):
            shuffle(order)  # a step finds the caches as the one before left them
            for name in order:
                call = calls[name]
                start = time.thread_time()
                call()
                if turn >= 3:  # the first few warm up
                    times[name].append(time.thread_time() - start)
    return {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


class Step:
    """Optimizer steps. AdamW fused on flat ragged parameters is to stay below half of torch's on DTensors."""

    timeout = 900

    def setup_cache(self):
        return measure(9)

    def track_adamw_fused_ms(self, results):
        return results["ours, AdamW fused, ragged"]

    track_adamw_fused_ms.unit = "ms"

    def track_adamw_ms(self, results):
        return results["ours, AdamW, ragged"]

    track_adamw_ms.unit = "ms"

    def track_adamw8bit_elements_ms(self, results):
        return results["ours, AdamW8bit elements:256, ragged"]

    track_adamw8bit_elements_ms.unit = "ms"

    def track_adamw8bit_tile_ms(self, results):
        return results["ours, AdamW8bit tile:32x32, ragged"]

    track_adamw8bit_tile_ms.unit = "ms"

    def track_share_of_torch_fused_on_dtensors(self, results):
        return results["ours, AdamW fused, ragged"] / results["torch, AdamW fused, DTensor"]

    track_share_of_torch_fused_on_dtensors.unit = "ratio"


def main():
    """Print the table."""
    for name, milliseconds in measure(int(os.environ.get("ROUNDS", str(ROUNDS)))).items():
        print(f"{name:44} {milliseconds:8.3f}")


if __name__ == "__main__":
    sys.exit(main())
