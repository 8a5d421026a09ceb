"""LoRA on a base kept in fp32, and on the same base kept as codes: bytes at rest, bytes sent and the loss.

python -m bench qlora      a table; needs transformers and peft

A small Llama of transformers learns Python (the standard library's source) in fp32. Then peft's LoRA, as it is, tunes
it on English (pydoc's topics) on two gloo ranks, with the same batches for each kind of base.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from ..common import store
from ..common.ranks import launch

KINDS = ("fp32", "nf4", "int8", "fp8")
LENGTH, ROWS = 64, 8  # tokens of a sequence, sequences of a rank
EVALUATED = 32  # sequences that are held out
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _text(which: str) -> Any:
    """Bytes as tokens: "python" for the base, "english" for adapters."""
    import argparse
    import pydoc_data.topics

    import torch

    if which == "english":
        data = "\n".join(pydoc_data.topics.topics.values()).encode()
    else:
        folder = Path(argparse.__file__).parent
        data = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def _batch(text: Any, seed: int, rows: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (rows,), generator=generator)
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def _llama() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def _train_base(path: Path, steps: int) -> None:
    import torch

    model, text = _llama(), _text("python")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        batch = _batch(text, step, 2 * ROWS)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), path)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: for one kind of base, its bytes, the bytes that a step sends, held-out losses and time."""
    import peft
    import torch
    import torch.distributed as dist

    from dbuffer import BlockQuantizedTensor
    from fsdp_runtime import BlockFP8, BlockInt8, BlockNF4, QuantizationPolicy, fully_shard, unit_memory

    formats: dict[str, Any] = {"nf4": BlockNF4(64), "int8": BlockInt8(256), "fp8": BlockFP8((128, 128))}
    base = _llama()
    base.load_state_dict(torch.load(request["path"]))
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS)))
    fmt = formats.get(request["kind"])
    layers = list(base.model.layers)
    for layer in layers:
        fully_shard(layer, quantize=QuantizationPolicy(at_rest=fmt) if fmt else None)
    fully_shard(model)
    elements = nbytes = 0
    for name, param in model.named_parameters():
        if "base_layer" in name:
            sharded: Any = param
            local = sharded.local
            elements += local.numel()
            coded = isinstance(local, BlockQuantizedTensor)
            nbytes += local.codes.nbytes + local.scales.nbytes if coded else local.nbytes
    text, rank, ranks = _text("english"), dist.get_rank(), dist.get_world_size()
    held_out = _batch(text[: len(text) // 10], 0, EVALUATED)
    trained = text[len(text) // 10 :]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses, seconds = [], 0.0
    for step in range(request["steps"] + 1):
        if step in request["at"]:
            with torch.no_grad():
                losses.append(float(model(input_ids=held_out, labels=held_out).loss))
        began = time.perf_counter()
        batch = _batch(trained, ranks * step + rank, ROWS)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - began
    sent = (ranks - 1) * sum(unit_memory(layer).given for layer in layers)
    return {
        "elements": elements,
        "bytes": nbytes,
        "sent": sent,
        "losses": losses,
        "step": seconds / (step + 1),
    }


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = store.parser_of("qlora", __doc__)
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    at = sorted({round(options.steps * share) for share in (0, 0.05, 0.2, 0.5, 1)})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.pt"
        _train_base(path, options.base_steps)
        for kind in KINDS:
            found = launch(run, 2, {"kind": kind, "path": str(path), "steps": options.steps, "at": at})
            per_element = found["bytes"] / found["elements"]
            rows.append(
                [
                    kind, f"{per_element:.4f}", f"{found['bytes'] / 1024:.0f}", f"{found['sent'] / 1024:.0f}",
                    *(f"{loss:.4f}" for loss in found["losses"]), f"{1e3 * found['step']:.0f}",
                ]
            )  # fmt: skip
    heads = ["base", "bytes/element", "base KiB on rank 0", "KiB a gather of all layers sends"]
    print(store.table([*heads, *(f"loss at {step}" for step in at), "ms/step"], rows))
    return 0
