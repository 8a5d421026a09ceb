"""What `python -m bench` can do. Modules are imported when they are asked for."""

import importlib

# command: its module and what it does
COMMANDS = {
    "ablation": ("times.ablation", "what each idea is worth: the same step without it"),
    "calls": ("counts.calls", "Python calls of our own code, next to FSDP2's"),
    "checkpoint": ("times.checkpoint", "how long saving and loading takes"),
    "clip": ("times.clip", "CPU time of clipping: torch's function and ours, next to plain tensors"),
    "compile": ("counts.compile", "graphs and graph breaks of torch.compile, next to FSDP2's"),
    "counts": ("counts.counts", "exact counts of one step: collectives, bytes, calls, live memory"),
    "gpu": ("gpu.run", "GPU tests and benchmarks, started by gpu.sh"),
    "host": ("times.host", "CPU time that a runtime adds, with nothing on the wire"),
    "padding": ("scale.padding", "how much each layout rule pads real models, for the report"),
    "report": ("report.page", "all results as one Markdown page with pictures"),
    "speed": ("times.speed", "tokens/s, CPU time, step parts and peak memory of all systems"),
    "wrap": ("times.wrap", "what fully_shard of a large model costs the host, and how it grows"),
    # One package each; they print tables.
    "planner": ("packages.planner", "layout-planner: time to plan real models, and padding"),
    "placement": ("packages.placement", "ragged-shard: what ops on ragged tensors cost the host"),
    "buffer": ("packages.buffer", "dbuffer: what moving a group costs, without the collective itself"),
    "exchange": ("packages.exchange", "dbuffer: large gathers and reductions by each transport"),
    "weights": (
        "packages.weights",
        "fsdp-runtime: loading and writing a model, bytes and memory next to torch",
    ),
    "optimizer": ("optimizers.step", "block-optim: time of an AdamW step"),
    "optimizer_distance": ("optimizers.distance", "block-optim: how far 8-bit AdamW ends up from fp32"),
    "meshes": ("optimizers.meshes", "block-optim: whether the mesh decides the precision of 8-bit states"),
    "one_device": (
        "optimizers.one_device",
        "block-optim: steps on plain tensors, next to torch's and torchao's",
    ),
    "steps": ("optimizers.steps", "block-optim: steps of each optimizer to one loss, over ten seeds"),
    "kernels": ("optimizers.kernels", "block-optim: what the Triton kernels compile to, without a GPU"),
    "muon": ("optimizers.muon", "block-optim: Muon's step, Newton-Schulz, plans for large models"),
    "shampoo": ("optimizers.shampoo", "block-optim: Shampoo's and SOAP's step and memory"),
}


def run(command: str, arguments: list[str]) -> int:
    """Run `python -m bench COMMAND ...`; its exit code."""
    module = importlib.import_module(f".{COMMANDS[command][0]}", __package__)
    return module.main(arguments) or 0
