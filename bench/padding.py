"""How much each layout rule pads real models: computed, not measured. Curves for the report.

python -m bench padding      writes results/padding.json
"""

import argparse
from typing import Any

from . import store

MODELS = ("llama-3-70b", "gpt-oss-120b", "deepseek-v3")
BLOCKS = ("rows:1", "rows:32")
RANKS = tuple(2**k for k in range(3, 13))


def curves() -> dict[str, Any]:
    """`{model: {block: {rule: [padding / parameters, one for each of RANKS]}}}`."""
    from layout_planner import parse_block
    from layout_planner.models import load_model

    out: dict[str, Any] = {}
    for name in MODELS:
        model = load_model(name)
        out[name] = {}
        for block in BLOCKS:
            chosen = parse_block(block)
            sizes = [padded(model, chosen, ranks) for ranks in RANKS]
            out[name][block] = {rule: [s[rule] / model.numel - 1 for s in sizes] for rule in sizes[0]}
    return {"ranks": RANKS, "curves": out}


def padded(model: Any, block: Any, ranks: int) -> dict[str, int]:
    """Elements of all buffers of a model under each rule, a layer per group."""
    from layout_planner import plan
    from layout_planner.baselines import even_rows, lcm_rule

    total = {"ours": 0, "even rows (FSDP2)": 0, "lcm (Megatron-FSDP)": 0}
    for group in model.groups:
        specs = group.specs(block)
        total["ours"] += group.count * plan(specs, ranks).padded_numel
        total["even rows (FSDP2)"] += group.count * even_rows(specs, ranks)
        total["lcm (Megatron-FSDP)"] += group.count * lcm_rule(specs, ranks)
    return total


def main(arguments: list[str]) -> int:
    """Compute and write."""
    argparse.ArgumentParser(prog="python -m bench padding", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    print(f"written to {store.save('padding', curves())}")
    return 0
