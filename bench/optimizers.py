"""block-optim: time, state and precision of optimizer steps.

python -m bench optimizer      AdamW's step on a sharded model, torch's optimizers and torchao's on the same
python -m bench one_device     steps on plain tensors of one process, compared with torch.optim.Muon and torchao
python -m bench meshes         whether the mesh decides the precision of 8-bit states, torchao's and ours
python -m bench shampoo        Shampoo's and SOAP's step over 50 steps, and their memory

Times are thread CPU milliseconds of `step()`, one thread, medians, all systems taking turns. The check for non-finite
gradients is off unless a row says "checked": torch's optimizers have none.
"""

import importlib.util
import logging
import math
import statistics
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from . import measure
from .measure import (
    fake_ranks,
    interleave,
    launch,
    medians_ms,
    options_of,
    save_tables,
    table,
    table_of,
)
from .models import WORKLOADS, groups_of

OFF: dict[str, Any] = {"skip_nonfinite": False}

# -- optimizer: a sharded model, rank 0 of 64 --------------------------------------------------------------------------

RANKS = 64
FLAT = "torch, AdamW fused, one flat tensor"  # the limit


def sharded(mesh: Any, block: Any = None) -> dict[str, list[Any]]:
    """`{form: [(name, parameter)]}` with gradients: 75 tensors of 0.5M elements, of a model of 31.6M parameters.

    Ragged ones are in flat buffers, as the runtime has them; no cut is in a `block`. DTensors have `Shard(0)`, as
    FSDP2 has them.
    """
    from dbuffer import DBuffer, Recycler
    from layout_planner import TensorSpec, plan

    forms: dict[str, list[Any]] = {"ragged": [], "DTensor": [], "plain": [], "kept": []}
    for tensors in groups_of(WORKLOADS["counts"].model()):
        blocks: Any = {name: block(name, p) if block is not None else None for name, p in tensors.items()}
        specs = [
            TensorSpec(name, tuple(p.shape), *([] if blocks[name] is None else [blocks[name]]))
            for name, p in tensors.items()
        ]
        options: dict[str, Any] = {"dtype": torch.float32, "check_ranks": False, "recycler": Recycler("cpu")}
        params, grads = (DBuffer(plan(specs, RANKS), mesh, **options) for _ in range(2))
        p: Any
        forms["kept"] += params, grads
        gradients = grads.ragged_tensors()
        for name, p in params.ragged_tensors(requires_grad=True).items():
            gradients[name].to_local().normal_()
            p.grad = gradients[name]
            forms["ragged"].append((name, p))
        for name, p in tensors.items():
            local, whole = p.detach().chunk(RANKS)[0].clone(), {"shape": p.shape, "stride": p.stride()}
            shaped = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **whole)
            forms["DTensor"].append((name, torch.nn.Parameter(shaped)))
            forms["plain"].append((name, torch.nn.Parameter(local.clone())))
    for _, p in (*forms["DTensor"], *forms["plain"]):
        p.grad = torch.randn_like(p)
    return forms


def measure_steps(rounds: int) -> dict[str, float]:
    """`{name: milliseconds}`. *New gradients* are other objects over the same memory in every step."""
    from block_optim import AdamW, AdamW8bit
    from layout_planner import Elements, Tile

    steps: dict[str, Callable[[], Any]] = {}
    with fake_ranks(RANKS) as mesh:
        forms = sharded(mesh)
        kept = [forms]

        def add(name: str, make: Callable[[Any], Any], form: Any, **step: Any) -> list[Any]:
            optimizer = make([(n, torch.nn.Parameter(p.detach())) for n, p in form])
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for p, (_, original) in zip(params, form, strict=True):
                p.grad = original.grad
            steps[name] = partial(optimizer.step, **step)
            return params

        def renew(params: list[Any]) -> None:
            for p in params:
                p.grad = p.grad.with_local(p.grad.to_local().detach())

        fused, new = partial(AdamW, fused=True, **OFF), "ours, AdamW fused, ragged, new gradients"
        add("ours, AdamW fused, ragged", fused, forms["ragged"])
        params = add(new, fused, forms["ragged"])
        checked = partial(AdamW, fused=True)
        add("ours, AdamW fused, ragged, checked", checked, forms["ragged"], grad_norm=1.0)
        add("ours, AdamW, ragged", partial(AdamW, **OFF), forms["ragged"])
        add("ours, AdamW fused, DTensor", fused, forms["DTensor"])
        add("ours, AdamW fused, plain", fused, forms["plain"])
        for kind in ("fused", "foreach"):
            for form in ("ragged", "DTensor", "plain"):
                torch_adamw = partial(torch.optim.AdamW, fused=kind == "fused", foreach=kind == "foreach")
                add(f"torch, AdamW {kind}, {form}", torch_adamw, forms[form])
        flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for _, p in forms["plain"]]))
        flat.grad = torch.randn_like(flat)
        add(FLAT, partial(torch.optim.AdamW, fused=True), [("flat", flat)])
        for block in (Elements(256), Tile(32, 32)):
            kept.append(sharded(mesh, AdamW8bit.block_policy(block=block)))
            make = partial(AdamW8bit, block=block, **OFF)
            add(f"ours, AdamW8bit {block}, ragged", make, kept[-1]["ragged"])
        if importlib.util.find_spec("torchao") is not None:
            from torchao.optim import AdamW8bit as TorchAO

            add("torchao, AdamW8bit, plain", lambda named: TorchAO([p for _, p in named]), forms["plain"])
        return medians_ms(interleave(steps, rounds, before={new: partial(renew, params)}, shuffled=True))


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    times = measure_steps(options_of(parser, arguments, rounds=25).rounds)
    rows = [[name, f"{ms:.3f}", f"{ms / times[FLAT]:.2f}"] for name, ms in times.items()]
    print(table(["optimizer and parameters", "ms", "of one flat tensor's"], rows))
    return 0


