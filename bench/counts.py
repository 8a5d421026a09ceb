"""Exact counts of one step, the same on any machine: collectives, bytes, dispatcher calls, live memory.

python -m bench counts                     8, 64, 1024 simulated ranks and 2, 4 real ones; writes results/counts.json
python -m bench counts --write-expected    instead: the committed expectations that the tests hold our own counts to

A simulated world is torch's fake process group: this process stands for rank 0, collectives send nothing, and all
else is as it would be, up to the last byte. Every figure is what a system does beyond the same model's own step with
no sharding at all. On real ranks our runtime uses collectives too, which is what it does on other backends than gloo.

The peak's floor is the most that is live at once of own shards, states, reduced gradients, activations, one gathered
unit and one unit's gradients; of the systems in one world the least.
"""

import json
from typing import Any

from . import calls, store
from .count_step import count, outside
from .ranks import ROOT, fake_ranks, launch
from .systems import SYSTEMS as KNOWN
from .systems import Job, why_not
from .workloads import WORKLOADS

SIMULATED, REAL = (8, 64, 1024), (2, 4)
SYSTEMS = ("ours", "ours-lean", "fsdp2", "deepspeed")
# May fail without costing the others their figures, and set no floor: not all kinds of their memory are known.
PEERS = ("deepspeed",)
KINDS = ("sharded", "state", "gathered", "gradients", "parked", "temporaries")
EXPECTED = ROOT / "bench" / "expected_counts.json"
# What the tests compare: small models, so that it takes seconds. (workload, ranks)
GATE = (("gate", 8), ("gate", 64), ("gate", 1024), ("gate-stacked", 8), ("gate-prime", 7))


def plain(workload: str) -> dict[str, Any]:
    """The same model's own step: what is subtracted."""
    with fake_ranks(1) as mesh:
        return count("plain", Job(WORKLOADS[workload], mesh))


def compare(workload: str, ranks: int, systems: tuple[str, ...], base: dict[str, Any]) -> dict[str, Any]:
    """`outside` of each system that can run, in one simulated world; of the others the reason."""
    with fake_ranks(ranks) as mesh:
        return _compare(Job(WORKLOADS[workload], mesh), systems, base)


def compare_simulated(request: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own, since DeepSpeed remembers the groups of the first world."""
    import torch.distributed as dist

    dist.destroy_process_group()
    return compare(request["workload"], request["simulated"], request["systems"], request["base"])


def compare_here(request: dict[str, Any]) -> dict[str, Any]:
    """The same on the ranks that this is called on; the request brings the plain model's counts."""
    return _compare(Job.of(request), request["systems"], request["base"])


def _compare(job: Job, systems: tuple[str, ...], base: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in systems:
        reason = why_not(name, job)
        try:
            found[name] = {"skipped": reason} if reason else outside(count(name, job), base)
        except Exception as error:
            if name not in PEERS:
                raise
            found[name] = {"skipped": f"{type(error).__name__}: {error}"}
    return found


def gate() -> dict[str, Any]:
    """Our own counts for the regression gate."""
    bases = {workload: plain(workload) for workload, _ in GATE}
    figures = {}
    for workload, ranks in GATE:
        found = compare(workload, ranks, ("ours",), bases[workload])["ours"]
        figures[f"{workload} on {ranks} ranks"] = found
    return figures


def as_table(figures: dict[str, dict[str, Any]]) -> str:
    """Markdown: one row a world and system."""
    header = [
        "ranks",
        "system",
        "gathers",
        "reductions",
        "others",
        "wire MiB",
        "padding",
        "copied forward MiB",
    ]
    header += ["copied backward MiB", "calls", "peak MiB", "of FSDP2's", "above the floor"]
    rows = []
    for world, systems in figures.items():
        peak = systems.get("fsdp2", {}).get("peak")
        floors = (found["floor"] for name, found in systems.items() if "floor" in found and name not in PEERS)
        floor = min(floors, default=None)
        for name, found in systems.items():
            if "skipped" in found:
                continue
            launches = dict(found["collectives"])
            gathers, reductions = (launches.pop(kind, 0) for kind in ("all_gather", "reduce_scatter"))
            rows.append(
                [world, KNOWN[name].label, gathers, reductions, sum(launches.values()), store.mib(found["wire_bytes"]),
                 f"{found['padding']:.2%}", *(store.mib(found["copied"][part]) for part in ("forward", "backward")),
                 sum(found["calls"].values()), store.mib(found["peak"]),
                 f"{found['peak'] / peak:.1%}" if peak else "",
                 f"{found['peak'] / floor - 1:.1%}" if floor else ""]
            )  # fmt: skip
    missing = {
        f"\n{KNOWN[name].label} on {world} ranks is not in the table: {found['skipped']}."
        for world, systems in figures.items()
        for name, found in systems.items()
        if "skipped" in found
    }
    return "\n".join([store.table(header, rows), *sorted(missing)])


def memory_table(figures: dict[str, dict[str, Any]]) -> str:
    """Markdown: live bytes at the peak, by kind."""
    rows = [
        [world, KNOWN[name].label, *(store.mib(found["at_peak"].get(kind, 0)) for kind in KINDS)]
        for world, systems in figures.items()
        for name, found in systems.items()
        if "skipped" not in found
    ]
    return store.table(["ranks", "system", *(f"{kind} MiB" for kind in KINDS)], rows)


def main(arguments: list[str]) -> int:
    """Count, print, write."""
    parser = store.parser_of("counts", __doc__)
    parser.add_argument("--workload", default="counts")
    parser.add_argument("--simulated-only", action="store_true", help="leave the real ranks out")
    parser.add_argument("--write-expected", action="store_true", help=f"only write {EXPECTED.name} again")
    options = parser.parse_args(arguments)
    if options.write_expected:
        write_expected()
        return 0
    base = plain(options.workload)
    request = {"workload": options.workload, "systems": SYSTEMS, "base": base}
    figures = {
        f"{ranks} simulated": launch(compare_simulated, 1, {**request, "simulated": ranks})
        for ranks in SIMULATED
    }
    if not options.simulated_only:
        request["options"] = {"transport": "collectives"}
        figures |= {f"{ranks} real": launch(compare_here, ranks, request) for ranks in REAL}
    print(as_table(figures), memory_table(figures), sep="\n\n")
    print(f"\nwritten to {store.save(f'counts-{options.workload}', figures)}")
    return 0


def write_expected() -> None:
    """Commit to today's counts."""
    import torch

    content = {
        "torch": torch.__version__.split("+")[0],
        "figures": gate(),
        "python_calls": {"at_most": calls.at_most(), "goal": calls.GOAL},
    }
    EXPECTED.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"written to {EXPECTED}")
