"""Import what `gpu.sh` measured on another machine.

python -m bench import FOLDER      FOLDER/figures.json becomes asv results of a machine of their own, and
                                   gpu-MACHINE.json for the report

The commit is the one that was measured; a changed tree has none, so it is refused, unless --commit says which.
"""

import datetime
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..common import store
from ..common.ranks import ROOT
from . import history
from .run import report_tables


def machine_name(where: dict[str, Any]) -> str:
    """`nvidia-h200-x1`: what asv calls the machine."""
    model = re.sub(r"[^a-z0-9]+", "-", (where["gpu"] or "cpu-dry-run").lower()).strip("-")
    return f"{model}-x{max(where['gpus'], 1)}"


def commit_of(content: dict[str, Any], given: str | None) -> str:
    """The full hash of what was measured.

    Raises:
        ValueError: the tree differed from its commit, or was no checkout, and no commit was given.
    """
    found = given or content["commit"]
    if not found or found.endswith("+"):
        raise ValueError(
            f"the figures are of {'a changed tree, ' + found if found else 'no checkout'}; measure a clean one, or say"
            " with --commit which commit they are of"
        )
    return _git("rev-parse", "--verify", f"{found}^{{commit}}")


def convert(content: dict[str, Any], commit: str, folder: Path) -> Path:
    """Write machine.json and one asv result file; its path."""
    from asv import __version__ as asv_version
    from asv.results import Results
    from asv.runner import BenchmarkResult

    where = content["machine"]
    name = machine_name(where)
    about = {
        "machine": name, "cpu": where["cpu"], "gpu": where["gpu"] or "", "num_cpu": str(where["cores"]),
        "os": where["os"], "ram": str(where["memory_gb"]), "arch": "", "version": 1,
    }  # fmt: skip
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "machine.json").write_text(json.dumps(about, indent=4) + "\n")
    python = ".".join(where["python"].split(".")[:2])
    date = 1000 * int(_git("show", "-s", "--format=%ct", commit))
    environment = f"existing-py{python}-torch{where['torch']}"
    params = {key: about[key] for key in ("machine", "cpu", "gpu", "os", "ram", "arch", "num_cpu")}
    record = Results(
        {**params, "python": python, "torch": where["torch"]}, {"torch": where["torch"]}, commit, date, python,
        environment, {},
    )  # fmt: skip
    measured = datetime.datetime.strptime(where["date"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=datetime.UTC)
    cases = list(itertools.product(history.WORLDS, history.SYSTEMS))
    for figure in history.FIGURES:
        values = [history.figure(figure, content["figures"]["pieces"], *case) for case in cases]
        benchmark = {
            "name": f"gpu_history.Gpu.track_{figure}",
            "version": history.Gpu.version,
            "params": [[repr(value) for value in axis] for axis in history.Gpu.params],
        }
        kept = [None if math.isnan(value) else value for value in values]
        nothing = [None] * len(kept)
        result = BenchmarkResult(
            result=kept, samples=nothing, number=nothing, errcode=0, stderr="", profile=None
        )
        record.add_result(benchmark, result, started_at=measured, duration=0.0)
    record.save(str(folder))
    print(
        f"asv {asv_version}: {len(cases)} cases of {len(history.FIGURES)} figures for {name} at {commit[:12]}"
    )
    return folder / name


def for_report(content: dict[str, Any]) -> dict[str, Any]:
    """The figures with the tables that the report shows."""
    return {**content, "figures": {**content["figures"], "tables": report_tables(content)}}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {found.stderr.strip()}")
    return found.stdout.strip()


def main(arguments: list[str]) -> int:
    """Convert a folder."""
    parser = store.parser_of("import", __doc__)
    parser.add_argument("source", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="what was measured, where the figures do not say")
    parser.add_argument("--folder", type=Path, default=store.FOLDER, help="where results are kept")
    options = parser.parse_args(arguments)
    path = options.source / "figures.json"
    if not path.exists():
        print(f"{path} is not there: bench/gpu.sh writes it at its end", file=sys.stderr)
        return 1
    content = json.loads(path.read_text())
    try:
        commit = commit_of(content, options.commit)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written to {convert(content, commit, options.folder)}")
    name = machine_name(content["machine"])
    (options.folder / f"gpu-{name}.json").write_text(json.dumps(for_report(content), indent=1) + "\n")
    print(f"written to {options.folder / f'gpu-{name}.json'}")
    return 0
