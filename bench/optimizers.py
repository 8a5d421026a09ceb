"""block-optim: CPU time of an optimizer step on a sharded model, next to torch's optimizers and torchao's.

python -m bench optimizer        the same figures as a table: medians, all in one process, in another order each time

Rank 0 of 64 ranks that are not there (torch's fake process group) holds its part of a Llama-style model of 31.6M
parameters: 75 tensors, 0.5M elements. Parameters and gradients are RaggedDTensors in flat buffers, as the runtime has
them, DTensors with `Shard(0)`, as FSDP2 has them, or plain local tensors. The check for non-finite gradients is off
where a row does not say otherwise: torch's optimizers have none. Thread CPU time of `step()`, milliseconds, one thread.
*New gradients* are other objects in every step, as backward passes make them; elsewhere they stay the same ones.
"""

import importlib.util
import random
import statistics
import time
from functools import partial
from typing import Any

from . import store
from .ranks import fake_ranks
from .recorded import recorded_as
from .workloads import WORKLOADS

RANKS = 64
FLAT = "torch, AdamW fused, one flat tensor"  # the limit


def sharded(mesh, block=None):
    """`{form: [(name, parameter)]}` with gradients, for the three forms; no cut of ragged ones is in a ``block``."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from dbuffer import DBuffer, Recycler
    from layout_planner import TensorSpec, plan

    from .models import groups_of

    ragged, dtensors, plain, kept = [], [], [], []
    for tensors in groups_of(WORKLOADS["counts"].model()):
        specs = []
        for name, p in tensors.items():
            chosen = block(name, p) if block is not None else None
            specs.append(TensorSpec(name, tuple(p.shape), *([chosen] if chosen is not None else [])))
        layout = plan(specs, RANKS)
        options: dict[str, Any] = {"dtype": torch.float32, "check_ranks": False, "recycler": Recycler("cpu")}
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


def renew(params):
    """Give ragged parameters other gradient objects, over the same memory."""
    for p in params:
        p.grad = p.grad.with_local(p.grad.to_local().detach())


def systems(mesh):
    """`{name: step}`, a call each; under "before" what comes before a step, outside of its time."""
    import torch

    from block_optim import AdamW, AdamW8bit
    from layout_planner import Elements, Tile

    forms = sharded(mesh)
    off: dict[str, Any] = {"skip_nonfinite": False}
    found: dict[str, Any] = {}

    def add(name, make, form, **step):
        optimizer = make([(n, torch.nn.Parameter(p.detach())) for n, p in form])
        grads = [p.grad for _, p in form]
        for p, grad in zip((p for g in optimizer.param_groups for p in g["params"]), grads, strict=True):
            p.grad = grad
        found[name] = lambda: optimizer.step(**step)
        return [p for g in optimizer.param_groups for p in g["params"]]

    add("ours, AdamW fused, ragged", lambda named: AdamW(named, fused=True, **off), forms["ragged"])
    new = "ours, AdamW fused, ragged, new gradients"
    params = add(new, lambda named: AdamW(named, fused=True, **off), forms["ragged"])
    found["before"] = {new: partial(renew, params)}
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
            torch_adamw = partial(torch.optim.AdamW, fused=kind == "fused", foreach=kind == "foreach")
            add(
                f"torch, AdamW {kind}, {form}",
                lambda n, make=torch_adamw: make([p for _, p in n]),
                forms[form],
            )
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for _, p in forms["plain"]]))
    flat.grad = torch.randn_like(flat)
    add(
        FLAT,
        lambda n: torch.optim.AdamW([n[0][1]], fused=True),
        [("flat", flat)],
    )
    for block in (Elements(256), Tile(32, 32)):
        cut = sharded(mesh, AdamW8bit.block_policy(block=block))
        found[f"kept {block}"] = cut["kept"]
        add(f"ours, AdamW8bit {block}, ragged", partial(AdamW8bit, block=block, **off), cut["ragged"])
    if importlib.util.find_spec("torchao") is not None:
        from torchao.optim import AdamW8bit as TorchAO

        add("torchao, AdamW8bit, plain", lambda named: TorchAO([p for _, p in named]), forms["plain"])
    found["kept"] = forms["kept"]
    return found


def measure(rounds):
    """`{name: milliseconds}`, medians."""
    with fake_ranks(RANKS) as mesh:
        built = systems(mesh)
        calls = {name: call for name, call in built.items() if callable(call)}
        times: dict[str, list[float]] = {name: [] for name in calls}
        order, shuffle = list(calls), random.Random(0).shuffle
        for turn in range(rounds + 3):
            shuffle(order)  # a step finds the caches as the one before left them
            for name in order:
                call = calls[name]
                if name in built["before"]:
                    built["before"][name]()
                start = time.thread_time()
                call()
                if turn >= 3:  # the first few warm up
                    times[name].append(time.thread_time() - start)
    return {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


@recorded_as(
    "optimizer", track_adamw_fused_ms="ms", track_adamw_ms="ms", track_adamw8bit_elements_ms="ms",
    track_adamw8bit_tile_ms="ms", track_share_of_torch_fused_on_dtensors="ratio",
)  # fmt: skip
class Step:
    """Optimizer steps. AdamW fused on flat ragged parameters is to stay below half of torch's on DTensors."""

    timeout = 900

    def setup_cache(self):
        return measure(9)

    def track_adamw_fused_ms(self, results):
        return results["ours, AdamW fused, ragged"]

    def track_adamw_ms(self, results):
        return results["ours, AdamW, ragged"]

    def track_adamw8bit_elements_ms(self, results):
        return results["ours, AdamW8bit elements:256, ragged"]

    def track_adamw8bit_tile_ms(self, results):
        return results["ours, AdamW8bit tile:32x32, ragged"]

    def track_share_of_torch_fused_on_dtensors(self, results):
        return results["ours, AdamW fused, ragged"] / results["torch, AdamW fused, DTensor"]


def main(arguments):
    """Print the table."""
    parser = store.parser_of("optimizer", __doc__)
    parser.add_argument("--rounds", type=int, default=25)
    times = measure(parser.parse_args(arguments).rounds)
    rows = [[name, f"{ms:.3f}", f"{ms / times[FLAT]:.2f}"] for name, ms in times.items()]
    print(store.table(["optimizer and parameters", "ms", "of one flat tensor's"], rows))
    return 0
