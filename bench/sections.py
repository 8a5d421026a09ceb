"""The sections of the report: each reads the results it is about and gives Markdown; nothing where there are none."""

import json
import math
from pathlib import Path
from typing import Any

from . import counts, plots, speed, store
from .plots import Panel
from .systems import SYSTEMS, label_of

INTRODUCTION = """\
Written by `python -m bench report` from the JSON files in this folder. Counts are exact on any machine. Times are
medians over interleaved rounds; ratios are taken within a round. [The README](../README.md) describes each workload
and the command that measures it. `python -m bench report --plots FOLDER` draws the figures."""


def _about(found: dict[str, Any]) -> str:
    where = found["machine"]
    device = f"{where['gpus']} x {where['gpu']}" if where["gpu"] else f"{where['cores']} x {where['cpu']}"
    text = f"*{device}, torch {where['torch']}, {where['date']}, commit {found['commit']}.*"
    if found["noise"]:
        text += f"\n**The machine was too busy for times to be trusted: {'; '.join(found['noise'])}.**"
    return text


def speed_section(folder: Path, drawings: Path | None) -> list[str]:
    """Tables of every workload and number of ranks, and bars of the ratios."""
    runs = store.load_all("speed-", folder)
    if not runs:
        return []
    out = ["## Speed and memory, all systems on the same work"]
    if drawings:
        _speed_bars(drawings, runs)
    for item in runs:
        figures = item["figures"]
        work = figures["workload"]
        out.append(
            f"### {work['name']}, {figures['ranks']} ranks, {figures['optimizer']}, {figures['precision']}\n\n"
            f"{work['parameters'] / 1e6:.1f}M parameters in {work['tensors']} tensors, {work['tokens_per_rank']} tokens"
            f" on each rank. {_about(item)}"
        )
        out.append(speed.as_table(figures))
        out.append(_losses(figures))
    return out


def _losses(figures: dict[str, Any]) -> str:
    first = {label_of(name): losses[-1] for name, losses in figures["losses"].items()}
    agreed = ", ".join(f"{name} {loss:.5f}" for name, loss in first.items())
    return (
        f"Losses after {len(next(iter(figures['losses'].values())))} steps, checked before timing: {agreed}."
    )


def _speed_bars(folder: Path, found: list[dict[str, Any]]) -> None:
    names = [name for name in SYSTEMS if any(name in item["figures"]["times"] for item in found)]
    ticks = [f"{i['figures']['workload']['name']}\n{i['figures']['ranks']} ranks" for i in found]

    def series(figure: Any) -> dict[str, list[float]]:
        return {
            SYSTEMS[name].label: [
                figure(item["figures"], name) if _has(item, name) else math.nan for item in found
            ]
            for name in names
        }

    panels = [
        Panel(
            "Tokens/s, FSDP2 = 1 (more is better)",
            series(lambda f, n: f["times"][n].get("wall_ratio_fsdp2", math.nan)),
            ticks,
            reference=1.0,
        ),
        Panel(
            "CPU seconds a step (less is better)",
            series(lambda f, n: f["times"][n]["cpu"]),
            ticks,
            "seconds, each rank",
        ),
        Panel(
            "Peak resident memory (less is better)",
            series(lambda f, n: f["memory"].get(n, {}).get("start", math.nan) / 2**20),
            ticks,
            "MiB, the largest rank",
        ),
    ]
    plots.bars(folder / "speed.svg", panels, columns=1 if len(found) > 3 else 3)


def _has(item: dict[str, Any], name: str) -> bool:
    return name in item["figures"]["times"]


def counts_section(folder: Path, drawings: Path | None) -> list[str]:
    """Exact counts and live memory."""
    out: list[str] = []
    for item in store.load_all("counts-", folder):
        figures = item["figures"]
        name = item["name"].removeprefix("counts-")
        out.append(
            f"## Exact counts of one step, workload {name}\n\nBeyond the same model's own step with no sharding. "
            f"*Copied* are bytes written by ops that only move or cast values; *calls* are dispatcher calls."
            f" {_about(item)}"
        )
        if drawings:
            _count_bars(drawings, name, figures)
        out += [
            counts.as_table(figures),
            "Live memory at the peak of the step:",
            counts.memory_table(figures),
        ]
    return out


def _count_bars(folder: Path, name: str, figures: dict[str, Any]) -> None:
    worlds = list(figures)
    names = [n for n in ("ours", "fsdp2") if all("skipped" not in figures[w][n] for w in worlds)]

    def series(figure: Any) -> dict[str, list[float]]:
        return {SYSTEMS[n].label: [figure(figures[world][n]) for world in worlds] for n in names}

    ticks = [world.replace(" ", "\n") for world in worlds]
    panels = [
        Panel("Bytes copied in forward", series(lambda f: f["copied"]["forward"] / 2**20), ticks, "MiB"),
        Panel("Bytes copied in backward", series(lambda f: f["copied"]["backward"] / 2**20), ticks, "MiB"),
        Panel(
            "Dispatcher calls beyond the model's",
            series(lambda f: sum(f["calls"].values())),
            ticks,
            "calls a step",
        ),
    ]
    plots.bars(folder / f"counts-{name}.svg", panels)
    memory = [
        Panel(
            SYSTEMS[n].label,
            {kind: [figures[w][n]["at_peak"].get(kind, 0) / 2**20 for w in worlds] for kind in counts.KINDS},
            ticks,
            "MiB live at the peak",
        )
        for n in names
    ]
    if memory:
        plots.stacks(folder / f"memory-{name}.svg", memory, columns=2)


