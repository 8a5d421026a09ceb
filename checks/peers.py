"""The same faults in the same script with FSDP2 and DCP, with DeepSpeed, and with ours: what the user sees.

`python -m checks.peers` prints the table; `--write` puts it into RELIABILITY.md. Two ranks, forked; rank 1 has the
fault. Ours is the script with `check_finite` and `checkpoint.save` of `fsdp_runtime.train` in it.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from checks.page import write_section
from checks.peers_job import BEGUN, TIMEOUT, run_rank

SYSTEMS = {"fsdp2": "FSDP2 and DCP", "deepspeed": "DeepSpeed ZeRO-3", "ours": "ours"}
FAULTS = {
    "killed": "rank killed", "frozen": f"rank frozen for longer than the timeout ({TIMEOUT:g} s)",
    "stuck": "a rank waits for data", "another width": "a layer has another width on one rank",
    "another order": "one rank runs blocks in another order", "another dtype": "a block in bf16 on one rank",
    "NaN": "NaN in the input of one rank", "flipped bit": "flipped bit in a checkpoint",
}  # fmt: skip
RANKS = 2
_PATIENCE = 5 * TIMEOUT
_CLOSE = 1e-5  # relative; losses farther apart are of another run


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        lines: the first line of what each rank raised, by rank; None where it raised nothing.
        hung: ranks without the fault that had to be ended.
        died: the signals that ended ranks which the fault did not end.
        seconds: from the fault to the first error; without one, to the end.
        wrong: what differs though nobody raised, or "".
        skips: whether that is what a skipped update comes to.
    """

    lines: tuple[str | None, ...]
    hung: tuple[int, ...]
    died: tuple[str, ...]
    seconds: float
    wrong: str = ""
    skips: bool = False

    @property
    def raised(self) -> list[str]:
        return [line for line in self.lines if line is not None]

    @property
    def summary(self) -> str:
        """The outcome as a cell of the table, without messages."""
        if self.wrong:
            return f"{'no error' if self.skips else '**silently wrong**'}: {self.wrong}"
        if not self.raised and not self.died:
            return f"**hangs** for longer than {self.seconds:.0f} s" if self.hung else "right"
        parts = [f"{len(self.raised)} of {len(self.lines)} raise", f"{self.seconds:.1f} s"]
        parts += ["**the other hangs**"] if self.hung else []
        parts += [f"**{name}**" for name in self.died]
        return ", ".join(parts)

    def __str__(self) -> str:
        """The outcome with the first error."""
        messages = [f"`{cell(message)}`" for message in self.raised[:1]]
        return ": ".join([self.summary, *messages])


def cell(line: str, most: int = 90) -> str:
    """The beginning of a line, without what ends a cell of a table."""
    line = line.replace("|", "\\|").replace("`", "'").replace(f"({socket.gethostname()}", "(host")
    return line if len(line) <= most else f"{line[:most]} ..."


def available() -> list[str]:
    return [name for name in SYSTEMS if name != "deepspeed" or importlib.util.find_spec(name)]


def import_once(systems: Sequence[str]) -> None:
    """Import here what ranks need, which takes long; they are forked."""
    torch.optim.AdamW([torch.zeros(1)])  # torch.compile's modules
    if "deepspeed" in systems:
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed.comm.torch").build_shm_op()  # compiled at its first use


def outcome_of(system: str, fault: str, folder: Path) -> Outcome:
    """Run the script with a fault in an empty folder."""
    if fault == "flipped bit":
        return _flipped(system, folder)
    (folder / "right").mkdir()
    wanted, _ = _launch(system, "none", folder / "right", "train")
    assert len(wanted) == RANKS, f"{system} without a fault: {wanted}"
    begun = time.time()
    found, hung = _launch(system, fault, folder, "train")
    if (folder / BEGUN).exists():
        begun = (folder / BEGUN).stat().st_mtime
    skips = fault == "NaN" and all(math.isfinite(entry.get("loss", math.nan)) for entry in found.values())
    return replace(_judged(folder, found, hung, begun, _wrong_loss(found, wanted)), skips=skips)


def _judged(folder: Path, found: dict[int, dict], hung: tuple[int, ...], begun: float, wrong: str) -> Outcome:
    lines = tuple(found.get(rank, {}).get("error") for rank in range(RANKS))
    ends = [entry["at"] for entry in found.values() if entry.get("error")] or [time.time()]
    died = tuple(entry["died"] for entry in found.values() if "died" in entry)
    silent = wrong if not (any(lines) or hung or died) else ""
    return Outcome(lines, hung, died, min(ends) - begun, silent)


