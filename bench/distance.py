"""8-bit AdamW: how far from fp32 AdamW it ends up, on a small model trained on real text, next to its peers.

python -m bench optimizer_distance        a table after 200 steps; --steps 50 for fewer

A small Llama (0.8M parameters) learns the source of Python's standard library, with the same batches and the
same start for every optimizer. Peers run on CPU where they are installed (pip install --no-deps bitsandbytes torchao):

    parameters   ||p - q|| / ||q - start||, q by torch.optim.AdamW in fp32: the distance as a share of the way
    update       the median over tensors of the same for the first step's update
    held out     loss on text that no optimizer saw
"""

import math
import sys
from typing import Any

from . import store
from .text import standard_library

VOCAB, CONTEXT, BATCH = 128, 64, 16
LR, DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)


def build_model():
    """The same start for every optimizer."""
    from .models import Shape, build

    return build(Shape(dim=128, layers=4, heads=4, inner=344, vocab=VOCAB))


def optimizers():
    """`{name: (named parameters) -> optimizer}`: ours, and the peers that are installed."""
    import torch

    from block_optim import AdamW8bit
    from layout_planner import Tile

    common: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
    found: dict[str, Any] = {
        "torch AdamW, fp32": lambda named: torch.optim.AdamW(list(named), **common),
        "AdamW8bit Elements(256)": lambda named: AdamW8bit(named, **common),
        "AdamW8bit Tile(32, 32)": lambda named: AdamW8bit(named, block=Tile(32, 32), **common),
        "AdamW8bit Tile(128, 128)": lambda named: AdamW8bit(named, block=Tile(128, 128), **common),
    }
    try:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = lambda named: bitsandbytes_optimizer(bitsandbytes, named, common)
    except ImportError as error:
        print(f"bitsandbytes left out: {error}", file=sys.stderr)
    try:
        from torchao.optim import AdamW8bit as TorchAO

        found["torchao AdamW8bit"] = lambda named: TorchAO(groups_of(named), block_size=256, **common)
    except ImportError as error:
        print(f"torchao left out: {error}", file=sys.stderr)
    return found


def groups_of(named):
    """Parameters alone: torchao decides by size, and takes embeddings too."""
    return [p for _, p in named]


def bitsandbytes_optimizer(bitsandbytes, named, common):
    """Embeddings keep fp32 states, as its documentation asks for."""
    named = list(named)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_parameters([p for _, p in named])
    for name, p in named:
        if "embed" in name or p.ndim < 2:
            manager.override_config(p, "optim_bits", 32)
    return bitsandbytes.optim.AdamW8bit([p for _, p in named], **common)


def train(make, steps, data):
    """The parameters after each of a few steps, and the loss on held-out text."""
    import torch

    from fsdp_runtime.train.model import losses_of

    model = build_model()
    optimizer = make(model.named_parameters())
    generator = torch.Generator().manual_seed(1)
    train_part, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]

    def loss_on(part, draw):
        starts = torch.randint(len(part) - CONTEXT - 1, (BATCH,), generator=draw).tolist()
        tokens = torch.stack([part[s : s + CONTEXT + 1] for s in starts])
        return losses_of(model, tokens[:, :-1], tokens[:, 1:])[0]

    first = None
    for step in range(steps):
        loss = loss_on(train_part, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = [p.detach().clone() for p in model.parameters()]
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        held_out_loss = sum(loss_on(held_out, draw).item() for _ in range(20)) / 20
    return first, [p.detach().clone() for p in model.parameters()], held_out_loss


def measure(steps):
    """`{name: (distance, distance of the first update, held-out loss)}`."""
    import torch

    data = standard_library(most=2_000_000).clamp_(max=VOCAB - 1)
    start = [p.detach().clone() for p in build_model().parameters()]
    results, reference = {}, None
    for name, make in optimizers().items():
        first, last, held_out_loss = train(make, steps, data)
        reference = reference or (first, last)
        distance = math.sqrt(
            sum(float((a - b).square().sum()) for a, b in zip(last, reference[1], strict=True))
        )
        way = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(reference[1], start, strict=True)))
        shares = [
            float((a - b).norm() / (b - s).norm()) for a, b, s in zip(first, reference[0], start, strict=True)
        ]
        results[name] = (distance / way, float(torch.tensor(shares).median()), held_out_loss)
    return results


def main(arguments):
    """Print the table."""
    import torch

    parser = store.parser_of("optimizer_distance", __doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)
    rows = [
        [name, f"{apart:.4f}", f"{first:.1e}", f"{held:.4f}"]
        for name, (apart, first, held) in measure(steps).items()
    ]
    print(store.table(["", "parameters", "update", "held out"], rows))
    return 0
