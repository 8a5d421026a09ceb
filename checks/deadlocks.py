"""What hangs or is silently wrong with FSDP2, and what the same scripts do with ours: the deadlock suite.

`python -m checks.deadlocks [SCRIPT ...]` prints the table; `--write` puts it into RELIABILITY.md. The ranks are
forked; `deadlock_scripts.py` has the scripts.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from checks.deadlock_scripts import SCRIPTS
from checks.page import write_section
from checks.peers import cell

SYSTEMS = {"fsdp2": "FSDP2", "ours": "ours"}
TIMEOUT = 15.0  # seconds, of the process group
_CLOSE = 1e-5


@dataclass(frozen=True)
class Fate:
    """What came of a script.

    Attributes:
        errors: what each rank raised, its first line; None where it raised nothing.
        seconds: from the first step to the last error.
        wrong: names of weights that differ from those of one process.
        died: signals that ended ranks.
    """

    errors: tuple[str | None, ...]
    seconds: float
    wrong: tuple[str, ...] = ()
    died: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """right; wrong, without an error; raises, on every rank; hangs, until the timeout; or breaks: anything else."""
        if self.died:
            return "breaks"
        if not any(self.errors):
            return "wrong" if self.wrong else "right"
        if self.seconds > 0.8 * TIMEOUT:
            return "hangs"
        return "raises" if all(self.errors) else "breaks"

    @property
    def summary(self) -> str:
        """The fate as a cell of the table, without messages."""
        verdict = self.verdict
        if verdict == "right":
            return "right"
        if verdict == "wrong":
            return f"**silently wrong**: {len(self.wrong)} weights"
        if verdict == "hangs":
            named = sum("do not agree" in error for error in self.errors if error)
            return "**hangs**" + (f"; then {named} of {len(self.errors)} names what differs" if named else "")
        raised = sum(error is not None for error in self.errors)
        died = f", {len(self.died)} {self.died[0]}" if self.died else ""
        return f"{raised} of {len(self.errors)} raise, {self.seconds:.0f} s{died}"

    def __str__(self) -> str:
        """The fate with the first error, or the first wrong weight."""
        raised = [error for error in self.errors if error]
        first = f": `{cell(raised[0], 120)}`" if raised else f": {self.wrong[0]}" if self.wrong else ""
        return self.summary + first


def fate_of(script: str, system: str, ranks: int) -> Fate:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="deadlocks-") as folder:
        running = {}
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                _run_rank(script, system, rank, ranks, store.port, Path(folder))
            running[pid] = rank
        died = _wait_for(running)
        paths = [Path(folder) / str(rank) for rank in range(ranks)]
        ends = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    return judged(ends, died)


def judged(ends: Sequence[dict[str, Any]], died: tuple[str, ...] = ()) -> Fate:
    """What came of a script, from what `train` returned on each rank."""
    errors = tuple(end.get("error") for end in ends)
    seconds = [end["seconds"] for end in ends if end.get("error")]
    wrong = next((tuple(end["wrong"]) for end in ends if end.get("wrong")), ())
    return Fate(errors, max(seconds, default=0.0), wrong, died)


def _wait_for(running: dict[int, int]) -> tuple[str, ...]:
    """The signals that ended ranks; ranks that do not end are killed."""
    until, died = time.monotonic() + 4 * TIMEOUT, []
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.pop(pid)
            if os.WIFSIGNALED(status):
                died.append(signal.Signals(os.WTERMSIG(status)).name)
        elif time.monotonic() > until:
            for left in running:
                os.kill(left, signal.SIGKILL)
            until += TIMEOUT
        else:
            time.sleep(0.02)
    return tuple(died)


def _run_rank(script: str, system: str, rank: int, ranks: int, port: int, folder: Path) -> None:
    """Train on this rank, note what came of it, and end the process."""
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    end = train(script, system, init_device_mesh("cpu", (ranks,)))
    (folder / str(rank)).write_text(json.dumps(end))
    os._exit(0)  # torch's group may wait for a rank that has gone


def train(script: str, system: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Run a script on this rank: the "error", if there was one, and "wrong", the names of weights; "seconds"."""
    wanted = SCRIPTS[script]("plain").plain(mesh.size())
    end: dict[str, Any] = {}
    begun = time.monotonic()
    try:
        weights = SCRIPTS[script](system).sharded(mesh)
        full = {name: weight.full_tensor() for name, weight in weights.items()}
        end["wrong"] = [
            name for name in wanted if not torch.allclose(full[name], wanted[name], rtol=_CLOSE, atol=_CLOSE)
        ]
    except Exception as error:
        said = re.sub(r"\[\S*/(\w+\.cc:\d+)\]", r"[\1]", (str(error).splitlines() or [""])[0])
        end["error"] = f"{type(error).__name__}: {said}"
    return {**end, "seconds": time.monotonic() - begun}


def table(fates: dict[tuple[str, str, int], Fate], systems: Sequence[str], ranks: Sequence[int]) -> str:
    """A row for each script; where the numbers of ranks differ in their verdicts, each has a line."""
    lines = [
        f"| script | {' | '.join(SYSTEMS[name] for name in systems)} |",
        f"| --- |{' --- |' * len(systems)}",
    ]
    for script in dict.fromkeys(script for script, _, _ in fates):
        kind = SCRIPTS[script]
        cells = []
        for system in systems:
            several = [fates[script, system, count] for count in ranks]
            if len({fate.verdict for fate in several}) == 1:
                cells.append(several[-1].summary)
            else:
                cells.append(
                    "; ".join(
                        f"{count} ranks: {fate.summary}" for count, fate in zip(ranks, several, strict=True)
                    )
                )
        sources = f" ({kind.sources})" if kind.sources else ""
        lines.append(f"| `{script}`: {kind.title}{sources} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; fails where ours does something else than its script says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)} (default: all)"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--write", action="store_true", help="put the table into docs/RELIABILITY.md")
    options = parser.parse_args()
    fates = {}
    for script in options.scripts or SCRIPTS:
        for system in options.systems:
            for ranks in options.ranks:
                fates[script, system, ranks] = fate = fate_of(script, system, ranks)
                print(f"{script}, {system}, {ranks} ranks: {fate.verdict}: {fate}", flush=True)
    text = table(fates, options.systems, options.ranks)
    print(text)
    if options.write:
        write_section("deadlocks", text)
    return int(
        any(
            fate.verdict != SCRIPTS[name].expected
            for (name, system, _), fate in fates.items()
            if system == "ours"
        )
    )


if __name__ == "__main__":
    sys.exit(main())
