"""block-optim: Shampoo's and SOAP's step over 50 steps with and without staggering, and their memory.

python -m bench shampoo          the figures as tables
python -m bench shampoo peers    distance from pytorch-optimizer's port of SOAP's published code on equal gradients, and
                                 losses beside it and heavyball (pip install --no-deps pytorch-optimizer heavyball)

The tensors of a small Llama (2 layers, width 256; 1.8M parameters) in one process, blocks up to 128, roots or bases
every 10 steps, random gradients of low effective rank.

    step time      thread CPU milliseconds of optimizer.step(), one thread; median and largest of steps 11 to 50, both
                   ways of refreshing taking turns
    memory         bytes of state per parameter, counted, beside the formula
    sent           bytes per step over 4 ranks where FSDP2's Shard(0) cuts the blocks; under the block policy it is 0
"""

import math
import statistics
import time
from typing import Any

from . import store
from .ranks import fake_ranks
from .recorded import recorded_as
from .text import standard_library

SYSTEMS: dict[str, dict[str, Any]] = {
    "shampoo": {"kind": "Shampoo"},
    "shampoo newton": {"kind": "Shampoo", "root_method": "newton"},
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
    times: dict[bool, list[float]] = {True: [], False: []}
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
        blocks = {"soap": packed + square}.get(system, 2 * packed)
        total += 4 * (moments + blocks)
    return (total + 4 * len(shapes())) / parameters()


def sent(system):
    """Bytes per step that 4 ranks send with Shard(0), from the plan of rank 0; nothing runs."""
    import logging

    import torch
    from torch.distributed.tensor import DTensor, Shard

    logging.getLogger("block_optim").setLevel(logging.ERROR)
    with fake_ranks(4) as mesh:
        params = []
        for shape in shapes():
            local = torch.zeros(shape[0] // 4, *shape[1:])
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            whole = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)
            params.append(torch.nn.Parameter(whole))
        return build(system, params=params).bytes_per_step


@recorded_as("shampoo", track_median="ms", track_largest="ms")
class StepProfile:
    """Thread CPU milliseconds of a step, over 50 steps."""

    params = (tuple(SYSTEMS), ("staggered", "together"))
    param_names = ("system", "refresh")
    timeout = 3600

    def setup_cache(self):
        return {
            (system, refresh): steady(times)
            for system in SYSTEMS
            for refresh, times in zip(("staggered", "together"), profiles(system), strict=True)
        }

    def track_median(self, found, system, refresh):
        return found[system, refresh][0]

    def track_largest(self, found, system, refresh):
        return found[system, refresh][1]


@recorded_as("shampoo", track_state="bytes/parameter")
class Memory:
    """Bytes of optimizer state per parameter."""

    params = (tuple(SYSTEMS),)
    param_names = ("system",)

    def track_state(self, system):
        return memory(system)


# ---- next to other implementations


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


def byte_model():
    """A model of the next byte from four: embedding, two linears, a norm and a head; 25,000 parameters."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(256, 32)
            self.up = torch.nn.Linear(128, 64, bias=False)
            self.down = torch.nn.Linear(64, 32, bias=False)
            self.norm = torch.nn.LayerNorm(32)
            self.head = torch.nn.Linear(32, 256, bias=False)
            for weight in (self.embedding.weight, self.head.weight, self.up.weight, self.down.weight):
                torch.nn.init.normal_(weight, std=0.02 if len(weight) == 256 else 0.1)

        def forward(self, tokens):
            x = self.embedding(tokens)
            window = torch.cat([x[:, 3 - i : x.shape[1] - i] for i in range(4)], -1)
            return self.head(self.norm(x[:, 3:] + self.down(torch.relu(self.up(window)))))

    torch.manual_seed(0)
    return Model()


def loss_curve(make, steps=81):
    """Losses of every 20th step on the text of the standard library."""
    import torch

    text = standard_library(files=30)
    generator, model, losses = torch.Generator().manual_seed(1), byte_model(), []
    optimizer = make(list(model.parameters()))
    for _ in range(steps):
        begin = torch.randint(0, len(text) - 70, (8,), generator=generator)
        tokens = torch.stack([text[b : b + 65] for b in begin])
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[::20]


def peers():
    """Print how far the port's run is from ours on the same gradients, and losses of all side by side."""
    import torch

    from block_optim import SOAP, Shampoo

    torch.set_num_threads(1)
    lr = 2e-3
    makers = {
        "torch AdamW": lambda p: torch.optim.AdamW(p, lr=lr),
        "Shampoo": lambda p: Shampoo(p, lr=lr),
        "KL-Shampoo": lambda p: Shampoo(p, lr=lr, kl=True),
        "SOAP": lambda p: SOAP(p, lr=lr),
        "SOAP, diagonal_above=100": lambda p: SOAP(p, lr=lr, diagonal_above=100),
        "SOAP, stagger=False": lambda p: SOAP(p, lr=lr, stagger=False),
    }
    try:
        import pytorch_optimizer

        makers["pytorch-optimizer SOAP"] = lambda p: pytorch_optimizer.SOAP(p, lr=lr)
        for shape in ((32, 32), (64, 64), (48, 32)):
            grads = gradients(shape, 30)
            far = distance(
                run(makers["SOAP, stagger=False"], grads), run(makers["pytorch-optimizer SOAP"], grads)
            )
            print(
                f"SOAP {shape}: distance from the port after 30 steps, over the way gone: {far:.1e}",
                flush=True,
            )
    except ImportError as error:
        print(f"pytorch-optimizer is not there: {error}")
    try:
        import heavyball

        heavyball.utils.compile_mode = None
        makers["heavyball SOAP"] = lambda p: heavyball.SOAP(p, lr=lr)
        makers["heavyball KLShampoo"] = lambda p: heavyball.KLShampoo(p, lr=lr)
    except ImportError as error:
        print(f"heavyball is not there: {error}")
    print(f"{'loss at step':26}" + "".join(f"{step:8}" for step in (1, 21, 41, 61, 81)))
    for name, make in makers.items():
        print(f"{name:26}" + "".join(f"{loss:8.3f}" for loss in loss_curve(make)), flush=True)


def main(arguments):
    """Print the tables."""
    parser = store.parser_of("shampoo", __doc__)
    parser.add_argument("what", nargs="?", choices=["peers"], help="next to other implementations instead")
    if parser.parse_args(arguments).what:
        peers()
        return 0
    rows = []
    for system in SYSTEMS:
        cells = [value for times in profiles(system) for value in steady(times)]
        figures = (f"{memory(system):.2f}", f"{formula(system):.2f}", f"{sent(system) / 1e6:.2f}")
        rows.append([system, *(f"{cell:.0f}" for cell in cells), *figures])
    header = [
        "",
        "staggered: median ms",
        "largest",
        "together: median ms",
        "largest",
        "bytes a parameter",
        "formula",
    ]
    print(store.table([*header, "sent under Shard(0), MB a step"], rows))
    return 0
