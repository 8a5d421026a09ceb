"""What the README and the pages next to it show runs as it stands there, on any number of ranks."""

import re
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import llama, seeded, shard

from ragged_shard.dist import gather_from_ranks
from ragged_shard.testing import on_ranks

README = Path(__file__).parent.parent / "README.md"


def page(name):
    """A page's text: the README, or one next to it. Outside the tree the README is what the wheel carries, and
    `./run isolated` copies the pages next to the tests."""
    if name != "README":
        return (README.parent / "docs" / f"{name}.md").read_text()
    return README.read_text() if README.is_file() else metadata.metadata("fsdp-runtime")["Description"]


def run(name, title, **namespace):
    """Run the example of a section, on a rank, with these names; returns all names."""
    section = page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    exec(code, namespace)
    return namespace


def assert_equal_on_ranks(value):
    assert gather_from_ranks(value) == [value] * torch.distributed.get_world_size()


@on_ranks(3)
def test_the_example_runs():
    names = run("README", "In two minutes")
    assert torch.isfinite(names["loss"])
    assert len(list(names["model"].parameters())) == 11


@on_ranks(2)
def test_the_quantized_example_runs():
    block = torch.nn.Linear(256, 384)
    run("quantization", "Quantized on the wire", block=block)
    block(torch.ones(2, 256)).sum().backward()
    grad: Any = block.weight.grad
    assert grad.to_local().isfinite().all()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up: Any = torch.nn.Linear(8, 8)
        self.down: Any = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


@on_ranks(4)
def test_the_examples_of_other_parallelism_run_and_ranks_agree():
    from parallel.experts import apply_expert_parallel

    from fsdp_runtime.train.model import PRESETS, Transformer

    torch.manual_seed(0)
    model: Any = Transformer(replace(PRESETS["tiny-moe"], num_experts=6))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    names = run("parallelism", "Experts", model=model, tokens=tokens, divide_experts=apply_expert_parallel)
    assert names["norm"] > 0
    assert_equal_on_ranks(names["norm"].item())

    model = torch.nn.Sequential(Block(), Block())
    model.blocks = model[:]
    loss = run("parallelism", "Tensor parallelism", model=model, x=torch.ones(2, 8))["loss"].item()
    assert_equal_on_ranks((loss, model[0].down.weight.detach().full_tensor().sum().item()))

    stages = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(2)]
    names = run("parallelism", "Pipelines", stages=stages, x=torch.ones(8, 8), y=torch.zeros(8, 8))
    assert names["norm"] > 0
    assert_equal_on_ranks(names["norm"].item())


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@on_ranks(2)
def test_the_example_with_a_base_of_four_bits_runs():
    model = llama(hidden_size=64, num_hidden_layers=1, num_key_value_heads=4)
    names = run("quantization", "Tensor subclasses", model=model)
    batch = torch.zeros(1, 4, dtype=torch.long)
    names["model"](input_ids=batch, labels=batch).loss.backward()
    names["optimizer"].step()
    assert len(names["optimizer"].param_groups[0]["params"]) == 14


@on_ranks(2)
def test_the_example_of_a_loss_by_tokens_runs():
    rank = torch.distributed.get_rank()
    model = shard(seeded())
    text = torch.arange(10).view(2, 5)
    microbatches = [(text, text.masked_fill(text < 2 + 3 * rank + part, -100)) for part in range(2)]
    optimizer = torch.optim.SGD(model.parameters())
    names = run("loss", "The right way", model=model, microbatches=microbatches, optimizer=optimizer)
    assert names["step"].total == 8 + 7 + 5 + 4
    assert_equal_on_ranks(names["mean"].item())


class Engine:
    """Takes weights by name."""

    def __init__(self):
        self.loaded = {}

    def load_weights(self, pairs):
        self.loaded.update((name, tensor.clone()) for name, tensor in pairs)


@on_ranks(2)
def test_the_example_of_weights_for_an_engine_runs():
    engine = Engine()
    run("WEIGHTS", "Weights for an inference engine", model=shard(seeded()), engine=engine)
    for name, value in seeded().state_dict().items():
        assert engine.loaded[name].equal(value.bfloat16()), name


@on_ranks(2)
def test_the_example_of_shards_for_an_engine_runs():
    published: list[int] = []

    def publish(name, shape, offsets, view):
        published.append(view.numel())

    run("WEIGHTS", "Shards for an inference engine", model=shard(seeded()), publish=publish)
    assert sum(gather_from_ranks(sum(published))) == sum(p.numel() for p in seeded().parameters())


@on_ranks(2)
def test_the_example_of_updates_inside_backward_runs():
    model = run("guide", "Updates inside backward")["model"]
    assert [param.grad for param in model.parameters()] == [None] * 4
