"""The order in which the host starts the work of one step, ours and FSDP2's, recorded and drawn.

python -m bench timeline                 prints it
python -m bench timeline --write         also draws docs/assets/schedule.svg

Three linear layers, a unit each, on rank 0 of four ranks of torch's fake process group; the third step, when the order
of units is known. Recorded is what passes the dispatcher: collectives, copies, and matrix products.
"""

from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard import RaggedDTensor

from .measure import ROOT, fake_ranks, launch
from .systems import fully_shard_of
from .tally import COPIES, collective_of

SYSTEMS = {"fsdp2": "FSDP2", "ours": "fsdp_runtime"}
WIDTHS = (64, 96, 128, 160)  # of three layers: sizes tell whose a tensor is
KINDS = {"all_gather": "gather", "reduce_scatter": "reduce"}
PICTURE = ROOT / "docs" / "assets" / "schedule.svg"
PRODUCTS = ("aten::mm", "aten::addmm")


@dataclass(frozen=True)
class Event:
    """One thing that the host starts: `kind` is "gather", "reduce", "copy", "forward" or "backward"."""

    kind: str
    unit: int


class Timeline(TorchDispatchMode):
    """Records events while entered; calls of one kind and unit that follow each other are one event."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, RaggedDTensor)) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        kind = collective_of(name.split("::")[1].strip("_")) if name.startswith("c10d::") else None
        if kind in KINDS:
            self._add(KINDS[kind], _unit_of_bytes(max(t.nbytes for t in tensors)))
        elif name in PRODUCTS:
            shapes = [sorted(t.shape) for t in tensors]
            self._add(self.phase, next(n for n in range(3) if sorted(WIDTHS[n : n + 2]) in shapes))
        elif name in COPIES:
            nbytes = max(t.nbytes for t in tensors)
            self._add(
                "copy", _unit_of_bytes(nbytes) if nbytes > 4 * max(WIDTHS) else self.events[-1].unit
            )  # a bias
        return result

    def _add(self, kind: str, unit: int) -> None:
        event = Event(kind, unit)
        if self.events[-1:] != [event]:
            self.events.append(event)


def _unit_of_bytes(nbytes: int) -> int:
    sizes = [4 * WIDTHS[n + 1] * (WIDTHS[n] + 1) for n in range(3)]
    return min(range(3), key=lambda n: abs(nbytes - sizes[n]))


def record_here(request: dict[str, Any]) -> list[Event]:
    """The events of a system's third step, in this process."""
    fully_shard = fully_shard_of(request["system"])
    with fake_ranks(4) as mesh:
        model = nn.Sequential(*(nn.Linear(WIDTHS[n], WIDTHS[n + 1]) for n in range(3)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        for _ in range(3):
            timeline = Timeline()
            with timeline:
                loss = model(torch.ones(2, WIDTHS[0])).sum()
                timeline.phase = "backward"
                loss.backward()
            model.zero_grad()
    return timeline.events


LANES = {"collectives": ("gather", "reduce"), "copies": ("copy",), "products": ("forward", "backward")}
COLORS = ("#f5b971", "#8fd19e", "#9ec5fe")
LEFT, STEP, HEIGHT = 110, 27, 22


def svg(timelines: dict[str, list[Event]]) -> str:
    """Both schedules, one above the other; a column is the next thing that the host starts."""
    width = LEFT + STEP * max(map(len, timelines.values())) + 10
    title = "What the host starts in one step, in order, by FSDP2 and by fsdp_runtime"
    lines = [f"<title>{title}</title>", f'<rect width="{width}" height="262" fill="#ffffff" rx="8"/>']
    for number, (system, events) in enumerate(timelines.items()):
        top = 16 + 124 * number
        copies = sum(event.kind == "copy" for event in events)
        lines.append(
            _text(12, top + 10, f"{SYSTEMS[system]}: {copies} groups of copies", ' font-weight="bold"')
        )
        for row, (lane, kinds) in enumerate(LANES.items()):
            y = top + 20 + (HEIGHT + 6) * row
            lines.append(_text(12, y + 15, lane))
            lines.append(f'<path d="M{LEFT} {y + HEIGHT / 2}H{width - 8}" stroke="#d0d7de"/>')
            for column, event in enumerate(events):
                if event.kind in kinds:
                    x, color = LEFT + STEP * column, COLORS[event.unit]
                    lines.append(
                        f'<rect x="{x}" y="{y}" width="{STEP - 2}" height="{HEIGHT}" fill="{color}" rx="3"/>'
                    )
                    letter = "" if event.kind == "copy" else event.kind[0].upper()
                    lines.append(_text(x + 4, y + 15, f"{letter}{event.unit + 1}"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="262" viewBox="0 0 {width} 262" '
    return "\n".join([head + 'font-family="sans-serif" font-size="12" role="img">', *lines, "</svg>", ""])


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="#1b1f24"{more}>{text}</text>'


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Record, print and draw."""
    parser.add_argument("--write", action="store_true", help=f"draw {PICTURE.relative_to(ROOT)}")
    write = parser.parse_args(arguments).write
    timelines = {name: launch(record_here, 1, {"system": name}) for name in SYSTEMS}
    for name, events in timelines.items():
        print(f"{SYSTEMS[name]}: {', '.join(f'{event.kind} {event.unit + 1}' for event in events)}")
    if write:
        PICTURE.write_text(svg(timelines))
    return 0
