"""Trains a small GPT on text, sharded over all ranks, and writes safetensors; read it from top to bottom.

    torchrun --nproc-per-node 2 examples/train.py --out run                          CPU (gloo) or CUDA (NCCL)
    torchrun --nproc-per-node 3 examples/train.py --out run --steps 80 --resume      continues, at any number of ranks

The text is Python's standard library, and a token is a byte. Tensors in comments: B sequences of this rank, T tokens,
D channels, H heads, C = D / H channels of a head, V = 256 tokens in the vocabulary.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from block_optim import Recipe
from fsdp_runtime import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, save_safetensors

V = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.heads, -1).transpose(1, 2)  # (B, 3 H, T, C)
        q, k, v = heads.chunk(3, dim=1)  # (B, H, T, C) each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, C)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))  # (B, T, D)


class Block(nn.Module):
    """One layer: attention and a feed-forward network, each added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both halves."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())  # (B, T, D)


class GPT(nn.Module):
    """Embeddings of tokens and positions, layers, head."""

    def __init__(self, length: int, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, dim)
        self.positions = nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, V, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each token from those before it; tokens (B, T + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight  # (B, T, D)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> torch.Tensor:
    """Bytes of the standard library's own modules, (N,) uint8; the same on every rank."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def read_batch(text: torch.Tensor, step: int, args: argparse.Namespace) -> torch.Tensor:
    """This rank's part (B, T + 1) of the global batch of a step, which depends on the step alone."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.length, (args.batch,), generator=random)
    own = starts[dist.get_rank() :: dist.get_world_size()]  # (B,)
    return torch.stack([text[start : start + args.length + 1] for start in own.tolist()]).long()


def read_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and exported model")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--batch", type=int, default=12, help="sequences of a step over all ranks")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
    return parser.parse_args()


def main() -> None:
    """Build, shard, resume, train, save, export."""
    args = read_options()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    if args.batch % dist.get_world_size():
        raise SystemExit(f"--batch {args.batch} does not divide by {dist.get_world_size()} ranks")

    # Model. All ranks build the same values, and each keeps its shards.
    torch.manual_seed(0)
    model = GPT(args.length, args.layers, args.dim, args.heads).to(device)

    # The recipe states the optimizer once: matrices to Muon, embeddings to AdamW, the rest to 8-bit AdamW. As a block
    # policy it keeps the 8-bit blocks of a tensor whole; called with the sharded model it returns the optimizer.
    recipe = Recipe(model, lr=args.lr, others="adamw8bit", verbose=False)
    dtype = None if device.type == "cpu" else torch.bfloat16  # parameters and optimizer states stay fp32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=precision, block_policy=recipe)
    fully_shard(model, mp_policy=precision, block_policy=recipe)
    optimizer = recipe(model)

    # Resume: a checkpoint does not depend on the number of ranks that wrote it. DCP writes `.metadata` last.
    first = 0
    if args.resume:
        complete = [int(path.parent.name) for path in args.out.glob("*/.metadata")]
        if not complete:
            raise SystemExit(f"--resume: {args.out} has no complete checkpoint")
        first = max(complete)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=args.out / str(first))
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    text = read_text()
    for step in range(first + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 10)  # warm-up
        loss = model(read_batch(text, step, args).to(device))
        loss.backward()  # gradients become means over ranks
        norm = clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()

        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=args.out / str(step))

    # Export: whole tensors in one file, which safetensors, transformers and inference engines read.
    files = save_safetensors(model, args.out / "export", dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        print("wrote", *files)
    dist.barrier()  # a thread of gloo that drops the last tensor while Python ends would abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
