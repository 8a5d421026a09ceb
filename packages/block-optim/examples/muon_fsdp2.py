"""Muon and 8-bit AdamW on torch's own `fully_shard`: torchrun --nproc-per-node 2 muon_fsdp2.py

The only lines that differ from training with torch's AdamW are the import and the optimizer. Prints the loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from block_optim import mixed_optimizer_for

WIDTH, VOCABULARY, STEPS = 64, 256, 30


class Block(nn.Module):  # noqa: D101
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # noqa: D102
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(self.up(nn.functional.rms_norm(x, (WIDTH,))).relu())


def main():
    """Train on the text of this file."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dist.init_process_group()
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    model = nn.Sequential(embedding, *(Block() for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)).to(device)
    for block in model[1:3]:
        fully_shard(block)
    fully_shard(model)
    # Matrices: Muon; the rest: 8-bit AdamW.
    optimizer = mixed_optimizer_for(model, lr=3e-3, others="adamw8bit")

    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()), device=device)
    losses = []
    for step in range(STEPS):
        start = (step * dist.get_world_size() + dist.get_rank()) * 65 % (len(text) - 65)
        tokens = text[start : start + 65][None]
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