def _wrong_loss(found: dict[int, dict], wanted: dict[int, dict]) -> str:
    """How the loss of the last step differs from that without a fault; "" where it does not, or nobody got there."""
    right = wanted[0]["loss"]
    for entry in found.values():
        if "loss" in entry and not math.isclose(entry["loss"], right, rel_tol=_CLOSE):
            return f"loss {entry['loss']:.4g} instead of {right:.4g}"
    return ""


def _launch(system: str, fault: str, folder: Path, doing: str) -> tuple[dict[int, dict], tuple[int, ...]]:
    """Fork the ranks and wait: what each left, and those without the fault that had to be ended."""
    running: dict[int, int] = {}
    for rank in range(RANKS):
        if (pid := os.fork()) == 0:
            log = os.open(folder / f"{doing}-{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run_rank(system, fault, folder, rank, RANKS, doing)
        running[pid] = rank
    until, hung, died = time.monotonic() + (120.0 if fault == "none" else _PATIENCE), [], {}
    faulty = {1} if fault in ("frozen", "stuck") else set()
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = running.pop(pid)
            if os.WIFSIGNALED(status) and not (fault == "killed" and rank == 1):
                died[rank] = signal.Signals(os.WTERMSIG(status)).name
        elif set(running.values()) <= faulty or time.monotonic() > until:
            hung += [rank for rank in running.values() if rank not in faulty]
            for left in running:
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
            running.clear()
        else:
            time.sleep(0.05)
    paths = {rank: folder / f"{doing}-{rank}.json" for rank in range(RANKS)}
    found = {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}
    return {**{rank: {"died": name} for rank, name in died.items()}, **found}, tuple(hung)


def _flipped(system: str, folder: Path) -> Outcome:
    saved, _ = _launch(system, "none", folder, "save")
    weights = saved[0]["weights"]
    flip(folder / "checkpoint", weights[0][:8])
    begun = time.time()
    found, hung = _launch(system, "none", folder, "load")
    changed = [entry for entry in found.values() if "weights" in entry and entry["weights"] != weights]
    wrong = ""
    if changed:
        pairs = zip(chain(*weights), chain(*changed[0]["weights"]), strict=True)
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        wrong = f"weight {there:.3g} instead of {here:.3g}"
    return _judged(folder, found, hung, begun, wrong)


def flip(checkpoint: Path, values: Sequence[float]) -> Path:
    """Flip the highest bit of an exponent, where these fp32 values are in a file; returns the file."""
    wanted, flipped = struct.pack(f"<{len(values)}f", *values), None
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        data = bytearray(path.read_bytes())
        if (at := data.find(wanted)) >= 0:
            data[at + 3] ^= 0x40
            path.write_bytes(data)
            flipped = flipped or path
    assert flipped is not None, f"{checkpoint} has no file with the values"
    return flipped


def table(outcomes: dict[tuple[str, str], Outcome], systems: Sequence[str]) -> str:
    """The rows: a fault each, a column for each system."""
    lines = [
        f"| fault | {' | '.join(SYSTEMS[name] for name in systems)} |",
        f"| --- |{' --- |' * len(systems)}",
    ]
    for fault in dict.fromkeys(fault for _, fault in outcomes):
        cells = [outcomes[name, fault].summary for name in systems]
        lines.append(f"| {FAULTS[fault]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=available())
    parser.add_argument("--write", action="store_true", help="put the table into docs/RELIABILITY.md")
    options = parser.parse_args()
    import_once(options.systems)
    outcomes = {}
    for fault in options.faults or FAULTS:
        for system in options.systems:
            with tempfile.TemporaryDirectory(prefix="peers-") as folder:
                outcomes[system, fault] = outcome_of(system, fault, Path(folder))
            print(f"{fault}, {system}: {outcomes[system, fault]}", flush=True)
    text = table(outcomes, options.systems)
    print(text)
    if options.write:
        write_section("peers", text)
    return int(
        any(outcome.wrong or outcome.hung for (name, _), outcome in outcomes.items() if name == "ours")
    )


if __name__ == "__main__":
    sys.exit(main())
