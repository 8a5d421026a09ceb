"""`python -m bench COMMAND ...`: see README.md in this folder for what each command does."""

import importlib
import sys
from argparse import ArgumentParser

# command: its module, whose function is `main_COMMAND`, and what it does
COMMANDS = {
    "ablation": ("compare", "the same step without one idea each"),
    "compile": ("tracing", "graphs and graph breaks of torch.compile, ours and FSDP2's"),
    "counts": ("counts", "exact counts of one step: collectives, bytes, calls, live memory"),
    "files": (
        "tracing",
        "files on a parameter's way to the all-gather and a gradient's to .grad, ours and FSDP2's",
    ),
    "gpu": ("gpu", "GPU tests and benchmarks, started by gpu.sh"),
    "host": ("host", "CPU time that a runtime adds, with nothing on the wire"),
    "network": ("compare", "two hosts and a slow link: FSDP2, ours, and ours with quantized wires"),
    "report": ("measure", "all results as one Markdown page"),
    "speed": ("compare", "tokens/s, CPU time, step parts and peak memory of all systems"),
    "timeline": ("tracing", "the schedule of one step, ours and FSDP2's, for the docs"),
    # One package each; they print tables.
    "planner": ("host", "layout-planner: time to plan real models, and padding"),
    "placement": ("host", "ragged-shard: host time of ops on ragged tensors"),
    "meshes": ("optimizers", "block-optim: whether the mesh decides the precision of 8-bit states"),
    "one_device": ("optimizers", "block-optim: steps on plain tensors, torch's and torchao's too"),
    "steps": ("steps", "block-optim: steps of each optimizer to one loss, over ten seeds"),
    "muon": ("optimizers", "block-optim: Muon's step, plans for large models"),
    "rates": ("rates", "Newton-Schulz, 8-bit AdamW and decoding: TFLOP/s and GB/s, others' too"),
}


def main(arguments: list[str]) -> int:
    """Run the command with the rest of the line; returns its exit code, 0 for a command that returns none."""
    if not arguments or arguments[0] not in COMMANDS:
        width = max(map(len, COMMANDS))
        print("python -m bench COMMAND [--help]\n")
        print("\n".join(f"  {command:{width}}  {text}" for command, (_, text) in COMMANDS.items()))
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    module, text = COMMANDS[arguments[0]]
    command = getattr(importlib.import_module(f".{module}", __package__), f"main_{arguments[0]}")
    parser = ArgumentParser(f"python -m bench {arguments[0]}", description=text)
    return command(parser, arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
