"""Tensors in flat buffers on ranks, as a DBuffer has them, built by hand. Everything here also runs on ranks."""

import itertools
import random
from typing import Any

import torch
from runs import full
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import AdamW, AdamW8bit
from layout_planner import Elements, Tile
from ragged_shard import RaggedDTensor, RaggedShard
from ragged_shard.testing import rank_mesh

# A short last block, a short last tile, stacked matrices, tensors below the 8-bit limit, 1-D, 0-d, an embedding.
SHAPES = {
    "embed.weight": (40, 16),
    "first": (50, 40),
    "norm": (37,),
    "second": (96, 40),
    "scalar": (),
    "experts": (3, 20, 24),
    "tail": (29, 32),
    "one": (1, 40),
}
LEAST = 512
STEPS = 3
EIGHT_BIT = {"first", "second", "experts", "tail"}
GAP_FILL = 7.25


def full_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def full_gradients(step):
    """Columns and rows of very different size, so that blocks matter."""
    generator = torch.Generator().manual_seed(100 + step)
    found = {}
    for name, shape in SHAPES.items():
        grad = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            grad = grad * torch.logspace(-2, 1, shape[-1]) * torch.logspace(1, -2, shape[-2])[:, None]
        found[name] = grad
    return found


def cut_points(shape, block):
    """Where a tensor of this shape may be cut, in elements; every point where there is no block."""
    numel = torch.Size(shape).numel()
    if block is None:
        return list(range(numel + 1))
    if isinstance(block, Elements):
        return [*range(0, numel, block.count), numel]
    rows, columns = shape[-2:]
    starts = [m * rows + r for m in range(numel // (rows * columns)) for r in range(0, rows, block.rows)]
    return [*(row * columns for row in starts), numel]


def ragged_flat(tensors, mesh, cuts, block=None, gap=3):
    """RaggedDTensors over views of one flat buffer, cut at random places that `block` allows; ranks may be empty."""
    draw = random.Random(cuts)
    ranks, rank = mesh.size(), mesh.get_rank()
    dtype = next(iter(tensors.values())).dtype
    buffer = torch.full((sum(t.numel() + gap for t in tensors.values()),), GAP_FILL, dtype=dtype)
    found, offset = {}, 0
    for name, tensor in tensors.items():
        points = cut_points(tensor.shape, block if name in EIGHT_BIT else None)
        ends = [0, *sorted(draw.choice(points) for _ in range(ranks - 1)), tensor.numel()]
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        dims = tuple(range(tensor.ndim))
        local = buffer[offset : offset + lengths[rank]]
        local.copy_(tensor.reshape(-1)[ends[rank] : ends[rank + 1]])
        if tensor.ndim == 0:
            lengths = [int(n > 0) for n in lengths]
        found[name] = RaggedDTensor.from_local(local, mesh, [RaggedShard(dims, lengths)], shape=tensor.shape)
        offset += local.numel() + gap
    return found, buffer


def by_rows(tensors, mesh, block):
    """FSDP2's layout where it keeps blocks whole, Replicate elsewhere."""
    found = {}
    for name, tensor in tensors.items():
        chunk = -(-tensor.shape[0] // mesh.size()) * (tensor.numel() // tensor.shape[0]) if tensor.ndim else 0
        allowed = set(cut_points(tensor.shape, block if name in EIGHT_BIT else None))
        fits = tensor.ndim and all(min(r * chunk, tensor.numel()) in allowed for r in range(mesh.size()))
        found[name] = torch_distribute(tensor.clone(), mesh, [Shard(0) if fits else Replicate()])
    return found


def make_optimizer(kind, params, **options):
    named = list(params.items())
    split: list[dict[str, Any]] = [
        {
            "params": [p for p in named if p[0] in ("norm", "second", "scalar")],
            "weight_decay": 0.0,
            "lr": 3e-3,
        },
        {"params": [p for p in named if p[0] not in ("norm", "second", "scalar")]},
    ]
    if kind.startswith("AdamW8bit"):
        return AdamW8bit(split, lr=1e-2, min_8bit_numel=LEAST, block=BLOCKS[kind], **options)
    return AdamW(split, lr=1e-2, fused=kind == "AdamW fused", **options)


BLOCKS: dict[str, Elements | Tile] = {"AdamW8bit elements": Elements(64), "AdamW8bit tile": Tile(8, 16)}
KINDS = ["AdamW", "AdamW fused", *BLOCKS]


def train(kind, layout="plain", cuts=0, *, dtype=torch.float32, steps=STEPS, **options):
    """Full parameters and states after some steps in a layout: the same on every rank, or they lie."""
    params = parameters(kind, layout, cuts, dtype)
    optimizer = make_optimizer(kind, params, **options)
    for step in range(steps):
        give_gradients(params, kind, layout, cuts, step, dtype)
        if step == 1:
            params["tail"].grad = None
        optimizer.step()
    return full_state(params, optimizer)


def place(tensors, kind, layout, cuts, dtype):
    """Full tensors in a layout: "plain", "ragged" with random cuts, or "rows" as FSDP2 has them."""
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    if layout == "plain":
        return tensors
    mesh = rank_mesh()
    if layout == "rows":
        return by_rows(tensors, mesh, BLOCKS.get(kind))
    return ragged_flat(tensors, mesh, cuts, BLOCKS.get(kind))[0]


def parameters(kind, layout="plain", cuts=0, dtype=torch.float32):
    placed = place(full_tensors(), kind, layout, cuts, dtype)
    return {name: torch.nn.Parameter(t) for name, t in placed.items()}


def give_gradients(params, kind, layout="plain", cuts=0, step=0, dtype=torch.float32):
    for name, grad in place(full_gradients(step), kind, layout, cuts, dtype).items():
        params[name].grad = grad


def full_state(params, optimizer):
    """Every parameter and state, in full."""
    found = {name: full(p.detach()) for name, p in params.items()}
    for name, p in params.items():
        found |= {f"{name}/{key}": full(value) for key, value in optimizer.state[p].items()}
    return found
