"""`python -m bench VERB ...`: see README.md in this folder for what each verb does."""

import importlib
import sys

# verb: its module and what it does
VERBS = {
    "ablation": ("ablation", "what each idea is worth: the same step without it"),
    "checkpoint": ("checkpoint", "how long saving and loading takes"),
    "counts": ("counts", "exact counts of one step: collectives, bytes, calls, live memory"),
    "gpu": ("gpu", "GPU tests and benchmarks, started by gpu.sh"),
    "host": ("host", "CPU time that a runtime adds, with nothing on the wire"),
    "import": ("gpu_import", "bring home what gpu.sh measured on another machine"),
    "padding": ("padding", "how much each layout rule pads real models, for the report"),
    "record": ("record", "all figures of the report anew, in one go"),
    "report": ("report", "all results as one Markdown page with pictures"),
    "scale": ("scale", "predicted step time and memory on 64 to 16,384 GPUs, and a check"),
    "scripts": ("scripts", "keep what the other scripts of this folder print"),
    "speed": ("speed", "tokens/s, CPU time, step parts and peak memory of all systems"),
}


def main(arguments: list[str]) -> int:
    """Hand the rest of the line to the verb's module."""
    if not arguments or arguments[0] not in VERBS:
        width = max(map(len, VERBS))
        print("python -m bench VERB [--help]\n")
        print("\n".join(f"  {verb:{width}}  {what}" for verb, (_, what) in VERBS.items()))
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    module = importlib.import_module(f".{VERBS[arguments[0]][0]}", __package__)
    return module.main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
