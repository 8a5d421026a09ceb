"""block-optim's Muon: a step next to one full_tensor() a matrix and to torch.optim.Muon, and plans of large models.

python -m bench muon        the same figures as tables; --ranks 4 for more ranks

Steps: the 28 matrices of four Llama-style layers (3.2M parameters) on real gloo ranks of one thread each. All systems
alternate in the same processes and are given the same gradients; their parameters agree to the bit afterwards.

    owners, ragged     Muon on ragged parameters as a planner lays them out: contiguous, cut anywhere between rows
    owners, Shard(0)   Muon on DTensors cut in even rows, as FSDP2 has them
    owners, whole      Muon where each matrix lies whole on one rank: nothing travels
    full_tensor        as it is written by hand: each rank gathers every update (in bf16) and orthogonalises all of it
    torch, plain       torch.optim.Muon on unsharded copies: no communication, all of the work on every rank

Newton-Schulz: FLOP per second of `block_optim.orthogonalize`, as a share of what one large product of the same dtype
reaches on the same device (a GPU where there is one, else one CPU core); 1 is all that the device can do.

Plans: `Muon.assignment` of rank 0 of that many on a fake process group, the same on any machine. Per step and rank: GiB
received by one full_tensor() a matrix and by ours, TFLOP of the most loaded rank, and its ratio to the mean, for
longest-first owners and for owners by turns.
"""

import statistics
import time

from ..common import store
from ..common.history import recorded_as
from ..common.ranks import fake_ranks, launch

DIM, FFN, LAYERS = 256, 688, 4
SYSTEMS = ("owners, ragged", "owners, Shard(0)", "owners, whole", "full_tensor", "torch, plain")
MODELS = {  # (layers, matrices of a layer)
    "llama-3-8b": (32, [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]),
    "llama-3-70b": (80, [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]),
}


def shapes():
    """Four layers: query, key, value and output; gate, up and down."""
    return ([(DIM, DIM)] * 4 + [(FFN, DIM)] * 2 + [(DIM, FFN)]) * LAYERS


def layouts(system, mesh):
    """One placement for each matrix, as a system has them; None for plain tensors."""
    import itertools

    from torch.distributed.tensor import Shard

    from ragged_shard import RaggedShard

    world = mesh.size()
    if system == "owners, whole":
        ranks = itertools.cycle(range(world))
        return [
            RaggedShard((0,), tuple(int(r == rank) for r in range(world)))
            for _, rank in zip(shapes(), ranks, strict=False)
        ]
    if system != "owners, ragged":
        return [None if system == "torch, plain" else Shard(0) for _ in shapes()]
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

    params = []
    for weight, grad, placement in zip(weights, grads, layouts(system, mesh), strict=True):
        param = torch.nn.Parameter(put(weight, placement))
        param.grad = put(grad, placement)
        params.append(param)
    kind = {"full_tensor": AllGatherMuon, "torch, plain": torch.optim.Muon}.get(system, Muon)
    options = {"bucket_bytes": 1 << 20} if kind is Muon else {}
    return params, kind(params, lr=lr, **options)


def run(request):
    """On a rank: medians of wall and CPU milliseconds, bytes sent, collectives, FLOPs; the most of any rank.

    All systems end with the same bits.
    """
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
    for turn in range(request["rounds"] + 2):
        for system, (_, optimizer) in built.items():
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            optimizer.step()
            if turn >= 2:
                wall[system].append((time.perf_counter() - began[0]) * 1e3)
                cpu[system].append((time.process_time() - began[1]) * 1e3)
    exact, first = {}, None
    everything = sum(flops_of(rows, columns, torch.device("cpu"), "standard") for rows, columns in shapes())
    for system, (params, optimizer) in built.items():
        with record_collectives() as record:
            optimizer.step()
        domains = getattr(optimizer, "assignment", None)
        flops = max(domains.domains[0].loads) if domains else everything
        exact[system] = [record.bytes_sent, len(record.kinds), flops]
        with torch.no_grad():
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in params]
        first = first or full
        assert all(torch.equal(a, b) for a, b in zip(full, first, strict=True)), f"{system} ends elsewhere"
    medians = [[statistics.median(wall[s]), statistics.median(cpu[s]), *exact[s]] for s in SYSTEMS]
    most = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(SYSTEMS, most.tolist(), strict=True))


