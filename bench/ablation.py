"""What each idea is worth: the same step with one of them taken away.

python -m bench ablation      writes results/ablation.json

Two tables. Times on real ranks, all variants taking turns in one process group. Counts on 64 simulated ranks, exact,
where padding shows. Workload: experts in stacked tensors with biases, in sizes whose blocks share no small multiple;
blocks of 32 rows; for the optimizer's part 8-bit AdamW in tiles of 32x32.
"""

from typing import Any

from . import counts, machine, rounds, store
from .count_step import count, outside
from .ranks import fake_ranks, launch
from .speed import summarise
from .systems import SYSTEMS, Job
from .workloads import WORKLOADS

LAYOUT = ["ours", "ours-staged", "ours-held", "ours-given-order", "ours-lcm", "fsdp2"]
OPTIMIZER = ["ours", "ours-gathering"]
BLOCKS = {"block_policy": "rows:32"}


def measure(ranks: int, num_rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Times of both comparisons, counts of the first, and why times are not to be trusted."""
    from ragged_shard.testing import RankError

    before = machine.busy_share()
    common = {"workload": "ablation", "rounds": num_rounds, "steps": 2}
    layout = launch(rounds.run, ranks, {**common, "systems": LAYOUT, "options": BLOCKS})
    try:
        request = {**common, "systems": OPTIMIZER, "optimizer": "adamw8bit"}
        optimizer = launch(rounds.run, ranks, request)
    except RankError as error:
        optimizer = {"failed": str(error).splitlines()[-1], "samples": {}, "calibration": [], "skipped": {}}
    foreign = [s["foreign"] for raw in (layout, optimizer) for v in raw["samples"].values() for s in v]
    noise = machine.verdict(before, layout["calibration"] + optimizer["calibration"], foreign)
    base = counts.plain("ablation")
    with fake_ranks(64) as mesh:
        job = Job(WORKLOADS["ablation"], mesh, options=BLOCKS)
        found = {name: outside(count(name, job), base) for name in LAYOUT}
    return {"ranks": ranks, "layout": layout, "optimizer": optimizer, "counts": found}, noise


def tables(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's tables."""
    out: list[dict[str, Any]] = []
    for key, text in (
        ("layout", "Blocks of 32 rows, AdamW."),
        ("optimizer", "8-bit AdamW in tiles of 32x32: on whole blocks in place, or on gathered tensors."),
    ):
        raw = figures[key]
        if not raw["samples"].get("ours"):
            continue
        times = summarise(raw)
        rows = [
            [SYSTEMS[n].label, f"{times['ours']['wall'] / t['wall']:.1%}", f"{t['cpu'] / times['ours']['cpu']:.2f}",
             f"{1e3 * t['wall']:.0f}", f"{1e3 * t['update']:.0f}", f"{t['spread']:.1%}"]
            for n, t in times.items()
        ]  # fmt: skip
        header = ["runtime", "throughput", "CPU time", "step ms", "optimizer ms", "spread"]
        title = f"Ablation, {figures['ranks']} real ranks: {key}"
        shares = {SYSTEMS[n].label: [times["ours"]["wall"] / t["wall"]] for n, t in times.items()}
        bars = [
            {"title": "Throughput, ours = 1", "ticks": [""], "unit": "", "reference": 1.0, "series": shares}
        ]
        skipped = "".join(f" {SYSTEMS[n].label} is not there: {why}." for n, why in raw["skipped"].items())
        out.append({"title": title, "text": text + skipped, "header": header, "rows": rows, "bars": bars})
    counts = figures["counts"]
    rows = [
        [SYSTEMS[n].label, f"{f['padding']:.1%}", store.mib(f["wire_bytes"]), store.mib(f["copied"]["forward"]),
         store.mib(f["copied"]["backward"]), sum(f["calls"].values()), store.mib(f["peak"])]
        for n, f in counts.items()
    ]  # fmt: skip
    header = [
        "runtime",
        "padding",
        "wire MiB",
        "copied forward MiB",
        "copied backward MiB",
        "calls",
        "peak MiB",
    ]
    bars = [
        {"title": title, "ticks": [""], "unit": "MiB", "series": {SYSTEMS[n].label: [of(f)] for n, f in counts.items()}}
        for title, of in (
            ("Received by a rank in a step", lambda f: f["wire_bytes"] / 2**20),
            ("Copied in a step", lambda f: sum(f["copied"].values()) / 2**20),
            ("Live at the peak", lambda f: f["peak"] / 2**20),
        )
    ]  # fmt: skip
    text = "Exact, beyond the model's own step; blocks of 32 rows, which FSDP2 does not keep whole."
    title = "Ablation, 64 simulated ranks"
    out.append({"title": title, "text": text, "header": header, "rows": rows, "bars": bars, "exact": True})
    return out


def main(arguments: list[str]) -> int:
    """Measure, print, record."""
    parser = store.parser_of("ablation", __doc__, timed=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args(arguments)
    figures, noise = measure(options.ranks, options.rounds)
    figures["tables"] = tables(figures)
    store.print_tables(figures["tables"])
    return store.record("ablation", figures, noise, options.keep_noisy)
