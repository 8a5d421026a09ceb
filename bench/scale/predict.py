"""Scale on paper: step time, exposed communication and memory of large models on 64 to 16,384 GPUs.

python -m bench scale             writes results/scale.json: the curves, the assumptions, and the check
python -m bench scale --no-check  without running anything: predictions only

The model is in `network.py`; what it assumes is printed with the curves. Layouts are computed by the planner, not
assumed. The check predicts small runs on this machine in the same way, from its own measured compute, gloo and copies,
and measures them.
"""

from dataclasses import asdict
from typing import Any

from fsdp_runtime.train.network import Cluster

from ..common import store
from ..systems.workloads import WORKLOADS
from .check import check
from .network import Layer, Step, step
from .parallel import USUAL, Parallel, exchanges, held_by_exchanges, parts_of
from .rules import SYSTEMS, Rules

RANKS = (64, 256, 1024, 4096, 16384)
ROUTED = {"llama-3-70b": 1, "gpt-oss-120b": 4, "deepseek-v3": 8}  # experts that a token goes to
TOKENS, SEQUENCE = 8192, 4096  # of each GPU and step; of one sequence, for attention
FLOPS = 989e12 * 0.5  # bf16, dense, a GPU: half of the peak
GATHER_BYTES, REDUCE_BYTES = 2, 4  # an element: bf16; fp32
STATE_BYTES = 16  # an element: fp32 weight, gradient and two moments
CAPACITY = 80e9


def assumptions(cluster: Cluster, flops: float) -> list[str]:
    """What the curves take for granted, in words."""
    c = cluster
    return [
        f"{TOKENS} tokens a GPU and step in sequences of {SEQUENCE}, whatever the number of GPUs (weak scaling); "
        "activations recomputed in backward",
        f"compute at {flops / 1e12:.0f} TFLOP/s a GPU, experts perfectly balanced",
        "each layout alone, and with what its users add ("
        + ", ".join(f"{name}{parallel.label}" for name, parallel in USUAL.items())
        + "): TP inside a node with sequence parallelism, EP over consecutive GPUs, dense parameters sharded over all "
        "GPUs / TP, experts over all GPUs / EP as torchtitan does; compute waits for their exchanges",
        f"nodes of {c.node} GPUs, NVLink {c.nvlink / 1e9:.0f} GB/s and network {c.nic / 1e9:.0f} GB/s into each GPU, "
        f"{c.efficiency:.0%} of it reached by rings and {c.tree_efficiency:.0%} by trees; "
        f"{1e6 * c.hop_inside:.1f} and {1e6 * c.hop_between:.1f} us a hop; no congestion, no stragglers",
        f"weights gathered in bf16, gradients reduced in fp32, {STATE_BYTES} bytes of state a parameter (fp32 AdamW); "
        "one unit of prefetch; a layer is a unit",
        f"copies at {c.memory / 1e12:.1f} TB/s, read and write, on the compute stream: all write each gradient once "
        "into what is reduced, FSDP2 also copies out what it gathered",
        "buffers of a layer's size alive at the peak, weights + gradients: "
        + ", ".join(f"{r.label} {r.gathered:g} + {r.reducing:g}" for r in SYSTEMS if "blocks" not in r.label),
    ]


def flops_of(group: Any, routed: int) -> float:
    """FLOPs of one layer's forward for a GPU's tokens."""
    active = sum(
        entry.numel * (min(routed, entry.experts) / entry.experts if entry.experts > 1 else 1)
        for entry in group.tensors
        if len(entry.shape) > 1 and "embed" not in entry.name
    )
    heads = next((e.shape[1] for e in group.tensors if e.name.endswith("o_proj.weight")), 0)
    return 2 * active * TOKENS + 2 * TOKENS * SEQUENCE * heads  # causal: half of 4 T S D


def predict(
    model: Any,
    rules: Rules,
    ranks: int,
    cluster: Cluster,
    flops: float,
    parallel: Parallel = Parallel(),  # noqa: B008  (frozen)
) -> dict[str, float]:
    """One point of the curves."""
    layers, largest, state, padded_total, waits = [], 0, 0.0, 0, 0.0
    routed, hidden = ROUTED[model.name], model.groups[0].tensors[0].shape[1]
    for group in model.groups:
        parts = list(parts_of(group, rules, ranks, parallel))
        padded = sum(part.padded for part in parts)
        forward = flops_of(group, routed) / flops
        copies = 2 * padded * GATHER_BYTES * rules.gather_passes / cluster.memory
        writes = padded * (GATHER_BYTES + REDUCE_BYTES) * rules.reduce_passes / cluster.memory
        waiting = exchanges(group, parallel, routed, TOKENS, cluster)
        layer = Layer(
            forward + copies + waiting,
            3 * forward + copies + writes + 2 * waiting,
            sum(cluster.gather(p.padded * GATHER_BYTES, p.ranks, p.stride) for p in parts),
            sum(cluster.gather(p.padded * REDUCE_BYTES, p.ranks, p.stride) for p in parts),
        )
        layers += [layer] * group.count
        largest = max(largest, padded)
        state += group.count * sum(part.padded / part.ranks for part in parts)
        padded_total += group.count * sum(part.padded * part.stride for part in parts)
        waits += group.count * 3 * waiting
    found: Step = step(layers)
    buffers = largest * (rules.gathered * GATHER_BYTES + rules.reducing * REDUCE_BYTES)
    useful = 4 * sum(g.count * flops_of(g, routed) for g in model.groups) / flops
    return {
        "seconds": found.total,
        "useful": useful / found.total,
        "exposed": (found.exposed + waits) / found.total,
        "padding": padded_total / model.numel - 1,
        "memory": state * STATE_BYTES
        + buffers
        + activations(model)
        + held_by_exchanges(hidden, parallel, routed, TOKENS),
    }


