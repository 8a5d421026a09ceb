"""The report: results/*.json as one Markdown page of tables.

python -m bench report                     writes results/REPORT.md
python -m bench report --readme README.md  also replaces the summary block of that file
"""

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from . import compare, counts
from .measure import FOLDER, load_all, mib, table

BEGIN, END = "<!-- bench summary: python -m bench report -->", "<!-- end of bench summary -->"
INTRODUCTION = """\
# Benchmarks: the newest figures

Written by `python -m bench report` from the JSON files in this folder, which have more: raw samples, other numbers of
ranks, losses. Counts are exact on any machine. Times are medians over interleaved rounds, ratios are taken within a
round, and times of a busy machine are left out. Each section names machine, date and commit. [Commands and
method](../README.md). Padding: [known models](../../packages/layout-planner/docs/padding.md)."""
WORLDS = ("64 simulated", "1024 simulated")  # of counts
# Rows and tables that are left out here; the JSON files have them.
LEFT_OUT = {("host", "simulated ranks"): ("8", "1024"), ("muon", "ranks"): ("2", "64")}
# Those of docs/guides/memory.md and WEIGHTS.md stand there.
LEFT_OUT_TABLES = (
    "Steps to that loss by learning rate", "Newton-Schulz, cpu", "Offload", "Bytes of ZeRO's stages", "Weights through",
    "8-bit AdamW on meshes", "A step on plain tensors", "Checkpoints", "Ablation, 2 real ranks: optimizer",
    "Time of Muon", "The same for GPUs", "Muon's step on fully_shard, simulated",
)  # fmt: skip
# Systems of ours in the summary, and how bytes get from rank to rank there.
WAYS = (("ours", "peer memory"), ("ours-collectives", "gloo's collectives"))


def write(folder: Path) -> Path:
    """Write REPORT.md of all results in `folder`; returns the page's path."""
    parts = [INTRODUCTION, *counts_section(folder), *speed_section(folder), *tables_section(folder)]
    path = folder / "REPORT.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _about(item: dict[str, Any]) -> str:
    where = item["machine"]
    device = f"{where['gpus']} x {where['gpu']}" if where["gpu"] else f"{where['cores']} x {where['cpu']}"
    return f"*{device}, {where['date'][:10]}, {item['commit']}.*"


def counts_section(folder: Path) -> list[str]:
    """Exact counts and live memory."""
    out: list[str] = []
    for item in load_all("counts-", folder):
        figures = {world: item["figures"][world] for world in WORLDS if world in item["figures"]}
        name = item["name"].removeprefix("counts-")
        out += [
            f"## Exact counts of one step, workload {name}\n\nBeyond the same model's own step with no sharding."
            " *Copied* are bytes written by ops that only move or cast values, the gradients themselves included;"
            " *calls* are dispatcher calls. The root's large children are reduced separately: one reduction more."
            f" {_about(item)}",
            counts.as_table(figures),
            "Live memory at the peak of the step:",
            counts.memory_table({world: figures[world] for world in WORLDS[:1] if world in figures}),
        ]
    return out


def speed_section(folder: Path) -> list[str]:
    """A table for each workload and number of ranks that a quiet machine has measured."""
    out, busy = [], []
    for item in load_all("speed-", folder):
        figures = item["figures"]
        work = figures["workload"]
        title = f"{work['name']}, {figures['ranks']} ranks, {figures['optimizer']}, {figures['precision']}"
        if item["noise"]:
            busy.append(f"Left out, {title}: {'; '.join(item['noise'])}.")
            continue
        about = f"{work['parameters'] / 1e6:.1f}M parameters in {work['tensors']} tensors, {work['tokens_per_rank']}"
        about += f" tokens on each rank. {_about(item)}"
        out += [f"### {title}\n\n{about}", compare.as_table(figures, parts=())]
    return ["## Speed and memory, all systems on the same work", *out, *busy] if out or busy else []