# -- one_device: plain tensors, no process group -----------------------------------------------------------------------

WIDTHS = {"Muon": (64, 172), "AdamW8bit": (256, 688)}


def matrices(dim: int, inner: int) -> list[tuple[int, ...]]:
    """Shapes of the matrices of two layers: query, key, value and output; gate, up and down."""
    return [*[(dim, dim)] * 4, *[(inner, dim)] * 2, (dim, inner)] * 2


def plain_parameters(kind: str) -> list[Any]:
    """The tensors that an optimizer is measured on, with gradients: two layers, for 8-bit AdamW also the embedding.

    Muon's have 0.1M parameters, since bf16 products are slow on a CPU without bf16 units; AdamW's 1.8M.
    """
    dim, inner = WIDTHS[kind]
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in [*matrices(dim, inner), *([] if kind == "Muon" else [(512, dim), *[(dim,)] * 3])]:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator))
        param.grad = torch.randn(shape, generator=generator)
        params.append(param)
    return params


def measure_plain(rounds: int) -> list[list[str]]:
    """Rows of the table: medians in milliseconds, ratio to the peer within a turn, and the ratio's quartiles."""
    from block_optim import AdamW8bit, Muon

    torch.set_num_threads(1)
    kinds: dict[str, tuple[Any, Any]] = {"Muon": (torch.optim.Muon, Muon)}
    try:
        from torchao.optim import AdamW8bit as TorchAO
    except ImportError as error:
        print(f"torchao left out: {error}")
    else:
        kinds["AdamW8bit"] = (partial(TorchAO, block_size=256), AdamW8bit)
    rows = []
    for kind, (peer, own) in kinds.items():
        makers = {"torch.optim.Muon" if kind == "Muon" else "torchao's": peer}
        makers |= {"ours": partial(own, **OFF), "ours, checked": own}
        steps = {name: make(plain_parameters(kind), lr=1e-3).step for name, make in makers.items()}
        times = interleave(steps, rounds, shuffled=True)
        for name, taken in times.items():
            pairs = zip(taken, next(iter(times.values())), strict=True)
            low, middle, high = statistics.quantiles((own / other for own, other in pairs), n=4)
            median = medians_ms(times)[name]
            rows.append([kind, name, f"{median:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    return rows


def main_one_device(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table and save it; the file says if the machine was too busy."""
    rounds = options_of(parser, arguments, rounds=25).rounds
    busy, calibration = measure.busy_share(), [measure.calibrate() for _ in range(4)]
    text = "Thread CPU milliseconds, medians; the ratio to the first system is taken within a turn."
    header = "optimizer; system; ms; ratio; quartiles"
    tables = [table_of("A step on plain tensors, one process", text, header, measure_plain(rounds))]
    return save_tables("one_device", tables, noise=measure.verdict(busy, calibration, []))


# -- meshes: needs torchao ---------------------------------------------------------------------------------------------

SHAPE = (64, 96)
MESHES = ((2, 1), (1, 2))


def states_on(request: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Dtype of each optimizer's first moment and the weight after two equal gradients, on torch's `fully_shard`."""
    from torch.distributed.fsdp import fully_shard
    from torchao.optim import AdamW8bit as TorchAO

    from block_optim import AdamW8bit

    result: dict[str, tuple[str, Any]] = {}
    for name, kind in (("torchao", TorchAO), ("block-optim", AdamW8bit)):
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        mesh = init_device_mesh("cpu", request["mesh"], mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        optimizer = kind(list(model.named_parameters()) if kind is AdamW8bit else model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            full = torch.randn(SHAPE, generator=generator)
            local = full.chunk(request["mesh"][1])[mesh.get_local_rank("shard")].clone()
            placed = DTensor.from_local(local, mesh, model.weight.placements, run_check=False)
            model.weight.grad = placed
            optimizer.step()
        moment = optimizer.state[model.weight]["exp_avg"]
        local = getattr(moment, "_local_tensor", moment)
        codes = getattr(local, "codes", local)
        result[name] = str(codes.dtype).removeprefix("torch."), model.weight.full_tensor().detach()
    return result


def main_meshes(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table and save it."""
    parser.parse_args(arguments)
    first, second = (launch(states_on, 2, {"mesh": mesh}) for mesh in MESHES)
    rows = []
    for name, (dtype, weight) in first.items():
        other, twin = second[name]
        rows.append([name, dtype, other, f"{(weight - twin).abs().max().item():.1e}"])
    text = "States of torchao's AdamW8bit and of ours on torch's fully_shard, and the largest difference between the"
    text += " weights of the two meshes after two steps."
    header = "optimizer; states on mesh (2, 1); on mesh (1, 2); weights differ by"
    title = "8-bit AdamW on meshes that replicate and that cut"
    return save_tables("meshes", [table_of(title, text, header, rows, exact=True)])


# -- shampoo: a small Llama in one process, 1.8M parameters ------------------------------------------------------------

SHAMPOOS: dict[str, dict[str, Any]] = {
    "shampoo": {"kind": "Shampoo"},
    "shampoo newton": {"kind": "Shampoo", "root_method": "newton"},
    "kl": {"kind": "Shampoo", "kl": True},
    "soap": {"kind": "SOAP"},
}
DIM, VOCAB, BLOCK, EVERY, STEPS = 256, 512, 128, 10, 50
SHAPES = [(VOCAB, DIM), *matrices(DIM, 688), *[(DIM,)] * 5, (VOCAB, DIM)]
PARAMETERS = sum(map(math.prod, SHAPES))


def build(system: str, stagger: bool = True, params: list[Any] | None = None) -> Any:
    """An optimizer of the model's shapes, blocks up to 128, roots or bases every 10 steps."""
    import block_optim

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = dict(SHAMPOOS[system])
    if params is None:
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    kind = getattr(block_optim, options.pop("kind"))
    return kind(
        params, max_preconditioner_dim=BLOCK, precondition_frequency=EVERY, stagger=stagger, **options
    )


def set_gradients(params: list[Any], generator: Any) -> None:
    """Gradients like those of a small batch: of rank 64, with noise."""
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
        if param.dim() == 2:
            left = torch.randn(param.shape[0], 64, generator=generator)
            right = torch.randn(64, param.shape[1], generator=generator)
            param.grad = left @ right / 8 + 0.1 * param.grad


def profiles(system: str) -> dict[bool, tuple[float, float]]:
    """Median and largest milliseconds of steps 11 to 50, staggered (True) and with all refreshes together."""
    steps, before = {}, {}
    for stagger in (True, False):
        optimizer = build(system, stagger)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        before[stagger] = partial(set_gradients, params, torch.Generator().manual_seed(0))
        steps[stagger] = optimizer.step
    times = interleave(steps, STEPS - EVERY, warm_up=EVERY, before=before)
    return {stagger: (1e3 * statistics.median(taken), 1e3 * max(taken)) for stagger, taken in times.items()}


def state_bytes(system: str) -> float:
    """Bytes of state per parameter, counted."""
    return sum(build(system).state_bytes().values()) / PARAMETERS


def formula(system: str) -> float:
    """The same by the README's formula: m x n blocks, packed factors; vectors have moments only."""
    total = 4 * len(SHAPES)
    for shape in SHAPES:
        if len(shape) < 2:
            total += 8 * shape[0]
            continue
        rows, cols = ([min(BLOCK, size - i) for i in range(0, size, BLOCK)] for size in shape)
        packed = sum(m * (m + 1) // 2 + n * (n + 1) // 2 for m in rows for n in cols)
        square = sum(m * m + n * n for m in rows for n in cols)
        moments = {"kl": 1}.get(system, 2) * shape[0] * shape[1]
        total += 4 * (moments + (packed + square if system == "soap" else 2 * packed))
    return total / PARAMETERS


def bytes_sent(system: str) -> int:
    """Bytes of a step over 4 ranks with `Shard(0)`, which cuts blocks, from rank 0's plan; 0 by the block policy."""
    logging.getLogger("block_optim").setLevel(logging.ERROR)
    with fake_ranks(4) as mesh:
        params = []
        for shape in SHAPES:
            whole: dict[str, Any] = {
                "shape": torch.Size(shape),
                "stride": (shape[1], 1) if len(shape) == 2 else (1,),
            }
            local = torch.zeros(shape[0] // 4, *shape[1:])
            params.append(torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], **whole)))
        return build(system, params=params).bytes_per_step


def main_shampoo(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    parser.parse_args(arguments)
    rows = []
    for system in SHAMPOOS:
        cells = [f"{value:.0f}" for pair in profiles(system).values() for value in pair]
        figures = (f"{state_bytes(system):.2f}", f"{formula(system):.2f}", f"{bytes_sent(system) / 1e6:.2f}")
        rows.append([system, *cells, *figures])
    header = "; staggered: median ms; largest; together: median ms; largest; bytes a parameter; formula; "
    print(table([*header.split("; ")[:-1], "sent under Shard(0), MB a step"], rows))
    return 0
