"""How much each layout rule pads real models: computed, not measured. Curves for the report.

python -m bench padding      writes results/padding.json
"""

from typing import Any

from . import store

MODELS = ("llama-3-70b", "gpt-oss-120b", "deepseek-v3")
BLOCKS = ("rows:1", "rows:32")
RANKS = tuple(2**k for k in range(3, 13))
RULES = ("ours", "even rows (FSDP2)", "lcm (Megatron-FSDP)")


def curves() -> dict[str, Any]:
    """`{model: {block: {rule: [padding / parameters, one for each of RANKS]}}}`."""
    from layout_planner import load_model, parse_block

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
    groups = [(group.count, group.specs(block)) for group in model.groups]
    return {rule: sum(count * padded_group(specs, ranks, rule) for count, specs in groups) for rule in RULES}


def padded_group(specs: Any, ranks: int, rule: str) -> int:
    """Elements of one group's buffers under one of the rules."""
    from layout_planner import plan
    from layout_planner.baselines import even_rows, lcm_rule

    if rule == "ours":
        return plan(specs, ranks).padded_numel
    return {"even rows (FSDP2)": even_rows, "lcm (Megatron-FSDP)": lcm_rule}[rule](specs, ranks)


def main(arguments: list[str]) -> int:
    """Compute and write."""
    store.parser_of("padding", __doc__).parse_args(arguments)
    print(f"written to {store.save('padding', curves())}")
    return 0