def activations(model: Any) -> float:
    """Bytes: each layer's input, and the inside of one layer (about 16 hidden vectors a token)."""
    layers = sum(group.count for group in model.groups)
    hidden = model.groups[0].tensors[0].shape[1]
    return TOKENS * hidden * 2.0 * (layers + 16)


def curves(cluster: Cluster, flops: float) -> dict[str, Any]:
    """`{model: {system: {figure: [one for each of RANKS]}}}`."""
    from layout_planner import load_model

    out: dict[str, Any] = {}
    for name in ROUTED:
        model = load_model(name)
        out[name] = {}
        for parallel in (Parallel(), USUAL[name]):
            for rules in SYSTEMS:
                points = [predict(model, rules, ranks, cluster, flops, parallel) for ranks in RANKS]
                label = rules.label + parallel.label
                out[name][label] = {key: [point[key] for point in points] for key in points[0]}
    return out


def measured_flops() -> tuple[float, str]:
    """FLOP/s of a GPU from imported figures (the plain model on one rank), else the stated assumption."""
    for item in store.load_all("gpu-"):
        piece = item["figures"]["pieces"].get("one-rank", {})
        if item["machine"]["gpu"] and "plain" in piece.get("times", {}):
            work, t = piece["workload"], piece["times"]["plain"]
            workload = WORKLOADS[work["name"]]
            attention = 2 * workload.length * work["dim"] * work["layers"]
            dense = 2 * (work["parameters"] - work["vocab"] * work["dim"])
            done = 3 * (dense + attention) * workload.tokens
            return done / (t["forward"] + t["backward"]), f"measured on {item['machine']['gpu']}"
    return FLOPS, "assumed; no GPU was measured"


def tables(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's tables and curves."""
    rows, panels = [], []
    for model, systems in figures["curves"].items():
        for figure, unit, factor in (
            ("useful", "useful compute, % of the step", 100),
            ("memory", "GB on a GPU (80: dashed)", 1e-9),
        ):
            series = {s: (list(RANKS), [factor * v for v in found[figure]]) for s, found in systems.items()}
            log = figure == "memory"
            reference = CAPACITY / 1e9 if log else None
            panels.append(
                {"title": model, "unit": unit, "series": series, "reference": reference, "log": log}
            )
        for system, found in systems.items():
            cells = [
                f"{found['seconds'][i]:.2f} s, {found['exposed'][i]:.0%} exposed, {found['memory'][i] / 1e9:,.0f} GB"
                for i in range(len(RANKS))
            ]
            rows.append([model, system, *cells])
    text = "Predictions, not measurements. They assume: " + "; ".join(figures["assumptions"]) + "."
    out = [
        {
            "title": "Scale on paper", "text": text, "header": ["model", "layout", *(f"{r:,} GPUs" for r in RANKS)],
            "rows": rows, "lines": panels,
            "options": {"columns": 2, "log_x": True, "log_y": False, "x_label": "GPUs"},
        }
    ]  # fmt: skip
    if check := figures.get("check"):
        out.append(
            {
                "title": "Scale on paper: the check", "text": check["text"], "rows": check["rows"],
                "header": ["workload", "ranks", "system", "predicted ms", "measured ms", "predicted / measured"],
            }
        )  # fmt: skip
    return out


def main(arguments: list[str]) -> int:
    """Predict, check, write."""
    parser = store.parser_of("scale", __doc__)
    parser.add_argument("--no-check", action="store_true", help="run nothing")
    parser.add_argument("--ranks", default="2,4", help="of the small runs of the check")
    options = parser.parse_args(arguments)
    cluster = Cluster()
    flops, source = measured_flops()
    figures: dict[str, Any] = {
        "cluster": asdict(cluster),
        "assumptions": [*assumptions(cluster, flops), f"the rate of compute is {source}"],
        "curves": curves(cluster, flops),
    }
    if not options.no_check:
        figures["check"] = check([int(n) for n in options.ranks.split(",")])
    figures["tables"] = tables(figures)
    store.print_tables(figures["tables"])
    print(f"written to {store.save('scale', figures)}")
    return 0
