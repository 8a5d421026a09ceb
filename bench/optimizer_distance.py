"""8-bit AdamW: how far from fp32 AdamW it ends up, on a small model trained on real text, beside its peers.

python bench/optimizer_distance.py        a table after 200 steps; STEPS=50 for fewer

A character transformer (0.8M parameters) learns the source of Python's standard library, with the same batches and the
same start for every optimizer. Peers run on CPU where they are installed (pip install --no-deps bitsandbytes torchao):

    parameters   ||p - q|| / ||q - start||, q by torch.optim.AdamW in fp32: the distance as a share of the way
    update       the median over tensors of the same for the first step's update
    held out     loss on text that no optimizer saw
"""

import math
import os
import sys
from pathlib import Path

VOCAB, DIM, HEADS, LAYERS, CONTEXT, BATCH = 128, 128, 4, 4, 64, 16
LR, DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)


def corpus():
    """The standard library's modules, one after another, as bytes below 128."""
    import torch

    folder = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.tensor(list(text[:2_000_000]), dtype=torch.long).clamp_(max=VOCAB - 1)


def build_model():
    """A small causal transformer."""
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

        def forward(self, x):
            heads = [
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
            ]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

        def forward(self, tokens):
            x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Model()


def optimizers():
    """`{name: (named parameters) -> optimizer}`: ours, and the peers that are installed."""
    import torch

    from block_optim import AdamW8bit
    from layout_planner import Elements, Tile

    common = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
    found = {
        "torch AdamW, fp32": lambda named: torch.optim.AdamW(list(named), **common),
        "AdamW8bit Elements(256)": lambda named: AdamW8bit(named, **common),
        "AdamW8bit Tile(32, 32)": lambda named: AdamW8bit(named, block=Tile(32, 32), **common),
        "AdamW8bit Tile(128, 128)": lambda named: AdamW8bit(named, block=Tile(128, 128), **common),
        "AdamW8bit Elements(256), dynamic": lambda named: AdamW8bit(
            named, block=Elements(256), state_map="dynamic", **common
        ),
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
        if "embed" in name or "position" in name or p.ndim < 2:
            manager.override_config(p, "optim_bits", 32)
    return bitsandbytes.optim.AdamW8bit([p for _, p in named], **common)


def train(make, steps, data):
    """The parameters after each of a few steps, and the loss on held-out text."""
    import torch
    from torch.nn import functional as F  # noqa: N812

    model = build_model()
    optimizer = make(model.named_parameters())
    generator = torch.Generator().manual_seed(1)
    train_part, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]

    def loss_on(part, draw):
        starts = torch.randint(len(part) - CONTEXT - 1, (BATCH,), generator=draw).tolist()
        tokens = torch.stack([part[s : s + CONTEXT + 1] for s in starts])
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

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
        held = sum(loss_on(held_out, draw).item() for _ in range(20)) / 20
    return first, [p.detach().clone() for p in model.parameters()], held


def measure(steps):
    """`{name: (distance, distance of the first update, held-out loss)}`."""
    import torch

    data, start = corpus(), [p.detach().clone() for p in build_model().parameters()]
    found, reference = {}, None
    for name, make in optimizers().items():
        first, last, held = train(make, steps, data)
        reference = reference or (first, last)
        apart = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(last, reference[1], strict=True)))
        way = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(reference[1], start, strict=True)))
        shares = [
            float((a - b).norm() / (b - s).norm()) for a, b, s in zip(first, reference[0], start, strict=True)
        ]
        found[name] = (apart / way, float(torch.tensor(shares).median()), held)
    return found


def main():
    """Print the table."""
    import torch

    torch.set_num_threads(1)
    print(f"{'':34} {'parameters':>10} {'update':>9} {'held out':>9}")
    for name, (apart, first, held) in measure(int(os.environ.get("STEPS", "200"))).items():
        print(f"{name:34} {apart:10.4f} {first:9.1e} {held:9.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
