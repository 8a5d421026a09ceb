"""Which runs are compared, by model and world size: each feature once, each block policy at least twice.

Block policies are dealt over the features in turn, beginning with another one for each model and world size.
"""

from dataclasses import replace

from parity_models import Shape
from parity_runs import Run

POLICIES = ("rows", "tiles", "whole", "pattern", "")
EXPERTS = (
    "more experts, stacked", "more experts, linears", "fewer experts, stacked", "fewer experts, linears",
)  # fmt: skip
MODELS = ("dense", *EXPERTS)


def shape_of(model: str, ranks: int) -> Shape | None:
    """None where there is no such model: fewer experts than one rank."""
    if model == "dense":
        return Shape()
    experts = ranks + 1 if model.startswith("more") else ranks - 1
    if not experts:
        return None
    stacked, top = model.endswith("stacked"), min(2, experts)
    return Shape(ff_dim=16, num_experts=experts, top_k=top, stacked=stacked, tied=False)


def runs_of(model: str, ranks: int) -> list[Run]:
    """Every feature of this model at this world size."""
    shape = shape_of(model, ranks)
    if shape is None:
        return []
    plain = Run(shape)
    features = [
        plain, replace(plain, reshard=False), replace(plain, optimizer="adamw"), replace(plain, low=True),
        replace(plain, microbatches=2), replace(plain, microbatches=2, sync=True), replace(plain, offload=True),
        replace(plain, recompute="function"), replace(plain, recompute="composable", reshard=True),
        replace(plain, optimizer="adamw", low=True, microbatches=2),
    ]  # fmt: skip
    if ranks == 4:
        features += [
            replace(plain, reshard=2),
            replace(plain, hsdp=True),
            replace(plain, hsdp=True, low=True, microbatches=2, reshard=True),
        ]
    turn = MODELS.index(model) + ranks
    return [replace(run, blocks=POLICIES[(turn + i) % len(POLICIES)]) for i, run in enumerate(features)]
