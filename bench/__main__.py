"""`python -m bench COMMAND ...`: see README.md in this folder for what each command does."""

import importlib
import sys
from argparse import ArgumentParser

# command: its module, its function there, and what it does
COMMANDS = {
    "ablation": ("compare", "main_ablation", "the same step without one idea each"),
    "calls": ("calls", "main", "Python calls and files of our own code, and FSDP2's"),
    "checkpoint": ("checkpoint", "main", "how long saving and loading takes"),
    "clip": ("host", "main_clip", "CPU time of clipping: torch's function and ours"),
    "compile": ("calls", "main_compile", "graphs and graph breaks of torch.compile, ours and FSDP2's"),
    "convert": ("checkpoint", "main_convert", "a model through all forms of files: seconds, peak memory"),
    "counts": ("counts", "main", "exact counts of one step: collectives, bytes, calls, live memory"),
    "export": ("export", "main", "whole weights or changes out of a model: bytes and memory"),
    "gpu": ("gpu", "main", "GPU tests and benchmarks, started by gpu.sh"),
    "host": ("host", "main", "CPU time that a runtime adds, with nothing on the wire"),
    "network": ("network", "main", "two hosts and a slow link: FSDP2, ours, and ours with quantized wires"),
    "offload": (
        "export",
        "main_offload",
        "what CPU memory takes off a device: bytes held and moved, step time",
    ),
    "report": ("report", "main", "all results as one Markdown page"),
    "speed": ("compare", "main", "tokens/s, CPU time, step parts and peak memory of all systems"),
    "timeline": ("timeline", "main", "the schedule of one step, ours and FSDP2's, for the docs"),
    "weights": (
        "checkpoint",
        "main_weights",
        "loading and writing a model: bytes and memory, ours and torch's",
    ),
    "wrap": ("host", "main_wrap", "CPU time of fully_shard of a large model, and its growth"),
    "zero": ("counts", "main_zero", "bytes of ZeRO-1, -2, -3 and hpZ in a step, counted and by formula"),
    # One package each; they print tables.
    "planner": ("packages", "main_planner", "layout-planner: time to plan real models, and padding"),
    "placement": ("packages", "main_placement", "ragged-shard: host time of ops on ragged tensors"),
    "buffer": ("packages", "main_buffer", "dbuffer: host time of moving a group, without the collective"),
    "exchange": ("packages", "main_exchange", "dbuffer: large gathers and reductions by each transport"),
    "optimizer": ("optimizers", "main", "block-optim: time of an AdamW step"),
    "meshes": (
        "optimizers",
        "main_meshes",
        "block-optim: whether the mesh decides the precision of 8-bit states",
    ),
    "one_device": (
        "optimizers",
        "main_one_device",
        "block-optim: steps on plain tensors, torch's and torchao's too",
    ),
    "shampoo": ("optimizers", "main_shampoo", "block-optim: Shampoo's and SOAP's step and memory"),
    "steps": ("steps", "main", "block-optim: steps of each optimizer to one loss, over ten seeds"),
    "kernels": ("kernels", "main", "block-optim: what the Triton kernels compile to, without a GPU"),
    "muon": ("muon", "main", "block-optim: Muon's step, plans for large models"),
    "rates": ("rates", "main", "Newton-Schulz, 8-bit AdamW and decoding: TFLOP/s and GB/s, others' too"),
}


def main(arguments: list[str]) -> int:
    """Run the command with the rest of the line; returns its exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        width = max(map(len, COMMANDS))
        print("python -m bench COMMAND [--help]\n")
        print("\n".join(f"  {command:{width}}  {text}" for command, (*_, text) in COMMANDS.items()))
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    module, function, text = COMMANDS[arguments[0]]
    command = getattr(importlib.import_module(f".{module}", __package__), function)
    return int(command(ArgumentParser(f"python -m bench {arguments[0]}", description=text), arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
