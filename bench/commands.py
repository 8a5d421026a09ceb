"""What `python -m bench` can do. Modules are imported when they are asked for."""

import importlib

# command: its module and what it does
COMMANDS = {
    "ablation": ("ablation", "what each idea is worth: the same step without it"),
    "calls": ("calls", "Python calls of our own code, next to FSDP2's"),
    "checkpoint": ("checkpoint", "how long saving and loading takes"),
    "clip": ("clip", "CPU time of clipping: torch's function and ours, next to plain tensors"),
    "compile": ("compile", "graphs and graph breaks of torch.compile, next to FSDP2's"),
    "counts": ("counts", "exact counts of one step: collectives, bytes, calls, live memory"),
    "gpu": ("gpu", "GPU tests and benchmarks, started by gpu.sh"),
    "host": ("host", "CPU time that a runtime adds, with nothing on the wire"),
    "padding": ("padding", "how much each layout rule pads real models, for the report"),
    "report": ("report", "all results as one Markdown page with pictures"),
    "speed": ("speed", "tokens/s, CPU time, step parts and peak memory of all systems"),
    "wrap": ("wrap", "what fully_shard of a large model costs the host, and how it grows"),
    # One package each; they print tables.
    "planner": ("planner", "layout-planner: time to plan real models, and padding"),
    "placement": ("placement", "ragged-shard: what ops on ragged tensors cost the host"),
    "buffer": ("buffer", "dbuffer: what moving a group costs, without the collective itself"),
    "exchange": ("exchange", "dbuffer: large gathers and reductions by each transport"),
    "weights": (
        "weights",
        "fsdp-runtime: loading and writing a model, bytes and memory next to torch",
    ),
    "optimizer": ("optimizers", "block-optim: time of an AdamW step"),
    "optimizer_distance": ("distance", "block-optim: how far 8-bit AdamW ends up from fp32"),
    "meshes": ("meshes", "block-optim: whether the mesh decides the precision of 8-bit states"),
    "one_device": (
        "one_device",
        "block-optim: steps on plain tensors, next to torch's and torchao's",
    ),
    "steps": ("steps", "block-optim: steps of each optimizer to one loss, over ten seeds"),
    "kernels": ("kernels", "block-optim: what the Triton kernels compile to, without a GPU"),
    "muon": ("muon", "block-optim: Muon's step, Newton-Schulz, plans for large models"),
    "shampoo": ("shampoo", "block-optim: Shampoo's and SOAP's step and memory"),
}


def run(command: str, arguments: list[str]) -> int:
    """Run `python -m bench COMMAND ...`; its exit code."""
    module = importlib.import_module(f".{COMMANDS[command][0]}", __package__)
    return module.main(arguments) or 0
