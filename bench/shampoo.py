"""block-optim: Shampoo's and SOAP's step over 50 steps with and without staggering, and their memory.

python bench/shampoo.py          the figures as tables
python bench/shampoo.py peers    distance from pytorch-optimizer's port of SOAP's published code on equal gradients, and
                                 losses beside it and heavyball (pip install --no-deps pytorch-optimizer heavyball)

The tensors of a small Llama (2 layers, width 256; 1.8M parameters) in one process, blocks up to 128, roots or bases
every 10 steps, random gradients of low effective rank.

    step time      thread CPU milliseconds of optimizer.step(), one thread; median and largest of steps 11 to 50, both
                   ways of refreshing taking turns
    memory         bytes of state per parameter, counted, beside the formula
    sent           bytes per step over 4 ranks where FSDP2's Shard(0) cuts the blocks; under the block policy it is 0
"""

import os
import statistics
import sys
import time

SYSTEMS = {
    "shampoo": {"kind": "Shampoo"},
    "shampoo newton": {"kind": "Shampoo", "root_method": "newton"},
    "shampoo qr": {"kind": "Shampoo", "root_method": "qr"},
    "kl": {"kind": "Shampoo", "kl": True},
    "soap": {"kind": "SOAP"},
}
DIM, FFN, VOCAB, LAYERS, BLOCK, EVERY, STEPS = 256, 688, 512, 2, 128, 10, 50


def shapes():
    """2 layers of 9 tensors, embedding, norm and head."""
    layer = [(DIM, DIM)] * 4 + [(FFN, DIM)] * 2 + [(DIM, FFN)] + [(DIM,)] * 2
    return [(VOCAB, DIM), *layer * LAYERS, (DIM,), (VOCAB, DIM)]


