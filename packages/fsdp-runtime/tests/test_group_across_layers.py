"""One unit of a module from every layer: how a few awkward tensors share one layout instead of padding each layer's."""

import torch
from runtime_helpers import loss_of, seeded, tokens
from torch import nn

from fsdp_runtime import block_policies, fully_shard
from fsdp_runtime.memory import unit_memory
from ragged_shard.testing import on_ranks, simulated_ranks


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.out(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self, width=8, vocab=12, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) + x
        return self.head(x)


def sharded(**options):
    model = seeded(Layers)
    fully_shard([block.out for block in model.blocks], reshard_after_forward=False, **options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@on_ranks(3)
def test_a_unit_of_a_module_from_every_layer_trains_like_the_plain_model():
    model, plain = sharded(), seeded(Layers)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        loss_of(model, tokens(step)).backward()
        ours.step()
        ours.zero_grad()
        sum(loss_of(plain, tokens(step, rank=rank)) / 3 for rank in range(3)).backward()
        theirs.step()
        theirs.zero_grad()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), two)


def test_its_blocks_share_one_layout_so_that_few_blocks_of_each_layer_do_not_pad():
    with simulated_ranks(4):
        policy = block_policies.rows(4)  # two blocks a layer: six for four ranks
        together = unit_memory(sharded(block_policy=policy).blocks[0].out)
        alone = seeded(Layers)
        each = [unit_memory(fully_shard(block.out, block_policy=policy)) for block in alone.blocks]
        assert (together.parameters, together.padding) == (3 * 8 * 32, 2 * 4 * 32)
        assert sum(unit.padding for unit in each) == 3 * 2 * 4 * 32