def padding_section(folder: Path, drawings: Path | None) -> list[str]:
    """Curves of how much layouts pad real models."""
    padding = store.load("padding", folder)
    if not padding:
        return []
    out = [
        "## Padding of real models\n\nShare of the model's parameters that the buffers hold beyond them. Computed."
    ]
    ranks, curves = padding["figures"]["ranks"], padding["figures"]["curves"]
    if drawings:
        panels = [
            Panel(
                f"{model}, {block}",
                {rule: (ranks, [100 * v for v in y]) for rule, y in rules.items()},
                unit="%",
            )
            for model, blocks in curves.items()
            for block, rules in blocks.items()
        ]
        plots.lines(drawings / "padding.svg", panels, columns=2, log_x=True, log_y=True, x_label="ranks")
    shown = [r for r in ranks if r in (64, 256, 1024, 4096)]
    rows = [
        [model, block, rule, *(f"{100 * y[ranks.index(r)]:,.2f} %" for r in shown)]
        for model, blocks in curves.items()
        for block, rules in blocks.items()
        for rule, y in rules.items()
    ]
    return [*out, store.table(["model", "block", "rule", *(f"{r:,} ranks" for r in shown)], rows)]


def tables_section(folder: Path, drawings: Path | None) -> list[str]:
    """Results that bring a table: {"title", "text", "header", "rows"}.

    Optional keys: "bars", a list of panels to draw, and "exact", true for counts, which noise does not change.
    """
    out: list[str] = []
    for path in sorted(folder.glob("*.json")):
        item = json.loads(path.read_text())
        for index, part in enumerate(item["figures"].get("tables", [])):
            about = _about({**item, "noise": []} if part.get("exact") else item)
            out.append(f"## {part['title']}\n\n{part['text']} {about}")
            if part.get("bars") and drawings:
                panels = [Panel(**panel) for panel in part["bars"]]
                plots.bars(drawings / f"{path.stem}-{index}.svg", panels, columns=min(len(panels), 3))
            out.append(store.table(part["header"], part["rows"]))
    return out


# Systems of ours in the summary, and how bytes get from rank to rank there.
WAYS = (("ours", "peer memory"), ("ours-collectives", "gloo's collectives"))


def _summary_row(figures: dict[str, Any], system: str, way: str) -> list[Any]:
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


def summary(folder: Path) -> list[str]:
    """The few lines for the README at the top."""
    out: list[str] = []
    header = [
        "workload",
        "ranks",
        "bytes travel by",
        "tokens/s",
        "x FSDP2",
        "x DDP",
        "CPU s/step, of FSDP2's",
        "peak RSS, of FSDP2's",
    ]
    rows = []
    noisy = False
    for item in store.load_all("speed-", folder):
        figures = item["figures"]
        if "ours" not in figures["times"]:
            continue
        if item["noise"]:
            noisy = True
            continue
        rows += [_summary_row(figures, *way) for way in WAYS if way[0] in figures["times"]]
        where = item["machine"]
    busy = " Times of a busy machine are left out here." if noisy else ""
    if noisy and not rows:
        out.append(busy.strip())
    if rows:
        out.append(
            f"Training a small Llama (dense) and a mixture of experts (moe) in fp32 on {where['cores']} CPU cores,"
            f" gloo, one thread a rank, all systems taking turns ({where['date'][:10]}).{busy}"
        )
        out.append(store.table(header, rows))
    for item in store.load_all("counts-counts", folder):
        found = item["figures"].get("64 simulated", {})
        if "copied" in found.get("ours", {}):
            ours, theirs = found["ours"], found["fsdp2"]
            out.append(
                "One step of a 31.6M-parameter Llama on 64 simulated ranks, beyond the model's own work: "
                f"{store.mib(ours['copied']['forward'])} MiB copied in forward and"
                f" {store.mib(ours['copied']['backward'])} in backward (FSDP2:"
                f" {store.mib(theirs['copied']['forward'])} and {store.mib(theirs['copied']['backward'])}),"
                f" {sum(ours['calls'].values())} dispatcher calls ({sum(theirs['calls'].values())}),"
                f" {store.mib(ours['peak'])} MiB live at the peak ({store.mib(theirs['peak'])})."
            )
    out.append("All figures and commands: [bench/results/REPORT.md](bench/results/REPORT.md).")
    return out


ALL = (speed_section, counts_section, tables_section, padding_section)
