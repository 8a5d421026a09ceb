"""block-optim's Muon: a step next to an all-gather Muon and to torch.optim.Muon, and what plans for large models say.

python bench/muon.py        the same figures as tables; RANKS=4 for more ranks

Steps: the 28 matrices of four Llama-style layers (3.2M parameters) on real gloo ranks of one thread each. All systems
alternate in the same processes and are given the same gradients; their parameters agree to the bit afterwards.

    owners, ragged     Muon on ragged parameters as a planner lays them out: contiguous, cut anywhere between rows
    owners, Shard(0)   Muon on DTensors cut in even rows, as FSDP2 has them
    owners, whole      Muon where each matrix lies whole on one rank: nothing travels
    all-gather         each rank gathers every update and orthogonalises all of it (bf16 payload, torch's Newton-Schulz)
    torch, plain       torch.optim.Muon on unsharded copies: no communication, all of the work on every rank

Newton-Schulz: FLOP per second of one matrix, as a share of what one large product of the same dtype reaches on the same
device (a GPU where there is one, else one CPU core); 1 is all that the device can do.

Plans: pure arithmetic, the same on any machine. Per step and rank: GiB received by an all-gather Muon and by ours,
TFLOP of the most loaded rank, and its ratio to the mean, for longest-first owners and for owners by turns.
"""

import os
import statistics
import time

DIM, FFN, LAYERS = 256, 688, 4
SYSTEMS = ("owners, ragged", "owners, Shard(0)", "owners, whole", "all-gather", "torch, plain")
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
    kind = {"all-gather": AllGatherMuon, "torch, plain": torch.optim.Muon}.get(system, Muon)
    options = {"bucket_bytes": 1 << 20} if kind is Muon else {}
    return params, kind(params, lr=lr, **options)


def measure(systems, rounds):
    """On a rank: medians of wall and CPU milliseconds, bytes sent, and whether all systems end alike."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ragged_shard.testing import record_collectives

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    weights, grads = ([torch.randn(s, generator=generator) for s in shapes()] for _ in range(2))
    built = {system: build(system, mesh, weights, grads) for system in systems}
    wall, cpu = ({system: [] for system in systems} for _ in range(2))
    for turn in range(rounds + 2):
        for system, (_, optimizer) in built.items():
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            optimizer.step()
            if turn >= 2:
                wall[system].append((time.perf_counter() - began[0]) * 1e3)
                cpu[system].append((time.process_time() - began[1]) * 1e3)
    sent, first = {}, None
    for system, (params, optimizer) in built.items():
        with record_collectives() as record:
            optimizer.step()
        sent[system] = record.bytes_sent
        with torch.no_grad():
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in params]
        first = first or full
        assert all(torch.equal(a, b) for a, b in zip(full, first, strict=True)), f"{system} ends elsewhere"
    return {
        system: (statistics.median(wall[system]), statistics.median(cpu[system]), sent[system])
        for system in systems
    }


def on_ranks(world_size, systems=SYSTEMS, rounds=8):
    """The slowest rank's figures of each system."""
    from ragged_shard.testing import run_ranks

    results = run_ranks(world_size, measure, systems, rounds, timeout=600.0)
    return {system: tuple(max(r[system][i] for r in results) for i in range(3)) for system in systems}