def tables_section(folder: Path) -> list[str]:
    """Results that bring tables, as `measure.table_of` makes them."""
    out = []
    for item in load_all("", folder):
        for part in item["figures"].get("tables", []):
            if part["title"].startswith(LEFT_OUT_TABLES):
                continue
            title = f"## {part['title']}\n\n"
            if item["noise"] and not part.get("exact"):
                out.append(f"{title}Left out: {'; '.join(item['noise'])}.")
                continue
            hidden = [LEFT_OUT.get((item["name"], column), ()) for column in part["header"]]
            rows = [r for r in part["rows"] if not any(c in h for c, h in zip(r, hidden, strict=True))]
            out += [f"{title}{part['text']} {_about(item)}", table(part["header"], rows)]
    return out


def summary(folder: Path) -> list[str]:
    """The summary for the README: exact counts first, then speed."""
    out = []
    for item in load_all("counts-counts", folder):
        systems = item["figures"].get("64 simulated", {})
        rows = [
            [label, *(mib(f["copied"][part]) for part in ("forward", "backward")), sum(f["calls"].values()),
             mib(f["peak"])]
            for label, f in (("fsdp_runtime", systems["ours"]), ("FSDP2", systems["fsdp2"]))
        ]  # fmt: skip
        header = "64 ranks; MiB copied in forward; in backward; dispatcher calls; MiB live at the peak"
        about = "Exact counts of one step of a 31.6M-parameter Llama, beyond the model's own work:"
        out += [about, table(header.split("; "), rows)]
    results = [item for item in load_all("speed-", folder) if "ours" in item["figures"]["times"]]
    quiet = [item for item in results if not item["noise"]]
    busy = " Times of a busy machine are left out." if len(quiet) < len(results) else ""
    if quiet:
        columns = "workload; ranks; bytes travel by; tokens/s; x FSDP2; x DDP; "
        columns += "CPU s/step, of FSDP2's; peak RSS, of FSDP2's"
        rows = [
            _speed_row(item["figures"], system, way)
            for item in quiet
            for system, way in WAYS
            if system in item["figures"]["times"]
        ]
        where = quiet[-1]["machine"]
        out += [
            f"Training a small Llama (dense) and a mixture of experts (moe) in fp32 on {where['cores']} CPU cores,"
            f" gloo, one thread a rank, all systems taking turns ({where['date'][:10]}).{busy}",
            table(columns.split("; "), rows),
        ]
    elif busy:
        out.append(busy.strip())
    return [*out, "All figures: [bench/results/REPORT.md](bench/results/REPORT.md)."]


def _speed_row(figures: dict[str, Any], system: str, way: str) -> list[Any]:
    t, memory = figures["times"][system], figures["memory"]
    share = memory[system]["start"] / memory["fsdp2"]["start"] if {system, "fsdp2"} <= set(memory) else None
    name = figures["workload"]["name"]
    return [
        name if figures["optimizer"] == "adamw" else f"{name}, {figures['optimizer']}",
        figures["ranks"],
        way,
        f"{t['tokens_per_second']:,.0f}",
        *(f"{t[k]:.2f}" if k in t else "" for k in ("wall_ratio_fsdp2", "wall_ratio_ddp")),
        f"{1 / t['cpu_ratio_fsdp2']:.0%}" if "cpu_ratio_fsdp2" in t else "",
        f"{share:.0%}" if share else "",
    ]


def put_into(readme: Path, folder: Path) -> None:
    """Replace the summary block of `readme`.

    Raises:
        ValueError: `readme` has no such block.
    """
    text, block = readme.read_text(), "\n\n".join([BEGIN, *summary(folder), END])
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{readme} has no block from {BEGIN} to {END}; add the two lines where it should be")
    readme.write_text(pattern.sub(lambda _: block, text))


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Write the report."""
    parser.add_argument("--folder", type=Path, default=FOLDER, help="results to read (bench/results)")
    parser.add_argument("--readme", type=Path, help="also put the summary into this file")
    options = parser.parse_args(arguments)
    print(f"written to {write(options.folder)}")
    if options.readme:
        put_into(options.readme, options.folder)
        print(f"summary put into {options.readme}")
    return 0
