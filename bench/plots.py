"""Figures of the report as SVG files. Needs matplotlib.

bars      groups of bars side by side, one panel each
stacks    bars of kinds on top of one another
lines     curves over ranks or commits, one panel each
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Colour-blind safe (Okabe and Ito), one for each name wherever it appears.
COLOURS = {
    "ours": "#0072B2", "fsdp_runtime": "#0072B2", "FSDP2": "#E69F00", "even rows (FSDP2)": "#E69F00",
    "Megatron-FSDP": "#009E73", "lcm (Megatron-FSDP)": "#009E73", "DDP (not sharded)": "#777777",
    "no sharding, one rank": "#BBBBBB", "FSDP1": "#CC79A7", "DeepSpeed ZeRO-3": "#D55E00",
    "ours, blocks of 32 rows": "#56B4E9", "without zero-copy": "#56B4E9", "planner off: given order": "#009E73",
    "planner off: lcm rule": "#CC79A7", "blocks ignored": "#777777", "gradients not fused": "#F0E442",
}  # fmt: skip
KINDS = {
    "sharded": "#0072B2", "state": "#56B4E9", "gathered": "#E69F00", "gradients": "#D55E00", "parked": "#CC79A7",
    "temporaries": "#BBBBBB",
}  # fmt: skip
CYCLE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#777777", "#000000"]


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        series: values by name: numbers (NaN: none) beside `ticks` for bars, (x, y) pairs of lists for lines.
        errors: half-widths beside the values of a series, for bars.
        reference: a dashed horizontal line.
    """

    title: str
    series: Mapping[str, Any]
    ticks: Sequence[str] = ()
    unit: str = ""
    errors: Mapping[str, Sequence[float]] | None = None
    reference: float | None = None


@contextmanager
def _figure(
    path: Path, panels: int, *, columns: int, height: float = 3.0, width: float = 4.2
) -> Iterator[list[Any]]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    settings: Any = {
        "svg.hashsalt": "bench", "font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    }  # fmt: skip
    with mpl.rc_context(settings):
        rows = -(-panels // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
        )
        flat = list(axes.flat)
        for spare in flat[panels:]:
            spare.set_axis_off()
        yield flat[:panels]
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _colour(name: str, index: int) -> str:
    return COLOURS.get(name) or CYCLE[index % len(CYCLE)]


def bars(path: Path, panels: Sequence[Panel], *, columns: int = 3) -> None:
    """Bars side by side: a group for each tick, a bar for each series; the value above each."""
    most = max(len(panel.series) * max(len(panel.ticks), 1) for panel in panels)
    with _figure(path, len(panels), columns=columns, height=2.9, width=max(4.2, 0.36 * most)) as axes:
        for axis, panel in zip(axes, panels, strict=True):
            count = len(panel.series)
            width = 0.8 / count
            for index, (name, values) in enumerate(panel.series.items()):
                where = [tick - 0.4 + width * (index + 0.5) for tick in range(len(values))]
                errors = (panel.errors or {}).get(name)
                drawn = axis.bar(
                    where, values, 0.92 * width, label=name, color=_colour(name, index), yerr=errors,
                    error_kw={"elinewidth": 0.8},
                )  # fmt: skip
                labels = ["" if math.isnan(value) else _short(value) for value in values]
                axis.bar_label(drawn, labels, fontsize=6.5, padding=1.5)
            if panel.reference is not None:
                axis.axhline(panel.reference, color="black", linewidth=0.7, linestyle="--")
            axis.set_xticks(range(len(panel.ticks)), panel.ticks)
            axis.set_title(panel.title)
            axis.set_ylabel(panel.unit)
            axis.margins(y=0.12)
        _legend(axes)


def stacks(path: Path, panels: Sequence[Panel], *, columns: int = 3) -> None:
    """Bars of kinds on top of one another: a bar for each tick; the panels share one scale."""
    with _figure(path, len(panels), columns=columns, height=2.9) as axes:
        for axis in axes[1:]:
            axis.sharey(axes[0])
        for axis, panel in zip(axes, panels, strict=True):
            base = [0.0] * len(panel.ticks)
            for index, (name, values) in enumerate(panel.series.items()):
                colour = KINDS.get(name) or _colour(name, index)
                axis.bar(range(len(values)), values, 0.6, bottom=base, label=name, color=colour)
                base = [a + b for a, b in zip(base, values, strict=True)]
            for tick, total in enumerate(base):
                axis.annotate(
                    _short(total), (tick, total), ha="center", va="bottom", fontsize=7, xytext=(0, 1.5),
                    textcoords="offset points",
                )  # fmt: skip
            axis.set_xticks(range(len(panel.ticks)), panel.ticks)
            axis.set_title(panel.title)
            axis.set_ylabel(panel.unit)
            axis.margins(y=0.1)
        _legend(axes)


def lines(
    path: Path,
    panels: Sequence[Panel],
    *,
    columns: int = 3,
    log_x: bool = False,
    log_y: bool = False,
    x_label: str = "",
) -> None:
    """Curves: each series is a pair of lists, x and y."""
    with _figure(path, len(panels), columns=columns, height=2.7) as axes:
        for axis, panel in zip(axes, panels, strict=True):
            for index, (name, (x, y)) in enumerate(panel.series.items()):
                axis.plot(
                    x, y, marker="o", markersize=2.8, linewidth=1.3, label=name, color=_colour(name, index)
                )
            if panel.reference is not None:
                axis.axhline(panel.reference, color="black", linewidth=0.7, linestyle="--")
            if log_x:
                axis.set_xscale("log", base=2)
                xs = sorted({value for x, _ in panel.series.values() for value in x})
                shown = xs if len(xs) <= 6 else xs[::2]
                axis.set_xticks(shown, [f"{value:,}" for value in shown])
                axis.minorticks_off()
            if log_y:
                axis.set_yscale("symlog", linthresh=1.0)
                axis.set_ylim(bottom=0)
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            else:
                axis.set_ylim(bottom=0)
                axis.margins(y=0.1)
            axis.set_title(panel.title)
            axis.set_ylabel(panel.unit)
            axis.set_xlabel(x_label)
            axis.grid(axis="y", linewidth=0.3)
        _legend(axes)


def _legend(axes: list[Any]) -> None:
    """One legend below all, of every name once."""
    named: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    if len(named) > 1:
        figure = axes[0].figure
        columns = max(1, min(len(named), int(figure.get_figwidth() // 1.9)))
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