def plan_of(model, world_size):
    """Muon's plan for a model whose matrices are cut in even rows over so many ranks."""
    import torch

    from block_optim.core.holding import Holding
    from block_optim.muon.assignment import AssignedMatrix, assign_domain
    from block_optim.muon.coefficients import resolve
    from block_optim.muon.matrices import holders, matrices_of
    from block_optim.muon.newton_schulz import Recipe

    recipe, (layers, matrices), planned = Recipe(resolve("keller")), MODELS[model], []
    for i, (rows, columns) in enumerate(matrices * layers):
        step = -(-rows // world_size)
        cuts = tuple(min(rows, step * rank) * columns for rank in range(world_size + 1))
        held = Holding(None, None, 0, cuts)
        (matrix,) = matrices_of("matrix", (rows, columns), "auto")
        flops = recipe.flops(rows, columns, torch.device("cpu"))
        planned.append(AssignedMatrix(f"matrix {i}", i, 0, matrix, holders(matrix, held), flops))
    return assign_domain(planned, world_size, 32 << 20)


def counts(model, world_size):
    """What a plan says: GiB received a rank by all-gather and by ours, TFLOP, imbalance of ours and of turns."""
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

    found, clock = [], time.perf_counter if device.type == "cuda" else time.thread_time
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(clock() - began)
    return min(found[2:])


def newton_schulz_shares():
    """(shape, count, method, dtype, TFLOP/s, share of a large product's) for a few shapes."""
    import torch

    from block_optim.core.scratch import Scratch
    from block_optim.muon.coefficients import resolve
    from block_optim.muon.newton_schulz import Recipe, gram_dtype, orthogonalize_

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = 8192 if device.type == "cuda" else 768
    limits = {}
    for dtype in (torch.bfloat16, gram_dtype(device)):
        a = torch.randn(large, large, device=device).to(dtype)
        out = torch.empty_like(a)
        limits[dtype] = 2 * large**3 / seconds(lambda a=a, out=out: torch.mm(a, a, out=out), device)
    scale = 8 if device.type == "cuda" else 1
    found = []
    for rows, columns, count in ((512, 512, 1), (512, 2048, 1), (128, 128, 16)):
        rows, columns = rows * scale, columns * scale
        for method in ("standard", "gram"):
            recipe, scratch = Recipe(resolve("keller"), method=method), Scratch(device)
            if method == "gram" and not recipe.uses_gram(rows, columns, device):
                continue
            stack = torch.randn(count, rows, columns, device=device).bfloat16()
            spent = seconds(lambda s=stack, r=recipe, c=scratch: orthogonalize_(s, r, c), device)
            rate = recipe.flops(rows, columns, device) * count / spent
            dtype = torch.bfloat16 if method == "standard" else gram_dtype(device)
            found.append(
                (f"{count} x {rows}x{columns}", method, str(dtype)[6:], rate / 1e12, rate / limits[dtype])
            )
    return device, found


class NewtonSchulz:
    """Share of the device's matmul limit that Newton-Schulz reaches, by shape and method."""

    timeout = 300

    def setup_cache(self):
        return {f"{shape} {method}": share for shape, method, _, _, share in newton_schulz_shares()[1]}

    def track_least_share(self, found):
        return min(found.values())

    def track_best_share(self, found):
        return max(found.values())

    track_least_share.unit = track_best_share.unit = "of the limit"


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

    track_gib_received.unit = "GiB"
    track_imbalance.unit = "max/mean"


class MuonSteps:
    """A step of each system on two ranks, over the all-gather Muon's in the same run; bytes sent."""

    params = (SYSTEMS,)
    param_names = ("system",)
    timeout = 600

    def setup_cache(self):
        return on_ranks(2)

    setup_cache.timeout = 600

    def track_time_ratio(self, found, system):
        return found[system][0] / found["all-gather"][0]

    def track_cpu_ratio(self, found, system):
        return found[system][1] / found["all-gather"][1]

    def track_bytes_sent(self, found, system):
        return found[system][2]

    track_time_ratio.unit = track_cpu_ratio.unit = "ratio"
    track_bytes_sent.unit = "bytes"


def main():
    world_size = int(os.environ.get("RANKS", "2"))
    found = on_ranks(world_size, rounds=15)
    print(f"{world_size} gloo ranks, {len(shapes())} matrices, medians of the slowest rank")
    print(f"{'':20}{'step ms':>9}{'CPU ms':>9}{'sent MiB':>10}{'over all-gather':>17}")
    for system, (wall, cpu, sent) in found.items():
        ratio = wall / found["all-gather"][0]
        print(f"{system:20}{wall:9.1f}{cpu:9.1f}{sent / 2**20:10.2f}{ratio:17.2f}")
    device, shares = newton_schulz_shares()
    print(
        f"\nNewton-Schulz on {device}{'matrices':>14}{'method':>12}{'dtype':>10}{'TFLOP/s':>10}{'of limit':>10}"
    )
    for shape, method, dtype, rate, share in shares:
        print(f"{shape:>34}{method:>12}{dtype:>10}{rate:10.3f}{share:10.2f}")
    print(f"\n{'':24}{'GiB received a rank':>22}{'most TFLOP':>12}{'max / mean load':>18}")
    print(f"{'model':14}{'ranks':>10}{'all-gather':>12}{'owners':>10}{'':>12}{'longest':>9}{'turns':>9}")
    for model in MODELS:
        for ranks in (64, 128, 512):
            c = counts(model, ranks)
            print(
                f"{model:14}{ranks:>10}{c['all_gather_gib']:12.2f}{c['owners_gib']:10.3f}{c['tflop']:12.1f}"
                f"{c['imbalance']:9.2f}{c['turns_imbalance']:9.2f}"
            )


if __name__ == "__main__":
    main()
