"""`python -m bench COMMAND ...`: see README.md in this folder for what each command does."""

import importlib
import sys
from argparse import ArgumentParser

# command: its module, whose function is `main_COMMAND`, and what it does
COMMANDS = {
    "ablation": ("compare", "the same step without one idea each"),
    "calls": ("calls", "Python calls and files of our own code, and FSDP2's"),
    "checkpoint": ("checkpoint", "how long saving and loading takes"),
    "clip": ("host", "CPU time of clipping: torch's function and ours"),
    "compile": ("calls", "graphs and graph breaks of torch.compile, ours and FSDP2's"),
    "counts": ("counts", "exact counts of one step: collectives, bytes, calls, live memory"),
    "gpu": ("gpu", "GPU tests and benchmarks, started by gpu.sh"),
    "host": ("host", "CPU time that a runtime adds, with nothing on the wire"),
    "network": ("compare", "two hosts and a slow link: FSDP2, ours, and ours with quantized wires"),
    "report": ("measure", "all results as one Markdown page"),
    "speed": ("compare", "tokens/s, CPU time, step parts and peak memory of all systems"),
    "timeline": ("calls", "the schedule of one step, ours and FSDP2's, for the docs"),
    "wrap": ("host", "CPU time of fully_shard of a large model, and its growth"),
    "zero": ("counts", "bytes of ZeRO-1, -2, -3 and hpZ in a step, counted and by formula"),
    # One package each; they print tables.
    "planner": ("host", "layout-planner: time to plan real models, and padding"),
    "placement": ("host", "ragged-shard: host time of ops on ragged tensors"),
    "buffer": ("host", "dbuffer: host time of moving a group, without the collective"),
    "exchange": ("host", "dbuffer: large gathers and reductions by each transport"),
    "optimizer": ("optimizers", "block-optim: time of an AdamW step"),
    "meshes": ("optimizers", "block-optim: whether the mesh decides the precision of 8-bit states"),
    "one_device": ("optimizers", "block-optim: steps on plain tensors, torch's and torchao's too"),
    "shampoo": ("optimizers", "block-optim: Shampoo's and SOAP's step and memory"),
    "steps": ("steps", "block-optim: steps of each optimizer to one loss, over ten seeds"),
    "muon": ("optimizers", "block-optim: Muon's step, plans for large models"),
    "kernels": ("kernels", "block-optim and dbuffer: what their Triton kernels compile to, without a GPU"),
    "rates": ("kernels", "Newton-Schulz, 8-bit AdamW and decoding: TFLOP/s and GB/s, others' too"),
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