def on_ranks(world_size, rounds=8):
    """The slowest rank's figures of each system."""
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
    """What a plan says: GiB received a rank by full_tensor and by ours, TFLOP, imbalance of ours and of turns."""
    plan = plan_of(model, world_size)
    everything = sum(m.nbytes for m in plan.matrices) * (world_size - 1) / world_size
    turns = [0] * world_size
    for i, m in enumerate(plan.matrices):
        turns[i % world_size] += m.flops
    return {
        "all_gather_gib": everything / 2**30,
        "owners_gib": plan.bytes_moved / world_size / 2**30,
        "tflop": max(plan.loads) / 1e12,
        "imbalance": plan.imbalance,
        "turns_imbalance": max(turns) * world_size / sum(turns),
    }


def seconds(call, device, rounds=5):
    """The least time of a call, warm; of this thread's on CPU, where others may be running."""
    import torch

    times, clock = [], time.perf_counter if device.type == "cuda" else time.thread_time
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - began)
    return min(times[2:])


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
    large = 8192 if device.type == "cuda" else 768
    limits = {}
    for method, dtype in dtypes.items():
        a = torch.randn(large, large, device=device).to(dtype)
        out = torch.empty_like(a)
        limits[method] = 2 * large**3 / seconds(lambda a=a, out=out: torch.mm(a, a, out=out), device)
    scale = 8 if device.type == "cuda" else 1
    times = []
    for rows, columns, count in ((512, 512, 1), (512, 2048, 1), (128, 128, 16)):
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
        return found[system][0] / found["full_tensor"][0]

    def track_cpu_ratio(self, found, system):
        return found[system][1] / found["full_tensor"][1]

    def track_bytes_sent(self, found, system):
        return found[system][2]


def main(arguments):
    """Print the tables."""
    parser = store.parser_of("muon", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    world_size = parser.parse_args(arguments).ranks
    results = on_ranks(world_size, rounds=15)
    print(f"{world_size} gloo ranks, {len(shapes())} matrices, medians of the slowest rank\n")
    rows = []
    for system, (wall, cpu, sent, collectives, flops) in results.items():
        times = (f"{wall:.1f}", f"{cpu:.1f}", f"{wall / results['full_tensor'][0]:.2f}")
        rows.append([system, *times, f"{sent / 2**20:.2f}", f"{collectives:.0f}", f"{flops / 1e9:.2f}"])
    header = [
        "system",
        "step ms",
        "CPU ms",
        "of full_tensor",
        "sent MiB",
        "collectives",
        "GFLOP, busiest rank",
    ]
    print(store.table(header, rows))
    device, shares = newton_schulz_shares()
    rows = [[*cells, f"{rate:.3f}", f"{share:.2f}"] for *cells, rate, share in shares]
    header = [f"Newton-Schulz on {device}", "method", "dtype", "TFLOP/s", "of limit"]
    print(f"\n{store.table(header, rows)}\n")
    rows = []
    for model in MODELS:
        for ranks in (64, 512, 1024):
            c = counts(model, ranks)
            gib = (f"{c['all_gather_gib']:.2f}", f"{c['owners_gib']:.3f}")
            load = (f"{c['tflop']:.1f}", f"{c['imbalance']:.2f}", f"{c['turns_imbalance']:.2f}")
            rows.append([model, ranks, *gib, *load])
    header = ["model", "ranks", "GiB received a rank, full_tensor", "owners", "most TFLOP"]
    print(store.table([*header, "max / mean load, longest first", "by turns"], rows))
    return 0
