"""A small model and a training step that several test modules use. Everything here also runs on ranks."""

import importlib.util
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_runtime import MixedPrecisionPolicy, fully_shard
from ragged_shard.testing import SimulatedDevice, simulated_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
with_examples = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples are not installed")


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class PolicyOf215(MixedPrecisionPolicy):
    """The policy of torch 2.15, on any torch."""

    param_dtype_override_fn: Any = field(default=None, kw_only=True)


class Body(nn.Module):
    """An embedding, blocks and a head: a root with parameters at both ends of its units."""

    def __init__(self, width=8, vocab=12, blocks=3, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks: Any = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, order=None):
        x = self.embed(tokens)
        for index in order or range(len(self.blocks)):
            x = torch.tanh(self.blocks[index](x)) + x
        return self.head(self.norm(x))


class Net(Body):
    """No unit returns a view, and the middle can be left out or broken."""

    fails = False

    def forward(self, tokens, order=None):
        x = self.embed(tokens)
        for index in order or range(len(self.blocks)):
            x = x + torch.tanh(self.blocks[index](x))
            if self.fails:
                raise KeyError("on purpose")
        return self.head(self.norm(x))


def seeded(make=Body, seed=0, **options):
    torch.manual_seed(seed)
    return make(**options)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


class TwoLayers(nn.Module):
    """What tensor parallelism cuts by columns, and what by rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def shard_with_tensor_parallelism(model, mesh, block=None):
    """Cut the two layers over the axis "tp", then shard them over "dp"."""
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"], block_policy=lambda name, param: block)


def llama(seed=0, **sizes):
    """A tiny Llama of transformers."""
    import transformers

    sizes = {
        "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False, **sizes,
    }  # fmt: skip
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def on_meta(make=Body, **options):
    with torch.device("meta"):
        return make(**options)


def tokens(step=0, rows=2, vocab=12, rank=None):
    """This rank's batch."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(vocab, (rows, 5), generator=generator)


def loss_of(model, batch, **options):
    return nn.functional.cross_entropy(model(batch, **options).flatten(0, 1), batch.flatten())


def step_of(model, optimizer, step=0, rank=None, **options):
    """Make one step on this rank's batch, or on the batch of `rank`; returns the loss."""
    loss = loss_of(model, tokens(step, rank=rank), **options)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def of_values(record):
    """The collectives that move parameters and gradients: without the exchange of the parameters that were used."""
    return [event for event in record.events if event.kind != "all_reduce" or event.bytes_sent >= 128]


def plain_backward(model, step=0, ranks=None):
    """Backward of the mean over the batches of all ranks, or of `ranks`, in one process; returns the model."""
    ranks = dist.get_world_size() if ranks is None else ranks
    for rank in range(ranks):
        (loss_of(model, tokens(step, rank=rank)) / ranks).backward()
    return model


def full(tensor):
    """All values of a tensor, detached; collective if it is sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def full_values(model):
    """Full tensors of a state dict, by name."""
    return {name: full(value) for name, value in model.state_dict().items()}


def locals_of(model):
    """Copies of this rank's shards."""
    return [param.to_local().detach().clone() for param in model.parameters()]


def same_bits(one, two):
    """Whether two lists have equal tensors."""
    return all(a.equal(b) for a, b in zip(one, two, strict=True))


def assert_same_values(found, wanted):
    """Two dicts have the same keys and equal tensors."""
    torch.testing.assert_close(dict(found), dict(wanted), rtol=0, atol=0)


def assert_same_gradients(model, plain, scale=1.0, rtol=1e-5, atol=2e-6):
    """Full gradients are those of a plain model times `scale`, and None for the same parameters."""
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            text = f"{name}.grad: {{}}".format
            torch.testing.assert_close(full(param.grad), wanted.grad * scale, rtol=rtol, atol=atol, msg=text)


def assert_same_parameters(model, plain, rtol=1e-5, atol=1e-6, what=""):
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        text, whole = f"{what}{name}: {{}}".format, full(param).to(wanted.device)
        torch.testing.assert_close(whole, wanted.detach(), rtol=rtol, atol=atol, msg=text)


def loss_of_rank(model, step, rank):
    return loss_of(model, tokens(step, rank=rank))


def check_training(make, wrap, loss=loss_of_rank, accumulate=1, **close):
    """Two steps of the model that `wrap` shards end where those of one process with all ranks' batches end."""
    model, plain, ranks = wrap(seeded(make)), seeded(make), dist.get_world_size()
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain))
    for step in range(2):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            loss(model, 10 * step + micro, dist.get_rank()).backward()
            for rank in range(ranks):
                (loss(plain, 10 * step + micro, rank) / ranks).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain, **close)


class BrokenTransport:
    """A transport whose gathers fail, after which something may still read the memory that was sent."""

    name = "broken"
    quiet, under_way = False, False

    def all_gather(self, pairs, label):
        self.sent = [weakref.ref(send.untyped_storage()) for _, send in pairs]
        return self

    def is_completed(self):
        return True

    def wait(self):
        raise RuntimeError("a peer died")


class Ops(TorchDispatchMode):
    """Inside, calls `note(op, args)` for each op."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.note(func, args)
        return func(*args, **(kwargs or {}))


class Watch(torch.autograd.Function):
    """Identity; calls back when its gradient passes."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.act()
        return grad, None


@contextmanager
def device(device="cpu", ranks=4, rank=1):
    with SimulatedDevice(device) as found, simulated_ranks(ranks, rank=rank):
        yield found
    assert found.accesses > 0, "nothing was checked"


def example_script(name):
    """A script of `examples/` as a module: none has more than 60 lines."""
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
