"""Python calls and files of a runtime's own code, and graphs of torch.compile, compared with FSDP2's.

python -m bench calls                    calls in wrapping, forward and backward; files on a parameter's way
python -m bench calls --show backward    also lists our functions in this part, most called first
python -m bench compile                  graphs and graph breaks on sharded models, three steps each

Three linear units and a root around them, on four ranks of torch's fake process group, in a new process for each
system. *Own* files are those of our four packages, and of FSDP2's `torch/distributed/fsdp/_fully_shard`. Wrapping is
that of the first unit; forward and backward are those of the fourth step. A parameter's way are the files entered from
a forward to its first all-gather; a gradient's those of a backward without gathers, up to `.grad`. The counts differ
between Python releases.
"""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .measure import fake_ranks, launch, table
from .systems import fully_shard_of

PARTS = ("wrap", "forward", "backward")
SYSTEMS = {"ours": "fsdp_runtime", "fsdp2": "FSDP2"}
PACKAGES = ("fsdp_runtime", "dbuffer", "ragged_shard", "layout_planner")
GOAL = {"wrap": 250, "forward": "FSDP2's", "backward": "FSDP2's"}
FILES_GOAL = 12  # on the way of a parameter, and of a gradient
COMPILED = ("fsdp2", "ours")
HOW = ("blocks, before", "blocks, after", "model, before", "model, after")
NEAR = 1e-5  # relative, of losses


class Calls:
    """Counts calls of functions in some folders while entered.

    Attributes:
        functions: calls by file (below its folder) and function.
        switches: how often a call was to another file than the call before.
        to_gather: files entered before the first all-gather, in order; None before there was one.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._folders = [f"{folder}/" for folder in folders]
        self._last = ""
        self.functions: Counter[tuple[str, str]] = Counter()
        self.switches = 0
        self.to_gather: list[str] | None = None

    def __enter__(self) -> "Calls":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            name = getattr(argument, "__name__", "").replace("_", "")
            if self.to_gather is None and name.startswith("allgather"):
                self.to_gather = self.files()
        if event != "call":
            return
        code = frame.f_code
        folder = next((known for known in self._folders if code.co_filename.startswith(known)), None)
        if folder is None:
            return
        file = f"{Path(folder).name}/{code.co_filename.removeprefix(folder)}"
        self.functions[file, code.co_qualname] += 1
        self.switches += file != self._last
        self._last = file

    def files(self) -> list[str]:
        """Files entered so far, in order."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def figures(self) -> dict[str, int]:
        """Calls, functions, files and switches between files."""
        numbers = (sum(self.functions.values()), len(self.functions), len(self.files()), self.switches)
        return dict(zip(("calls", "functions", "files", "switches"), numbers, strict=True))


def count_here(request: dict[str, Any]) -> dict[str, Any]:
    """`{part: figures}` of a system in this process, of the part `show` each function's calls, and `ways`."""
    fully_shard, folders = _system(request["system"])
    found: dict[str, Any] = {}

    def count(part: str, call: Callable[[], Any]) -> tuple[Any, Calls]:
        with Calls(folders) as calls:
            result = call()
        found[part] = calls.figures()
        if part == request.get("show"):
            found["shown"] = [(number, *where) for where, number in calls.functions.most_common()]
        return result, calls

    x = torch.ones(2, 64)
    with fake_ranks(4) as mesh:

        def trained(count: Callable[[str, Callable[[], Any]], Any], **options: Any) -> nn.Module:
            """A model after three steps."""
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
            count("wrap", lambda: fully_shard(model[0], mesh=mesh, **options))
            for module in (model[1], model[2], model):
                fully_shard(module, mesh=mesh, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model

        model = trained(count)
        output, forward = count("forward", lambda: model(x))
        count("backward", output.sum().backward)
        gathered = trained(lambda part, call: call(), reshard_after_forward=False)
        loss = gathered(x).sum()
        with Calls(folders) as backward:
            loss.backward()
    found["ways"] = {"parameter": forward.to_gather, "gradient": backward.files()}
    return found


def _system(name: str) -> tuple[Callable[..., Any], list[Path]]:
    names = PACKAGES if name == "ours" else ("torch.distributed.fsdp._fully_shard",)
    modules = [import_module(package) for package in names]
    return modules[0].fully_shard, [Path(str(module.__file__)).parent for module in modules]


def measure(show: str | None = None) -> dict[str, Any]:
    """`count_here` of each system."""
    return {name: launch(count_here, 1, {"system": name, "show": show}) for name in SYSTEMS}


def at_most() -> dict[str, int]:
    """Our own calls today, for the gate."""
    counts = launch(count_here, 1, {"system": "ours"})
    return {part: counts[part]["calls"] for part in PARTS}


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Count and print."""
    parser.add_argument("--show", choices=PARTS, help="also list the calls of our own functions in this part")
    options = parser.parse_args(arguments)
    counts = measure(options.show)
    rows = [
        [part, label, *counts[name][part].values(), GOAL[part] if name == "ours" else ""]
        for part in PARTS
        for name, label in SYSTEMS.items()
    ]
    print(table(["", "system", "own calls", "functions", "files", "file switches", "goal, at most"], rows))
    for way, text in (
        ("parameter", "From a forward to the all-gather"),
        ("gradient", "From autograd to .grad"),
    ):
        for name, label in SYSTEMS.items():
            files = counts[name]["ways"][way]
            goal = f" (goal: at most {FILES_GOAL})" if name == "ours" else ""
            print(f"\n{text}, {label}: {len(files)} files{goal}\n  {', '.join(files)}")
    if options.show:
        print(f"\n{table(['calls', 'file', 'function'], counts['ours']['shown'])}")
    return 0


# -- torch.compile -----------------------------------------------------------------------------------------------------


def train(system: str, how: str | None, backend: str = "aot_eager") -> dict[str, Any]:
    """Losses of three steps of the workload "tiny", its blocks units; with `how` also graphs, and breaks by reason."""
    import torch._dynamo.utils

    from fsdp_runtime.train.model import losses_of

    from .models import WORKLOADS, batch_of

    apply = fully_shard_of(system)
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
        for unit in [*model.blocks, model]:
            apply(unit, mesh=mesh)
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
    eager = {system: train(system, None)["losses"] for system in COMPILED}
    rows, differ = [], []
    for how in HOW:
        results = {system: train(system, how, options.backend) for system in COMPILED}
        differ += [f"{s}, {how}" for s in COMPILED if not agree(results[s]["losses"], eager[s])]
        cells = ([r["graphs"], sum(r["breaks"].values())] for r in results.values())
        rows.append([how, *(cell for pair in cells for cell in pair)])
    print(table(["compiled", *(f"{s}: {w}" for s in COMPILED for w in ("graphs", "breaks"))], rows))
    print("Losses differ from eager: " + "; ".join(differ) if differ else "Losses are those of eager.")
    return 1 if differ else 0