def build(system, stagger=True, dim=BLOCK, params=None):
    """An optimizer of the model's shapes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    import block_optim

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = dict(SYSTEMS[system])
    if params is None:
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes()]
    kind = getattr(block_optim, options.pop("kind"))
    return kind(params, max_preconditioner_dim=dim, precondition_frequency=EVERY, stagger=stagger, **options)


def set_gradients(optimizer, step):
    """Gradients like those of a small batch: of rank 64, with noise."""
    import torch

    generator = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dim() < 2:
                param.grad = torch.randn(param.shape, generator=generator)
                continue
            left = torch.randn(param.shape[0], 64, generator=generator)
            right = torch.randn(64, param.shape[1], generator=generator)
            param.grad = left @ right / 8 + 0.1 * torch.randn(param.shape, generator=generator)


def profiles(system, steps=STEPS):
    """Thread CPU milliseconds of each step, staggered and together, the two taking turns."""
    optimizers = {True: build(system, True), False: build(system, False)}
    times = {True: [], False: []}
    for step in range(steps):
        for stagger, optimizer in optimizers.items():
            set_gradients(optimizer, step)
            began = time.thread_time()
            optimizer.step()
            times[stagger].append((time.thread_time() - began) * 1e3)
    return times[True], times[False]


def steady(times):
    """Median and largest of the steps after the first round of refreshes."""
    rest = times[EVERY:]
    return statistics.median(rest), max(rest)


def parameters():
    """Elements of the model."""
    import math

    return sum(math.prod(shape) for shape in shapes())


def memory(system, dim=BLOCK):
    """Bytes of state per parameter, counted."""
    return sum(build(system, dim=dim).state_bytes().values()) / parameters()


def formula(system, dim=BLOCK):
    """The same by the README's formula: m x n blocks, packed factors; vectors have moments only."""
    total = 0
    for shape in shapes():
        if len(shape) < 2:
            total += 8 * shape[0]
            continue
        rows = [min(dim, shape[0] - r) for r in range(0, shape[0], dim)]
        cols = [min(dim, shape[1] - c) for c in range(0, shape[1], dim)]
        packed = sum(m * (m + 1) // 2 + n * (n + 1) // 2 for m in rows for n in cols)
        square = sum(m * m + n * n for m in rows for n in cols)
        moments = {"kl": 1}.get(system, 2) * shape[0] * shape[1]
        blocks = {"soap": packed + square, "shampoo qr": 2 * packed + square}.get(system, 2 * packed)
        total += 4 * (moments + blocks)
    return (total + 4 * len(shapes())) / parameters()


def sent(system):
    """Bytes per step that 4 ranks send with Shard(0), from the plan of rank 0; nothing runs."""
    import logging

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    logging.getLogger("block_optim").setLevel(logging.ERROR)
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh, params = init_device_mesh("cpu", (4,)), []
    for shape in shapes():
        local = torch.zeros(shape[0] // 4, *shape[1:])
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        whole = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)
        params.append(torch.nn.Parameter(whole))
    return build(system, params=params).bytes_per_step


class StepProfile:
    """Thread CPU milliseconds of a step, over 50 steps."""

    params = (tuple(SYSTEMS), ("staggered", "together"))
    param_names = ("system", "refresh")
    timeout = 600

    def setup_cache(self):
        return {
            (system, refresh): steady(times)
            for system in SYSTEMS
            for refresh, times in zip(("staggered", "together"), profiles(system), strict=True)
        }

    setup_cache.timeout = 3600

    def track_median(self, found, system, refresh):
        return found[system, refresh][0]

    def track_largest(self, found, system, refresh):
        return found[system, refresh][1]

    track_median.unit = track_largest.unit = "ms"


class Memory:
    """Bytes of optimizer state per parameter."""

    params = (tuple(SYSTEMS),)
    param_names = ("system",)

    def track_state(self, system):
        return memory(system)

    track_state.unit = "bytes/parameter"


# ---- beside other implementations


def gradients(shape, steps, seed=0):
    """Full-rank gradients with eigenvalues apart, so that bases are well defined."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    turns = [torch.linalg.qr(torch.randn(n, n, generator=generator))[0] for n in shape]
    sizes = [torch.logspace(0, -1, n) for n in shape]
    return [
        turns[0] @ (sizes[0][:, None] * torch.randn(shape, generator=generator) * sizes[1]) @ turns[1]
        for _ in range(steps)
    ]


def run(make, grads):
    """Where a parameter ends up, and how far it went."""
    import torch

    param = torch.nn.Parameter(torch.randn(grads[0].shape, generator=torch.Generator().manual_seed(1)))
    begin, optimizer = param.detach().clone(), make([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), float((param.detach() - begin).norm())


def distance(one, other):
    """Of two runs, relative to the way that the first one went, and the cosine of the ways."""
    (a, length), (b, _) = one, other
    return float((a - b).norm()) / length


def loss_curve(make, steps=200):
    """Final loss on a small regression problem with badly scaled inputs."""
    import torch

    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(512, 48, generator=generator) * torch.logspace(0, -1.5, 48)
    target = torch.randn(32, 48, generator=generator)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator) * 0.1) for s in ((64, 48), (32, 64))]
    optimizer, loss = make(params), None
    for _ in range(steps):
        index = torch.randint(0, 512, (128,), generator=generator)
        loss = (
            (torch.tanh(inputs[index] @ params[0].T) @ params[1].T - inputs[index] @ target.T) ** 2
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def peers():
    """Print how far each peer's run is from ours on the same gradients, and losses side by side."""
    import torch

    from block_optim import SOAP, Shampoo

    torch.set_num_threads(1)
    lr = 3e-3
    rows = []
    try:
        from importlib.metadata import version

        import pytorch_optimizer

        def port(params):
            return pytorch_optimizer.SOAP(params, lr=lr, precondition_frequency=5)

        def ours(params):
            return SOAP(params, lr=lr, precondition_frequency=5, stagger=False)

        for shape in ((32, 32), (64, 64), (48, 32)):
            grads = gradients(shape, 30)
            rows.append((f"SOAP {shape}", "pytorch-optimizer", distance(run(ours, grads), run(port, grads))))
        print(f"pytorch-optimizer {version('pytorch-optimizer')}")
        print(f"  loss after 200 steps: SOAP ours {loss_curve(ours):.4f}, port {loss_curve(port):.4f}")
    except ImportError as error:
        print(f"pytorch-optimizer is not there: {error}")
    try:
        import heavyball

        heavyball.utils.compile_mode = None
        for name, mine in (
            ("SOAP", SOAP),
            ("KLShampoo", lambda p, **o: Shampoo(p, kl=True, betas=(0.9, 0.95), **o)),
        ):
            theirs = getattr(heavyball, name)
            a = loss_curve(lambda p, mine=mine: mine(p, lr=1e-2))
            b = loss_curve(lambda p, theirs=theirs: theirs(p, lr=1e-2))
            print(f"heavyball {name}: loss after 200 steps, ours {a:.4f}, heavyball {b:.4f}")
    except ImportError as error:
        print(f"heavyball is not there: {error}")
    adam = loss_curve(lambda p: torch.optim.AdamW(p, lr=1e-2))
    shampoo = loss_curve(lambda p: Shampoo(p, lr=1e-2))
    print(f"torch AdamW {adam:.4f}, Shampoo ours {shampoo:.4f} (same problem, lr 1e-2)")
    for what, who, far in rows:
        print(f"{what:16} beside {who:20} distance / way after 30 steps {far:.1e}")


def main():
    print(f"{'':16}{'staggered':>22}{'together':>22}{'memory':>10}{'formula':>10}{'sent, Shard(0)':>16}")
    print(
        f"{'':16}{'median':>12}{'largest':>10}{'median':>12}{'largest':>10}{'B/param':>10}{'B/param':>10}{'MB/step':>16}"
    )
    for system in SYSTEMS:
        cells = [value for times in profiles(system) for value in steady(times)]
        print(
            f"{system:16}{cells[0]:12.0f}{cells[1]:10.0f}{cells[2]:12.0f}{cells[3]:10.0f}"
            f"{memory(system):10.2f}{formula(system):10.2f}{sent(system) / 1e6:16.2f}",
            flush=True,
        )


if __name__ == "__main__":
    peers() if sys.argv[1:] == ["peers"] else main()
