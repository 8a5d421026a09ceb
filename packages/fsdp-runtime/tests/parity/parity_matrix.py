"""Which runs are compared, by model and world size: each feature once, block policies dealt over them in turn."""

from dataclasses import replace

from parity_models import Shape
from parity_runs import Run

POLICIES = ("rows", "tiles", "whole", "pattern")
MODELS = ("dense", "more experts, stacked", "more experts, linears", "fewer experts, stacked", "fewer experts, linears")


def shape_of(model: str, ranks: int) -> Shape | None:
    """None where there is no such model: fewer experts than one rank."""
    if model == "dense":
        return Shape()
    experts = ranks + 3 if model.startswith("more") else ranks - 1
    small = Shape(hidden=16, experts=experts, stacked=model.endswith("stacked"), tied=False)
    return small if experts else None


def runs_of(model: str, ranks: int) -> list[Run]:
    """Every feature of this model at this world size."""
    shape = shape_of(model, ranks)
    if shape is None:
        return []
    plain = Run(shape)
    found = [plain, replace(plain, reshard=True), replace(plain, reshard=False)]
    found += [replace(plain, blocks=policy) for policy in POLICIES]
    features = [
        replace(plain, optimizer="adamw"),
        replace(plain, low=True),
        replace(plain, microbatches=2),
        replace(plain, microbatches=2, sync=True),
        replace(plain, offload=True),
        replace(plain, recompute="function"),
        replace(plain, recompute="composable", reshard=True),
        replace(plain, optimizer="adamw", low=True, microbatches=2),
    ]
    if ranks == 4:
        features += [
            replace(plain, reshard=2),
            replace(plain, hsdp=True),
            replace(plain, hsdp=True, low=True, microbatches=2, reshard=True),
        ]
    turn = MODELS.index(model) + ranks
    return found + [
        replace(run, blocks=(*POLICIES, "")[(turn + i) % 5]) for i, run in enumerate(features)
    ]
