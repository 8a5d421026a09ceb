"""Python calls of a runtime's own: what `fully_shard`, a forward and a backward run of its code.

python -m bench calls                    ours next to FSDP2; prints tables
python -m bench calls --show backward    and which functions of ours, most called first

Three linear units and a root around them, on four ranks of torch's fake process group, in a fresh process for each
system. *Own* files are those of our four packages, and FSDP2's `torch/distributed/fsdp/_fully_shard`. Wrapping is that
of the first unit; forward and backward are those of the fourth step. The counts differ between Python releases.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import store
from .ranks import fake_ranks, launch

PARTS = ("wrap", "forward", "backward")
SYSTEMS = {"ours": "fsdp_runtime", "fsdp2": "FSDP2"}
PACKAGES = ("fsdp_runtime", "dbuffer", "ragged_shard", "layout_planner")
GOAL = {"wrap": 250, "forward": "FSDP2's", "backward": "FSDP2's"}


class Calls:
    """Counts calls of functions in some folders while entered.

    Attributes:
        functions: calls by file (below its folder) and function.
        switches: how often a call was to another file than the call before.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._folders = [f"{folder}/" for folder in folders]
        self._last = ""
        self.functions: Counter[tuple[str, str]] = Counter()
        self.switches = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        folder = next(
            (candidate for candidate in self._folders if code.co_filename.startswith(candidate)), None
        )
        if folder is None:
            return
        file = f"{Path(folder).name}/{code.co_filename.removeprefix(folder)}"
        self.functions[file, code.co_qualname] += 1
        self.switches += file != self._last
        self._last = file

    def figures(self) -> dict[str, int]:
        """Calls, functions, files and switches between files."""
        files = {file for file, _ in self.functions}
        return {
            "calls": sum(self.functions.values()), "functions": len(self.functions), "files": len(files),
            "switches": self.switches,
        }  # fmt: skip


def count_here(request: dict[str, Any]) -> dict[str, Any]:
    """`{part: figures}` of a system in this process, and of the part `show` each function's calls."""
    import torch
    import torch.distributed as dist
    from torch import nn

    fully_shard, folders = _system(request["system"])
    found: dict[str, Any] = {}

    def count(part: str, call: Callable[[], Any]) -> Any:
        with Calls(folders) as calls:
            result = call()
        found[part] = calls.figures()
        if part == request.get("show"):
            found["shown"] = [(number, *where) for where, number in calls.functions.most_common()]
        return result

    dist.destroy_process_group()
    with fake_ranks(4) as mesh:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        count("wrap", lambda: fully_shard(model[0], mesh=mesh))
        for module in (model[1], model[2], model):
            fully_shard(module, mesh=mesh)
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 64)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        output = count("forward", lambda: model(x))
        loss = output.sum()
        count("backward", loss.backward)
    return found


def _system(name: str) -> tuple[Callable[..., Any], list[Path]]:
    import importlib

    if name == "ours":
        modules = [importlib.import_module(package) for package in PACKAGES]
    else:
        modules = [importlib.import_module("torch.distributed.fsdp._fully_shard")]
    return modules[0].fully_shard, [Path(str(module.__file__)).parent for module in modules]


def measure(show: str | None = None) -> dict[str, Any]:
    """`count_here` of each system."""
    return {name: launch(count_here, 1, {"system": name, "show": show}) for name in SYSTEMS}


def at_most() -> dict[str, int]:
    """Our own calls today, for the gate."""
    counts = launch(count_here, 1, {"system": "ours"})
    return {part: counts[part]["calls"] for part in PARTS}


def main(arguments: list[str]) -> int:
    """Count and print."""
    parser = store.parser_of("calls", __doc__)
    parser.add_argument("--show", choices=PARTS, help="also list the calls of our own functions in this part")
    options = parser.parse_args(arguments)
    counts = measure(options.show)
    rows = [
        [part, label, *counts[name][part].values(), GOAL[part] if name == "ours" else ""]
        for part in PARTS
        for name, label in SYSTEMS.items()
    ]
    print(
        store.table(["", "system", "own calls", "functions", "files", "file switches", "goal, at most"], rows)
    )
    if options.show:
        print(f"\n{store.table(['calls', 'file', 'function'], counts['ours']['shown'])}")
    return 0
