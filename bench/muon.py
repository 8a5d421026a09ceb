"""block-optim: Muon's step on torch's fully_shard, compared with one full_tensor() a matrix; plans of large models.

python -m bench muon     prints tables and writes bench/results/muon.json; 2 and 4 real ranks, 64 to 1024 simulated

Steps: the 14 matrices of two Llama-style layers (0.1M parameters) on real gloo ranks of one thread each. All systems
alternate in the same processes and get the same gradients.

    ours, fully_shard  Muon on the parameters of torch's `fully_shard`, cut in even rows
    ours, ragged       Muon on ragged parameters as a planner lays them out: contiguous, cut anywhere between rows
    ours, whole        Muon where each matrix is whole on one rank: nothing travels
    ours, DDP          Muon on unsharded parameters (`replicate_mesh`): only updates travel
    full_tensor        as it is written by hand, on `fully_shard`: each rank gathers every update (in bf16) and
                       orthogonalises all of it
    torch, plain       torch.optim.Muon in one process, here on every rank: no communication, all of the work

Sent are bytes of the busiest rank to others; FLOPs are Newton-Schulz's of the busiest rank; deviation is the largest
difference of a weight from torch.optim.Muon's in one process. Matrices are small since a CPU without bf16 units
multiplies bf16 matrices at about 1 GFLOP/s; the counts are formulas in the shapes, checked by tests.

Newton-Schulz: FLOP per second of `block_optim.orthogonalize`, as a share of what one large product of the same dtype
reaches on the same device (a GPU where there is one, else one CPU core); 1 is all that the device can do.

Simulated ranks: `Muon.assignment` of rank 0 of that many on a fake process group, the same on any machine, for
matrices of real models cut in even rows. Sent are a rank's bytes on average; collectives are two for each bucket and
two that agree on gradients, as real ranks confirm. "By turns" is the imbalance of owners that take turns.
"""

import statistics
import time

from . import machine, store
from .ranks import fake_ranks, launch
from .recorded import recorded_as

DIM, FFN, LAYERS = 64, 172, 2
OURS, DIVIDED, FULL, PLAIN = "ours, fully_shard", "ours, DDP", "full_tensor", "torch, plain"
SYSTEMS = (OURS, "ours, ragged", "ours, whole", DIVIDED, FULL, PLAIN)
MODELS = {  # (layers, matrices of a layer)
    "llama-3-8b": (32, [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]),
    "llama-3-70b": (80, [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]),
}


def shapes():
    """Two layers: query, key, value and output; gate, up and down."""
    return ([(DIM, DIM)] * 4 + [(FFN, DIM)] * 2 + [(DIM, FFN)]) * LAYERS


