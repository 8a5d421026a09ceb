"""QLoRA of a transformers model: frozen weights kept and gathered as NF4 codes, peft's adapters trained.

    torchrun --nproc-per-node 2 examples/finetune_hf.py --model path/to/Llama --data my.txt --out run
    torchrun --nproc-per-node 2 examples/finetune_hf.py --out run                    a tiny Llama with random weights
    torchrun --nproc-per-node 3 examples/finetune_hf.py --out run --steps 30 --resume

Needs transformers, peft and safetensors. Each rank reads and quantizes its own bytes of the files, so no rank holds the
whole model. `--out` gets the adapters in peft's own format, and the model with the adapters in its weights.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from peft.tuners.lora import LoraLayer
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from fsdp_runtime import QuantizationPolicy, clip_grad_norm_, fully_shard
from fsdp_runtime.checkpoint import Rule, load_safetensors, merged_params, save_safetensors
from fsdp_runtime.quantization import BlockNF4


def main() -> None:
    """Build on meta, shard, load, train the adapters, save them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and adapters")
    parser.add_argument("--model", type=Path, help="folder with config.json, *.safetensors and the tokenizer")
    parser.add_argument("--data", type=Path, default=Path(__file__), help="a text file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % ranks:
        raise SystemExit(f"--batch {args.batch} does not divide by {ranks} ranks")

    text, folder = args.data.read_text(), args.model
    if folder:
        tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    else:  # bytes as tokens
        tokens, folder = torch.tensor(list(text.encode())), args.out / "random"
        if rank == 0 and not folder.exists():
            torch.manual_seed(0)
            tiny = transformers.LlamaConfig(hidden_size=128, intermediate_size=256, num_attention_heads=4)
            tiny.vocab_size, tiny.num_hidden_layers, tiny.num_key_value_heads = 256, 2, 4
            transformers.LlamaForCausalLM(tiny).save_pretrained(folder)
        dist.barrier()

    # Build without memory, add adapters, shard. Frozen matrices of layers become codes; adapters stay fp32.
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config)
        model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0))
    for layer in base.model.layers:
        fully_shard(layer, quantization_policy=QuantizationPolicy(at_rest=BlockNF4(64)))
    fully_shard(base)

    # Fill it: the frozen weights from the files, where they have no `base_layer`; adapters and rotary tables by rule.
    others = [name for name, _ in base.named_buffers() if not name.startswith("model.rotary_emb.")]
    if others:
        raise SystemExit(f"{folder}: initialize the buffers {others} after to_empty, as rotary_emb")
    base.to_empty(device=device)
    base.model.rotary_emb = type(base.model.rotary_emb)(config).to(device)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", init_lora_weights=True)
    wrapped = Rule("{module}.base_layer.{kind}", "{module}.{kind}")
    report = load_safetensors(base, folder, rules=[wrapped], strict=False)
    if wrong := [name for name in (*report.missing, *report.unexpected) if "lora_" not in name]:
        raise SystemExit(f"{folder} does not fit its config.json: {wrong}")

    adapters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), lr=args.lr, weight_decay=0.0)
    first = 0
    if args.resume:  # a checkpoint has the adapters and their optimizer states only
        first = max(int(path.parent.name) for path in args.out.glob("*/.metadata"))
        state: dict[str, Any] = {"adapters": adapters}
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=args.out / str(first))  # adapters are read in place
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    for step in range(first + 1, args.steps + 1):
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(tokens) - args.length, (args.batch,), generator=random)[rank::ranks]
        batch = torch.stack([tokens[start : start + args.length] for start in starts.tolist()]).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip_grad_norm_(adapters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    state = {"adapters": adapters, "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=args.out / str(args.steps))
    whole = {name: param.full_tensor().detach().cpu() for name, param in adapters.items()}  # on every rank
    if rank == 0:
        model.save_pretrained(args.out / "adapter", state_dict=whole)  # loads in plain peft
    save_safetensors(merged_params(model), args.out / "merged")  # loads without peft
    dist.barrier()  # a thread of gloo that drops the last tensor while Python ends would abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
