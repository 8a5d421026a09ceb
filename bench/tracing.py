"""The host's side of a step, ours and FSDP2's: files on a parameter's way, graphs of torch.compile, order of launches.

python -m bench files                    files from a forward to the all-gather, and from autograd to `.grad`
python -m bench compile                  graphs and graph breaks on sharded models, three steps each
python -m bench timeline [--write]       the work that the host starts, in order; draws docs/assets/schedule.svg

Three linear units and a root around them, on four ranks of torch's fake process group, in a new process for each
system. Files are those of our four packages, and of FSDP2's `torch/distributed/fsdp/_fully_shard`. A parameter's way
are the files entered from a forward to its first all-gather, after three steps; a gradient's those of a backward
without gathers.

The order is that of the third step of three linear units, as it passes the dispatcher: collectives, copies, products.
"""

import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard import RaggedDTensor

from .counts import COPIES, collective_of
from .measure import ROOT, fake_ranks, launch, table
from .models import WORKLOADS, batch_of
from .systems import shard

SYSTEMS = {"ours": "fsdp_runtime", "fsdp2": "FSDP2"}
PACKAGES = ("fsdp_runtime", "dbuffer", "ragged_shard", "layout_planner")
FILES_GOAL = 12  # on the way of a parameter, and of a gradient
PAIR = tuple(reversed(SYSTEMS))
HOW = ("blocks, before", "blocks, after", "model, before", "model, after")
NEAR = 1e-5  # relative, of losses


class Files:
    """The files in some folders whose functions are called while entered, in order; `to_gather`: before a gather."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = [f"{folder}/" for folder in folders]
        self._entered: dict[str, None] = {}
        self.to_gather: list[str] | None = None

    def __enter__(self) -> "Files":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            name = getattr(argument, "__name__", "").replace("_", "")
            if self.to_gather is None and name.startswith("allgather"):
                self.to_gather = self.entered
        if event == "call":
            file = frame.f_code.co_filename
            for folder in self._folders:
                if file.startswith(folder):
                    self._entered[f"{Path(folder).name}/{file.removeprefix(folder)}"] = None

    @property
    def entered(self) -> list[str]:
        """The files so far."""
        return list(self._entered)


def ways(request: dict[str, Any]) -> dict[str, list[str] | None]:
    """In this process: the files on a parameter's way to its first all-gather, and on a gradient's to `.grad`."""
    names = PACKAGES if request["system"] == "ours" else ("torch.distributed.fsdp._fully_shard",)
    folders = [Path(str(import_module(name).__file__)).parent for name in names]
    x = torch.ones(2, 64)
    with fake_ranks(4) as mesh:

        def trained(**options: Any) -> nn.Module:
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
            shard(request["system"], model, model, mesh=mesh, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model

        model, gathered = trained(), trained(reshard_after_forward=False)
        with Files(folders) as forward:
            model(x)
        loss = gathered(x).sum()
        with Files(folders) as backward:
            loss.backward()
    return {"From a forward to the all-gather": forward.to_gather, "From autograd to .grad": backward.entered}


def main_files(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the files."""
    parser.parse_args(arguments)
    for name, label in SYSTEMS.items():
        goal = f" (goal: at most {FILES_GOAL})" if name == "ours" else ""
        for way, files in launch(ways, 1, {"system": name}).items():
            print(f"{way}, {label}: {len(files)} files{goal}\n  {', '.join(files)}\n")


# -- torch.compile -----------------------------------------------------------------------------------------------------


