"""What the README and the pages next to it show runs as it stands there, on any number of ranks."""

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import seeded, shard

from ragged_shard.testing import run_ranks

README = Path(__file__).parent.parent / "README.md"
# Where the examples are, in the order in which the tests below take them.
SECTIONS = [
    ("README", "In two minutes"),
    ("WEIGHTS", "Weights for an inference engine"),
    ("quantization", "Quantized on the wire"),
    ("quantization", "Tensor subclasses"),
    ("parallelism", "Experts"),
    ("parallelism", "Tensor parallelism"),
    ("parallelism", "Pipelines"),
    ("guide", "Updates inside backward"),
    ("loss", "The right way"),
]


def page(name):
    """A page's text: the README, or one next to it. Outside the tree the README is what the wheel carries, and
    `./run isolated` copies the pages next to the tests."""
    if name != "README":
        return (README.parent / "docs" / f"{name}.md").read_text()
    return README.read_text() if README.is_file() else metadata.metadata("fsdp-runtime")["Description"]


def examples():
    found = []
    for name, title in SECTIONS:
        section = page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]
        found += re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return found


def run_example(code):
    namespace: dict = {}
    exec(code, namespace)
    assert torch.isfinite(namespace["loss"])
    return [name for name, _ in namespace["model"].named_parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_example_runs(ranks):
    names = run_ranks(ranks, run_example, examples()[0])
    assert all(len(found) == 11 for found in names)


def run_quantized(code):
    block = torch.nn.Linear(256, 384)
    exec(code, {"block": block})
    block(torch.ones(2, 256)).sum().backward()
    return bool(block.weight.grad.to_local().isfinite().all())


def test_the_quantized_example_runs():
    assert all(run_ranks(2, run_quantized, examples()[2]))


def run_experts(code):
    from fsdp_runtime.train.model import PRESETS, Transformer

    torch.manual_seed(0)
    model = Transformer(replace(PRESETS["tiny-moe"], num_experts=6))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    namespace: dict = {"model": model, "tokens": torch.zeros(2, 4, dtype=torch.long)}
    exec(code, namespace)
    return namespace["norm"].item()


def test_the_example_with_experts_runs():
    code = next(code for code in examples() if "apply_expert_parallel" in code)
    first, *others = run_ranks(4, run_experts, code)
    assert first > 0
    assert others == [first] * 3


def run_tensor_parallel(code):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            up: Any = self.up
            down: Any = self.down
            return x + down(up(x).relu())

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(Block(), Block())
    model.blocks = model[:]
    namespace: dict = {"model": model, "x": torch.ones(2, 8)}
    exec(code, namespace)
    return namespace["loss"].item(), model[0].down.weight.detach().full_tensor().sum().item()


def test_the_example_with_tensor_parallelism_runs():
    code = next(code for code in examples() if "parallelize_module" in code)
    first, *others = run_ranks(4, run_tensor_parallel, code)
    assert others == [first] * 3


def run_pipeline(code):
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(2)]
    namespace: dict = {"stages": stages, "x": torch.ones(8, 8), "y": torch.zeros(8, 8)}
    exec(code, namespace)
    return namespace["norm"].item()


def test_the_example_with_a_pipeline_runs():
    first, *others = run_ranks(4, run_pipeline, next(code for code in examples() if "PipelineStage" in code))
    assert first > 0
    assert others == [first] * 3


def run_at_rest(code):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    namespace: dict = {"model": transformers.LlamaForCausalLM(config)}
    exec(code, namespace)
    batch = torch.zeros(1, 4, dtype=torch.long)
    namespace["model"](input_ids=batch, labels=batch).loss.backward()
    namespace["optimizer"].step()
    return len(namespace["optimizer"].param_groups[0]["params"])


def test_the_example_with_a_base_of_four_bits_runs():
    pytest.importorskip("peft", reason="peft is not installed")
    assert run_ranks(2, run_at_rest, examples()[3]) == [14, 14]


def run_token_loss(code):
    rank = torch.distributed.get_rank()
    model = shard(seeded())
    text = torch.arange(10).view(2, 5)
    microbatches = [(text, text.masked_fill(text < 2 + 3 * rank + part, -100)) for part in range(2)]
    namespace: dict = {
        "model": model,
        "microbatches": microbatches,
        "optimizer": torch.optim.SGD(model.parameters()),
    }
    exec(code, namespace)
    return namespace["step"].total, namespace["mean"].item()


def test_the_example_of_a_loss_by_tokens_runs():
    first, second = run_ranks(2, run_token_loss, examples()[-1])
    assert first == second
    assert first[0] == 8 + 7 + 5 + 4


class Engine:
    """Takes weights by name, and has parameters of its own to write into."""

    def __init__(self):
        self.loaded = {}
        self.written = {name: torch.zeros_like(w).bfloat16() for name, w in seeded().state_dict().items()}

    def load_weights(self, pairs):
        self.loaded.update((name, tensor.clone()) for name, tensor in pairs)

    def parameter(self, name):
        return self.written[name]


def run_engine(code):
    model, engine = shard(seeded()), Engine()
    exec(code, {"model": model, "engine": engine})
    values = {name: w.bfloat16() for name, w in seeded().state_dict().items()}
    for name, value in values.items():
        assert engine.loaded[name].equal(value), name
        assert engine.written[name].equal(value), name
    return len(engine.loaded)


def test_the_example_of_weights_for_an_engine_runs():
    assert run_ranks(2, run_engine, examples()[1]) == [len(seeded().state_dict())] * 2


def run_backward(code):
    namespace: dict = {}
    exec(code, namespace)
    return [p.grad for p in namespace["model"].parameters()]


def test_the_example_of_updates_inside_backward_leaves_no_gradients():
    code = next(code for code in examples() if "optimizer_in_backward" in code)
    assert run_ranks(2, run_backward, code) == [[None] * 4] * 2
