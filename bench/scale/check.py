"""The check of `scale`: small runs predicted from their measured parts, and measured.

A CPU has no spare core for the wire, so compute and communication take turns (`overlap=False`); else it is the same
arithmetic: plain compute + copies by each system's passes + collectives with a measured start and rate.
"""

from typing import Any

from ..common.ranks import launch
from ..systems.adapters import SYSTEMS
from ..systems.workloads import WORKLOADS
from . import link
from .network import Layer, step
from .rules import SYSTEMS as RULES
from .rules import Rules

WORKLOAD = "dense"


def check(rank_counts: list[int]) -> dict[str, Any]:
    """Rows of predicted and measured step times."""
    rows, raw = [], []
    for ranks in rank_counts:
        found = launch(link.run, ranks, {"workload": WORKLOAD, "systems": ["ours", "fsdp2"], "rounds": 5})
        raw.append(found)
        for name, rules, wires in (("ours", RULES[0], "ours_"), ("fsdp2", RULES[2], "")):
            if name in found["steps"]:
                predicted, measured = predicted_step(found, rules, ranks, wires), found["steps"][name]["wall"]
                cells = [f"{1e3 * predicted:.0f}", f"{1e3 * measured:.0f}", f"{predicted / measured:.2f}"]
                rows.append([WORKLOAD, ranks, SYSTEMS[name].label, *cells])
    text = (
        "The same arithmetic for runs on this machine: the plain model's compute, collectives (gloo's, and as dbuffer "
        "makes them; a start and a rate from two sizes) and a large copy, all measured with every rank at it; "
        "without overlap, since no core is spare."
    )
    for found in raw:
        text += "".join(
            f" {name} is missing at {found['ranks']} ranks: {why}." for name, why in found["skipped"].items()
        )
    return {"rows": rows, "raw": raw, "text": text}


def predicted_step(found: dict[str, Any], rules: Rules, ranks: int, wires: str = "") -> float:
    """Seconds: the plain step with the optimizer's part divided, and what the system adds.

    `wires` is what the names of the collectives that it uses begin with.
    """
    model: Any = WORKLOADS[WORKLOAD].model("meta")
    units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    units.append(sum(p.numel() for p in model.parameters()) - sum(units))
    plain, total = found["steps"]["plain"], sum(units)
    rate = 2 * found["copied_bytes"] / found["parts"]["copy"]  # read and written
    layers = []
    for n in units:
        copies = 8 * n * rules.gather_passes / rate
        writes = 8 * n * rules.reduce_passes / rate
        share = n / total
        layers.append(
            Layer(
                plain["forward"] * share + copies,
                plain["backward"] * share + copies + writes,
                wire(found, f"{wires}gather", 4 * n / ranks),
                wire(found, f"{wires}reduce", 4 * n / ranks),
            )
        )
    return step(layers, overlap=False).total + plain["update"] / ranks


def wire(found: dict[str, Any], kind: str, shard_bytes: float) -> float:
    """Seconds of a collective by a start and a rate through the two sizes measured."""
    small, large = found["shard_bytes"]
    t_small, t_large = found["parts"][f"{kind}_small"], found["parts"][f"{kind}_large"]
    per_byte = max(t_large - t_small, 0.0) / (large - small)
    return max(t_small - per_byte * small, 0.0) + per_byte * shard_bytes