def train(system: str, how: str | None, backend: str = "aot_eager") -> dict[str, Any]:
    """Losses of three steps of the workload "tiny", its blocks units; with `how` also graphs, and breaks by reason."""
    import torch._dynamo.utils

    from fsdp_runtime.train.model import losses_of

    what, _, when = (how or "").partition(", ")
    counters, tiny = torch._dynamo.utils.counters, WORKLOADS["tiny"]
    torch._dynamo.reset()
    counters.clear()

    def compile_now(moment: str) -> None:
        if when == moment:
            for module in model.blocks if what == "blocks" else [model]:
                module.compile(backend=backend)

    with fake_ranks(2) as mesh:
        model: Any = tiny.model()
        compile_now("before")
        shard(system, model, model.blocks, mesh=mesh)
        compile_now("after")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = losses_of(model, *batch_of(tiny, step, 0))[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {
        "losses": losses,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": {reason.splitlines()[0]: count for reason, count in counters["graph_break"].items()},
    }


def agree(losses: list[float], others: list[float]) -> bool:
    """Whether losses are the same, up to rounding."""
    return all(abs(a - b) <= NEAR * abs(b) for a, b in zip(losses, others, strict=True))


def main_compile(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table of graphs; 1 if compiled losses differ from those of eager."""
    parser.add_argument("--backend", default="aot_eager", choices=("eager", "aot_eager", "inductor"))
    options = parser.parse_args(arguments)
    eager = {system: train(system, None)["losses"] for system in PAIR}
    rows, differ = [], []
    for how in HOW:
        results = {system: train(system, how, options.backend) for system in PAIR}
        differ += [f"{s}, {how}" for s in PAIR if not agree(results[s]["losses"], eager[s])]
        cells = ([r["graphs"], sum(r["breaks"].values())] for r in results.values())
        rows.append([how, *(cell for pair in cells for cell in pair)])
    print(table(["compiled", *(f"{s}: {w}" for s in PAIR for w in ("graphs", "breaks"))], rows))
    print("Losses differ from eager: " + "; ".join(differ) if differ else "Losses are those of eager.")
    return 1 if differ else 0


# -- the order of a step -----------------------------------------------------------------------------------------------

WIDTHS = (64, 96, 128, 160)  # of three layers: sizes tell whose a tensor is
MOVES = {"all_gather": "gather", "reduce_scatter": "reduce"}
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
        if kind in MOVES:
            self._add(MOVES[kind], _unit_of_bytes(max(t.nbytes for t in tensors)))
        elif name in PRODUCTS:
            shapes = [sorted(t.shape) for t in tensors]
            self._add(self.phase, next(n for n in range(3) if sorted(WIDTHS[n : n + 2]) in shapes))
        elif name in COPIES:
            nbytes = max(t.nbytes for t in tensors)
            is_bias = nbytes <= 4 * max(WIDTHS)
            self._add("copy", self.events[-1].unit if is_bias else _unit_of_bytes(nbytes))
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
    with fake_ranks(4) as mesh:
        model = nn.Sequential(*(nn.Linear(WIDTHS[n], WIDTHS[n + 1]) for n in range(3)))
        shard(request["system"], model, model, mesh=mesh)
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
        name = f"{SYSTEMS[system]}: {copies} groups of copies"
        lines.append(_label(12, top + 10, name, ' font-weight="bold"'))
        for row, (lane, kinds) in enumerate(LANES.items()):
            y = top + 20 + (HEIGHT + 6) * row
            lines.append(_label(12, y + 15, lane))
            lines.append(f'<path d="M{LEFT} {y + HEIGHT / 2}H{width - 8}" stroke="#d0d7de"/>')
            for column, event in enumerate(events):
                if event.kind in kinds:
                    x, color = LEFT + STEP * column, COLORS[event.unit]
                    size = f'width="{STEP - 2}" height="{HEIGHT}"'
                    letter = "" if event.kind == "copy" else event.kind[0].upper()
                    lines.append(f'<rect x="{x}" y="{y}" {size} fill="{color}" rx="3"/>')
                    lines.append(_label(x + 4, y + 15, f"{letter}{event.unit + 1}"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="262" viewBox="0 0 {width} 262" '
    return "\n".join([head + 'font-family="sans-serif" font-size="12" role="img">', *lines, "</svg>", ""])


def _label(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="#1b1f24"{more}>{text}</text>'


def main_timeline(parser: ArgumentParser, arguments: list[str]) -> None:
    """Record, print and draw."""
    parser.add_argument("--write", action="store_true", help=f"draw {PICTURE.relative_to(ROOT)}")
    write = parser.parse_args(arguments).write
    timelines = {name: launch(record_here, 1, {"system": name}) for name in PAIR}
    for name, events in timelines.items():
        print(f"{SYSTEMS[name]}: {', '.join(f'{event.kind} {event.unit + 1}' for event in events)}")
    if write:
        PICTURE.write_text(svg(timelines))
