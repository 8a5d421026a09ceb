"""block-optim: time, traffic and precision of optimizer steps.

python -m bench one_device     steps on plain tensors of one process, compared with torch.optim.Muon and torchao
python -m bench meshes         whether the mesh decides the precision of 8-bit states, torchao's and ours
python -m bench muon           Muon's step on torch's fully_shard and one full_tensor() a matrix; plans of large models

Times are milliseconds of `step()`, one thread, medians, all systems taking turns: thread CPU time, and for Muon on
ranks wall and CPU time. The check for non-finite gradients is off unless a row says "checked": torch's have none.
"""

import itertools
import statistics
from argparse import ArgumentParser
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from . import measure
from .measure import fake_ranks, interleave, launch, medians_ms, options_of, record, table_of


def unchecked(kind: Any, *args: Any, **options: Any) -> Any:
    """An optimizer that does not check whether gradients are finite."""
    optimizer = kind(*args, **options)
    optimizer.skip_nonfinite = False
    return optimizer


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
        param = nn.Parameter(torch.randn(shape, generator=generator))
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
        makers |= {"ours": partial(unchecked, own), "ours, checked": own}
        steps = {name: make(plain_parameters(kind), lr=1e-3).step for name, make in makers.items()}
        times = interleave(steps, rounds)
        for name, taken in times.items():
            pairs = zip(taken, next(iter(times.values())), strict=True)
            low, middle, high = statistics.quantiles((own / other for own, other in pairs), n=4)
            median = medians_ms(times)[name]
            rows.append([kind, name, f"{median:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    return rows


def main_one_device(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table and save it; the file says if the machine was too busy."""
    rounds = options_of(parser, arguments, rounds=25).rounds
    noise = measure.noise_now()
    text = "Thread CPU milliseconds, medians; the ratio to the first system is taken within a turn."
    header = "optimizer; system; ms; ratio; quartiles"
    tables = [table_of("A step on plain tensors, one process", text, header, measure_plain(rounds))]
    return record("one_device", tables, noise)


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
    return record("meshes", [table_of(title, text, header, rows, exact=True)])


# -- Muon --------------------------------------------------------------------------------------------------------------

# Steps: the 14 matrices of two Llama-style layers (0.1M parameters) on real gloo ranks of one thread each.
#
#     ours, fully_shard  Muon on the parameters of torch's `fully_shard`, cut in even rows
#     ours, ragged       Muon on ragged parameters as a planner lays them out: contiguous, cut anywhere between rows
#     ours, whole        Muon where each matrix is whole on one rank: nothing travels
#     ours, DDP          Muon on unsharded parameters (`replicate_mesh`): only updates travel
#     full_tensor        as it is written by hand, on `fully_shard`: each rank gathers every update (in bf16) and
#                        orthogonalises all of it
#     torch, plain       torch.optim.Muon in one process, here on every rank: no communication, all of the work
#
# Sent are bytes of the busiest rank to others; FLOPs are Newton-Schulz's of the busiest rank; deviation is the largest
# difference of a weight from torch.optim.Muon's in one process. Matrices are small since a CPU without bf16 units
# multiplies bf16 matrices at about 1 GFLOP/s; the counts are formulas in the shapes, checked by tests.
#
# Simulated ranks: `Muon.assignment` of rank 0 on a fake process group, for matrices of real models cut in even rows.
# Sent are a rank's bytes on average. "By turns" is the imbalance of owners that take turns.

MUON_DIM, FFN, LAYERS = 64, 172, 2
OURS, DIVIDED, FULL, PLAIN = "ours, fully_shard", "ours, DDP", "full_tensor", "torch, plain"
MUONS = (OURS, "ours, ragged", "ours, whole", DIVIDED, FULL, PLAIN)
MUON_SHAPES = matrices(MUON_DIM, FFN)
LLAMAS: dict[str, tuple[int, list[tuple[int, int]]]] = {  # (layers, matrices of a layer)
    "llama-3-8b": (32, [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]),
    "llama-3-70b": (80, [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]),
}


def layouts(system: str, mesh: Any) -> list[Any]:
    """One placement for each matrix; None for plain tensors."""
    from ragged_shard import RaggedShard

    world = mesh.size()
    if system == "ours, whole":
        owners = zip(MUON_SHAPES, itertools.cycle(range(world)), strict=False)
        return [RaggedShard((0,), tuple(int(r == rank) for r in range(world))) for _, rank in owners]
    if system != "ours, ragged":
        return [None if system in (DIVIDED, PLAIN) else Shard(0)] * len(MUON_SHAPES)
    # One buffer of equal parts, all matrices of a layer one after the other, cut between rows as near as it can be.
    placements, layer = [], MUON_SHAPES[:7]
    share, start = -(-sum(rows * columns for rows, columns in layer) // world), 0
    for rows, columns in layer:
        cuts = [min(max(round((rank * share - start) / columns), 0), rows) for rank in range(world + 1)]
        cuts[-1] = rows
        placements.append(RaggedShard((0,), tuple(b - a for a, b in itertools.pairwise(cuts))))
        start += rows * columns
    return placements * LAYERS


class AllGatherMuon:
    """The same update where every rank gathers all updates and orthogonalises each."""

    def __init__(self, params: list[Any], lr: float) -> None:
        self.params, self.lr = params, lr
        self.momenta = [torch.zeros_like(p) for p in params]

    def step(self) -> None:
        from block_optim.muon.newton_schulz import orthogonalize

        with torch.no_grad():
            for p, m in zip(self.params, self.momenta, strict=True):
                m.lerp_(p.grad, 0.05)
                whole = p.grad.lerp(m, 0.95).bfloat16().full_tensor()
                update = orthogonalize(whole).chunk(p.device_mesh.size())[p.device_mesh.get_local_rank()]
                alpha = -self.lr * max(1, whole.size(0) / whole.size(1)) ** 0.5
                p.to_local().mul_(1 - self.lr * 0.1).add_(update, alpha=alpha)


def build_muon(
    system: str, mesh: Any, weights: list[Any], grads: list[Any], lr: float = 0.02
) -> tuple[list[Any], Any]:
    """A system's parameters, with gradients, and its optimizer."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor as torch_distribute

    from block_optim import Muon
    from ragged_shard import distribute_tensor

    def put(value: Any, placement: Any) -> Any:
        if placement is None:
            return value.clone()
        make: Any = torch_distribute if type(placement) is Shard else distribute_tensor
        return make(value.clone(), mesh, [placement])

    placements = layouts(system, mesh)
    if system in (OURS, FULL):
        model: Any = torch.nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
        fully_shard(model, mesh=mesh)
        params = list(model.parameters())
    else:
        params = [nn.Parameter(put(w, where)) for w, where in zip(weights, placements, strict=True)]
    for param, grad, placement in zip(params, grads, placements, strict=True):
        param.grad = put(grad, placement)
    small: Any = type("SmallBuckets", (Muon,), {"bucket_bytes": 1 << 16})
    kind: Any = {FULL: AllGatherMuon, PLAIN: torch.optim.Muon}.get(system, small)
    return params, kind(params, lr=lr, **({"replicate_mesh": mesh} if system == DIVIDED else {}))


def muon_on_rank(request: dict[str, Any]) -> dict[str, list[float]]:
    """Medians of wall and CPU milliseconds, bytes sent, collectives, FLOPs, deviation: the most of any rank."""
    from block_optim.muon.newton_schulz import flops_of, steps_of
    from ragged_shard.testing import record_collectives

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    weights, grads = ([torch.randn(s, generator=generator) for s in MUON_SHAPES] for _ in range(2))
    built = {system: build_muon(system, mesh, weights, grads) for system in MUONS}
    steps = {system: optimizer.step for system, (_, optimizer) in built.items()}
    times = interleave(steps, request["rounds"], warm_up=1, timer=measure.wall_and_cpu)
    exact = {}
    everything = sum(flops_of(rows, columns, steps_of("keller")) for rows, columns in MUON_SHAPES)
    with torch.no_grad():
        for system, (_, optimizer) in built.items():
            with record_collectives() as sent:
                optimizer.step()
            plan = optimizer.assignment.domains[0] if hasattr(optimizer, "assignment") else None
            if system == OURS:  # the formula of the simulated ranks
                assert len(sent.kinds) == collectives_of(plan)
            exact[system] = [sent.bytes_sent, len(sent.kinds), max(plan.loads) if plan else everything]
        alone = [p.detach() for p in built[PLAIN][0]]
        for system, (params, _) in built.items():
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in params]
            exact[system].append(max(float((a - b).abs().max()) for a, b in zip(full, alone, strict=True)))
    medians = [[*map(statistics.median, zip(*times[s], strict=True)), *exact[s]] for s in MUONS]
    most = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(MUONS, most.tolist(), strict=True))


def muon_on_ranks(world_size: int, rounds: int = 5) -> dict[str, list[float]]:
    """The largest figures of any rank, for each system."""
    return launch(muon_on_rank, world_size, {"rounds": rounds}, timeout=600.0)


def muon_tables(results: dict[int, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """The tables of exact plan_counts and of times, of `{ranks: muon_on_ranks(ranks)}`."""
    exact, times = [], []
    for ranks, systems in results.items():
        for system, (wall, cpu, sent, collectives, flops, deviation) in systems.items():
            row = [f"{sent / 2**20:.3f}", f"{collectives:.0f}", f"{flops / 1e9:.3f}", f"{deviation:.1e}"]
            exact.append([str(ranks), system, *row])
            ratio = wall / systems[FULL][0]
            times.append([str(ranks), system, f"{wall:.1f}", f"{cpu:.1f}", f"{ratio:.2f}"])
    text = f"{len(MUON_SHAPES)} matrices of widths {MUON_DIM} and {FFN}; the busiest rank's bytes, collectives and"
    text += " Newton-Schulz work, and a weight's largest difference from torch.optim.Muon's in one process."
    header = "ranks; system; sent MiB; collectives; GFLOP, busiest rank; largest deviation"
    timed = "The same steps, all systems alternating on two cores; medians of the slowest rank."
    time_header = "ranks; system; step ms; CPU ms; of full_tensor"
    return [
        table_of("Muon's step on fully_shard, real ranks", text, header, exact, exact=True),
        table_of("Time of Muon's step, real ranks", timed, time_header, times),
    ]


def plan_of(model: str, world_size: int) -> Any:
    """Muon's plan for a model whose matrices are cut in even rows over these ranks.

    Builds rank 0's part of the parameters, of which nothing is ever written, and one byte of state for each element.
    """
    from block_optim import Muon

    layers, shapes = LLAMAS[model]
    with fake_ranks(world_size) as mesh:
        params = []
        for rows, columns in shapes * layers:
            local = torch.empty(-(-rows // world_size), columns, dtype=torch.bfloat16)
            shape = torch.Size((rows, columns))
            whole = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(columns, 1))
            params.append(nn.Parameter(whole))
        (domain,) = Muon(params).assignment.domains
    return domain


def plan_counts(model: str, world_size: int) -> dict[str, Any]:
    """GiB sent by a rank, collectives and TFLOP of ours and of full_tensor; imbalances."""
    plan = plan_of(model, world_size)
    turns = [sum(m.flops for m in plan.matrices[rank::world_size]) for rank in range(world_size)]
    return {
        "all_gather_gib": sum(m.nbytes for m in plan.matrices) * (world_size - 1) / world_size / 2**30,
        "owners_gib": plan.bytes_moved / world_size / 2**30,
        "collectives": collectives_of(plan),
        "matrices": len(plan.matrices),
        "tflop": max(plan.loads) / 1e12,
        "all_tflop": sum(plan.loads) / 1e12,
        "imbalance": plan.imbalance,
        "turns_imbalance": max(turns) * world_size / sum(turns),
    }


def collectives_of(plan: Any) -> int:
    """Two exchanges for each bucket, and two small all-reduces: are gradients finite, and which are there."""
    return 2 * plan.num_buckets + 2


def plans_table(
    ranks: tuple[int, ...] = (64, 1024), models: tuple[str, ...] = tuple(LLAMAS)
) -> dict[str, Any]:
    """The table of simulated ranks."""
    rows = []
    for model in models:
        for world_size in ranks:
            c, first = plan_counts(model, world_size), [model, str(world_size)]
            load = (f"{c['tflop']:.1f}", f"{c['imbalance']:.2f}", f"{c['turns_imbalance']:.2f}")
            rows.append([*first, OURS, f"{c['owners_gib']:.3f}", str(c["collectives"]), *load])
            load = (f"{c['all_tflop']:.1f}", "1.00", "")
            rows.append([*first, FULL, f"{c['all_gather_gib']:.3f}", str(c["matrices"]), *load])
    text = "From the assignment of owners: matrices of real models, cut in even rows."
    header = (
        "model; ranks; system; sent GiB a rank; collectives; TFLOP, busiest rank; max / mean load; by turns"
    )
    return table_of("Muon's step on fully_shard, simulated ranks", text, header, rows, exact=True)


def main_muon(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the tables and save them. Counts are exact; the file says if the machine was too busy for the times."""
    parser.parse_args(arguments)
    noise = measure.noise_now()
    tables = [*muon_tables({ranks: muon_on_ranks(ranks) for ranks in (2, 4)}), plans_table()]
    return record("muon", tables, noise)