def layouts(system, mesh):
    """One placement for each matrix, as a system has them; None for plain tensors."""
    import itertools

    from torch.distributed.tensor import Shard

    from ragged_shard import RaggedShard

    world = mesh.size()
    if system == "ours, whole":
        ranks = itertools.cycle(range(world))
        return [
            RaggedShard((0,), tuple(int(r == rank) for r in range(world)))
            for _, rank in zip(shapes(), ranks, strict=False)
        ]
    if system != "ours, ragged":
        return [None if system in (DIVIDED, PLAIN) else Shard(0) for _ in shapes()]
    # One buffer of equal parts, all matrices of a layer one after the other, cut between rows as near as it can be.
    found = []
    for layer in range(LAYERS):
        sizes = [rows * columns for rows, columns in shapes()[layer * 7 : layer * 7 + 7]]
        share, start = -(-sum(sizes) // world), 0
        for (rows, columns), size in zip(shapes()[:7], sizes, strict=True):
            cuts = [min(max(round((rank * share - start) / columns), 0), rows) for rank in range(world + 1)]
            cuts[-1] = rows
            found.append(RaggedShard((0,), tuple(b - a for a, b in itertools.pairwise(cuts))))
            start += size
    return found


class AllGatherMuon:
    """The same update where every rank gathers all updates and orthogonalises each."""

    def __init__(self, params, lr):
        import torch

        self.params, self.lr = params, lr
        self.momenta = [torch.zeros_like(p) for p in params]

    def step(self):
        import torch

        from block_optim import orthogonalize

        with torch.no_grad():
            for p, m in zip(self.params, self.momenta, strict=True):
                m.lerp_(p.grad, 0.05)
                whole = p.grad.lerp(m, 0.95).bfloat16().full_tensor()
                update = orthogonalize(whole).chunk(p.device_mesh.size())[p.device_mesh.get_local_rank()]
                alpha = -self.lr * max(1, whole.size(0) / whole.size(1)) ** 0.5
                p.to_local().mul_(1 - self.lr * 0.1).add_(update, alpha=alpha)


def build(system, mesh, weights, grads, lr=0.02):
    """A system's parameters, with gradients, and its optimizer."""
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import distribute_tensor as torch_distribute

    from block_optim import Muon
    from ragged_shard import distribute_tensor

    def put(value, placement):
        if placement is None:
            return value.clone()
        make = torch_distribute if type(placement) is Shard else distribute_tensor
        return make(value.clone(), mesh, [placement])

    on_fsdp2 = fsdp2_params(mesh, weights) if system in (OURS, FULL) else None
    params = []
    for i, placement in enumerate(layouts(system, mesh)):
        param = torch.nn.Parameter(put(weights[i], placement)) if on_fsdp2 is None else on_fsdp2[i]
        param.grad = put(grads[i], placement)
        params.append(param)
    kind = {FULL: AllGatherMuon, PLAIN: torch.optim.Muon}.get(system, Muon)
    options = {"bucket_bytes": 1 << 16} if kind is Muon else {}
    if system == DIVIDED:
        options |= {"replicate_mesh": mesh}
    return params, kind(params, lr=lr, **options)


def fsdp2_params(mesh, weights):
    """Parameters of these values, as torch's `fully_shard` makes them."""
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.ParameterList([torch.nn.Parameter(weight.clone()) for weight in weights])
    fully_shard(model, mesh=mesh)
    return list(model.parameters())


def run(request):
    """Medians of wall and CPU milliseconds, bytes sent, collectives, FLOPs, deviation: the most of any rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ragged_shard.testing import record_collectives

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    weights, grads = ([torch.randn(s, generator=generator) for s in shapes()] for _ in range(2))
    built = {system: build(system, mesh, weights, grads) for system in SYSTEMS}
    wall: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    cpu: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for turn in range(request["rounds"] + 1):
        for system, (_, optimizer) in built.items():
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            optimizer.step()
            if turn:
                wall[system].append((time.perf_counter() - began[0]) * 1e3)
                cpu[system].append((time.process_time() - began[1]) * 1e3)
    exact = {}
    everything = sum(flops_of(rows, columns, torch.device("cpu"), "standard") for rows, columns in shapes())
    with torch.no_grad():
        for system, (_, optimizer) in built.items():
            with record_collectives() as record:
                optimizer.step()
            plan = optimizer.assignment.domains[0] if hasattr(optimizer, "assignment") else None
            flops = max(plan.loads) if plan else everything
            if system == OURS:  # the formula of the simulated ranks
                assert len(record.kinds) == collectives_of(plan)
            exact[system] = [record.bytes_sent, len(record.kinds), flops]
        alone = [p.detach() for p in built[PLAIN][0]]
        for system, (params, _) in built.items():
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in params]
            exact[system].append(max(float((a - b).abs().max()) for a, b in zip(full, alone, strict=True)))
    medians = [[statistics.median(wall[s]), statistics.median(cpu[s]), *exact[s]] for s in SYSTEMS]
    most = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(SYSTEMS, most.tolist(), strict=True))


def on_ranks(world_size, rounds=3):
    """The largest figures of any rank, for each system."""
    return launch(run, world_size, {"rounds": rounds}, timeout=600.0)


def plan_of(model, world_size):
    """Muon's plan for a model whose matrices are cut in even rows over so many ranks.

    What it builds is rank 0's part of the parameters, of which nothing is ever written, and one byte of state for
    each of its elements.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from block_optim import Muon

    layers, matrices = MODELS[model]
    with fake_ranks(world_size) as mesh:
        params = []
        for rows, columns in matrices * layers:
            local = torch.empty(-(-rows // world_size), columns, dtype=torch.bfloat16)
            shape = torch.Size((rows, columns))
            whole = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(columns, 1))
            params.append(torch.nn.Parameter(whole))
        (domain,) = Muon(params, momentum_dtype=torch.bfloat16).assignment.domains
    return domain


def counts(model, world_size):
    """What a plan says: GiB sent a rank, collectives and TFLOP of ours and of full_tensor; imbalances."""
    plan = plan_of(model, world_size)
    everything = sum(m.nbytes for m in plan.matrices) * (world_size - 1) / world_size
    turns = [0] * world_size
    for i, m in enumerate(plan.matrices):
        turns[i % world_size] += m.flops
    return {
        "all_gather_gib": everything / 2**30,
        "owners_gib": plan.bytes_moved / world_size / 2**30,
        "collectives": collectives_of(plan),
        "matrices": len(plan.matrices),
        "tflop": max(plan.loads) / 1e12,
        "all_tflop": sum(plan.loads) / 1e12,
        "imbalance": plan.imbalance,
        "turns_imbalance": max(turns) * world_size / sum(turns),
    }


def collectives_of(plan):
    """Two exchanges for each bucket, and two small all-reduces: are gradients finite, and which are there."""
    return 2 * plan.num_buckets + 2


def seconds(call, device, rounds=5, most=4.0):
    """The least time of a call, warm, of up to `rounds` or `most` seconds; of this thread's on CPU."""
    import torch

    times: list[float] = []
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    while len(times) < 2 or (len(times) < rounds + 2 and sum(times) < most):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - began)
    return min(times[1:])


def flops_of(rows, columns, device, method):
    """Of one matrix, as Muon plans with them."""
    import torch

    from block_optim import Muon

    matrix = torch.nn.Parameter(torch.empty(rows, columns, device=device))
    return Muon([matrix], method=method).assignment.domains[0].matrices[0].flops


def newton_schulz_shares():
    """(shape, method, dtype, TFLOP/s, share of a large product's) for a few shapes."""
    import torch

    from block_optim import orthogonalize

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = {"standard": torch.bfloat16, "gram": torch.float16 if device.type == "cuda" else torch.float32}
    large = 8192 if device.type == "cuda" else 512
    limits = {}
    for method, dtype in dtypes.items():
        a = torch.randn(large, large, device=device).to(dtype)
        out = torch.empty_like(a)
        limits[method] = 2 * large**3 / seconds(lambda a=a, out=out: torch.mm(a, a, out=out), device)
    scale = 16 if device.type == "cuda" else 1
    times = []
    for rows, columns, count in ((256, 256, 1), (256, 1024, 1), (64, 64, 16)):
        rows, columns = rows * scale, columns * scale
        flops = {method: flops_of(rows, columns, device, method) for method in dtypes}
        for method, dtype in dtypes.items():
            if method == "gram" and flops["gram"] == flops["standard"]:
                continue  # it would save nothing, and is not used
            stack = torch.randn(count, rows, columns, device=device).bfloat16()
            spent = seconds(lambda s=stack, m=method: orthogonalize(s, method=m), device)
            rate = flops[method] * count / spent
            shape = f"{count} x {rows}x{columns}"
            times.append((shape, method, str(dtype)[6:], rate / 1e12, rate / limits[method]))
    return device, times


@recorded_as("muon", track_least_share="of the limit", track_best_share="of the limit")
class NewtonSchulz:
    """Share of the device's matmul limit that Newton-Schulz reaches, by shape and method."""

    timeout = 300

    def setup_cache(self):
        return {f"{shape} {method}": share for shape, method, _, _, share in newton_schulz_shares()[1]}

    def track_least_share(self, found):
        return min(found.values())

    def track_best_share(self, found):
        return max(found.values())


@recorded_as("muon", track_gib_received="GiB", track_imbalance="max/mean")
class MuonPlans:
    """What plans for large models say."""

    params = (tuple(MODELS), (64, 128, 512))
    param_names = ("model", "ranks")

    def setup(self, model, world_size):
        self.found = counts(model, world_size)

    def track_gib_received(self, model, world_size):
        return self.found["owners_gib"]

    def track_imbalance(self, model, world_size):
        return self.found["imbalance"]


@recorded_as("muon", track_time_ratio="ratio", track_cpu_ratio="ratio", track_bytes_sent="bytes")
class MuonSteps:
    """A step of each system on two ranks, over the all-gather Muon's in the same run; bytes sent."""

    params = (SYSTEMS,)
    param_names = ("system",)
    timeout = 600

    def setup_cache(self):
        return on_ranks(2)

    def track_time_ratio(self, found, system):
        return found[system][0] / found[FULL][0]

    def track_cpu_ratio(self, found, system):
        return found[system][1] / found[FULL][1]

    def track_bytes_sent(self, found, system):
        return found[system][2]


def steps_tables(results):
    """The tables of exact counts and of times, of `{ranks: on_ranks(ranks)}`."""
    exact, times = [], []
    for ranks, systems in results.items():
        for system, (wall, cpu, sent, collectives, flops, deviation) in systems.items():
            row = [f"{sent / 2**20:.3f}", f"{collectives:.0f}", f"{flops / 1e9:.3f}", f"{deviation:.1e}"]
            exact.append([str(ranks), system, *row])
            ratio = wall / systems[FULL][0]
            times.append([str(ranks), system, f"{wall:.1f}", f"{cpu:.1f}", f"{ratio:.2f}"])
    return [
        {
            "title": "Muon's step on fully_shard, real ranks",
            "text": f"{len(shapes())} matrices of widths {DIM} and {FFN}; the busiest rank's bytes, collectives and"
            " Newton-Schulz work, and the largest difference of a weight from torch.optim.Muon's in one process. dion's"
            " Muon is not in the table, since it is in no package index, nor torchtitan's DistMuon, which needs a CUDA"
            " device for each process.",
            "header": [
                "ranks",
                "system",
                "sent MiB",
                "collectives",
                "GFLOP, busiest rank",
                "largest deviation",
            ],
            "rows": exact,
            "exact": True,
        },
        {
            "title": "Time of Muon's step, real ranks",
            "text": "The same steps, all systems alternating on two cores; medians of the slowest rank.",
            "header": ["ranks", "system", "step ms", "CPU ms", "of full_tensor"],
            "rows": times,
        },
    ]


def plans_table(ranks=(64, 1024), models=tuple(MODELS)):
    """The table of simulated ranks."""
    rows = []
    for model in models:
        for world_size in ranks:
            c = counts(model, world_size)
            first = [model, str(world_size)]
            load = (f"{c['tflop']:.1f}", f"{c['imbalance']:.2f}", f"{c['turns_imbalance']:.2f}")
            rows.append([*first, OURS, f"{c['owners_gib']:.3f}", str(c["collectives"]), *load])
            load = (f"{c['all_tflop']:.1f}", "1.00", "")
            rows.append([*first, FULL, f"{c['all_gather_gib']:.3f}", str(c["matrices"]), *load])
    header = [
        "model",
        "ranks",
        "system",
        "sent GiB a rank",
        "collectives",
        "TFLOP, busiest rank",
        "max / mean load",
        "by turns",
    ]
    return {
        "title": "Muon's step on fully_shard, simulated ranks",
        "text": "From the assignment of owners: matrices of real models, cut in even rows.",
        "header": header,
        "rows": rows,
        "exact": True,
    }


def shares_table():
    """The table of Newton-Schulz's speed."""
    device, shares = newton_schulz_shares()
    return {
        "title": f"Newton-Schulz, {device}",
        "text": "FLOP per second, and as a share of one large product's of the same dtype.",
        "header": ["matrices", "method", "dtype", "TFLOP/s", "of limit"],
        "rows": [[*cells, f"{rate:.4f}", f"{share:.2f}"] for *cells, rate, share in shares],
    }


def all_tables():
    """The tables, each when it is measured."""
    yield from steps_tables({ranks: on_ranks(ranks) for ranks in (2, 4)})
    yield plans_table()
    yield shares_table()


def main(arguments):
    """Print the tables and save them. Counts are exact; the file says if the machine was too busy for the times."""
    store.parser_of("muon", __doc__).parse_args(arguments)
    busy, calibration = machine.busy_share(), [machine.calibrate() for _ in range(4)]
    tables = []
    for table in all_tables():
        store.print_tables([table])
        tables.append(table)
    noise = machine.verdict(busy, calibration, [])
    print(f"written to {store.save('muon', {'tables': tables}, noise=noise)}")
    return 0
