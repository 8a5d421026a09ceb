"""A small model with everything that routing tells apart. Also runs on ranks."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 2 * dim)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)
        self.experts = nn.Parameter(torch.randn(3, dim, dim) / dim)
        self.router = nn.Linear(dim, 1)

    def forward(self, x):
        q, k = self.qkv(self.norm(x)).chunk(2, -1)
        mixed = torch.einsum("bld,edf->blf", q * k.sigmoid(), self.experts)
        return x + self.down(torch.relu(self.up(x + mixed))) * self.router(x).sigmoid()


class Model(nn.Module):
    def __init__(self, dim=8, vocabulary=48, tied=False):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.final = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.to_logits.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.to_logits(self.final(x))


def make_model(seed=0, **options):
    torch.manual_seed(seed)
    return Model(**options)


def full_gradients(model, step):
    """What every world size is given: the plain model's gradients."""
    torch.manual_seed(100 + step)
    tokens = torch.randint(0, 48, (2, 7))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    return loss, torch.autograd.grad(loss, list(model.parameters()))
