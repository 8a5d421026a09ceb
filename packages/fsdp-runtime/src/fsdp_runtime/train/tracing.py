"""Traces and memory snapshots of steps. Steps are counted as in metrics.jsonl, from 0."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from ragged_shard.device import is_cpu

from .._torch_compat import dump_memory, has_memory_snapshots, record_memory
from .errors import TrainError, agreed, one_line

_EVENTS = 100_000  # of the allocator, that a snapshot has


def step_range(text: str) -> range:
    """Steps of "START:STOP", without STOP; raises `TrainError` for another text, or no steps."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match and (steps := range(int(match[1]), int(match[2]))):
        return steps
    raise TrainError(f"--profile {text}: expected START:STOP with START before STOP, such as 10:13")


def check_snapshot(step: int, steps: int, device: torch.device) -> None:
    """Raises `TrainError` if a run of `steps` steps on a device can write no memory snapshot of `step`."""
    if not has_memory_snapshots(device):
        raise TrainError(f"--memory-snapshot {step}: torch records no allocations of {device.type} devices")
    if step >= steps:
        raise TrainError(f"--memory-snapshot {step}: the last step of --steps {steps} is {steps - 1}")


@contextlib.contextmanager
def recording(
    profile: str | None, snapshot: int | None, first: int, out: Path, rank: int, device: torch.device
) -> Iterator[Callable[[int], None]]:
    """Around all steps from `first` on; call what it yields after each, with its number. Collective where it writes.

    Writes ``trace-rank-N.json`` of the steps `profile` in Chrome's format, also if the run ends within them;
    ``memory-rank-N.pickle``, torch's snapshot when the step `snapshot` ends; ``out-of-memory-rank-N.pickle`` after such
    an error, which has stacks with `snapshot` only.
    """
    steps = step_range(profile) if profile else range(0)

    def action(step: int) -> ProfilerAction:
        if step in steps:
            return ProfilerAction.RECORD if step + 1 in steps else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step + 1 in steps else ProfilerAction.NONE

    def after(step: int) -> None:
        if profiler is not None:
            last = step + 1 == steps.stop
            if last and not is_cpu(device):
                torch.accelerator.synchronize(device)  # or kernels under way are missing
            with agreed("writing the trace") if last else contextlib.nullcontext():
                profiler.step()
        if step == snapshot:
            with agreed("writing the memory snapshot"):
                dump_memory(device, str(out / f"memory-rank-{rank}.pickle"))

    profiler: torch.profiler.profile | None = None
    with contextlib.ExitStack() as stack:
        if snapshot is not None:
            record_memory(device, _EVENTS)
            stack.callback(record_memory, device, 0)
        if profile:
            path = str(out / f"trace-rank-{rank}.json")
            profiler = torch.profiler.profile(
                schedule=action, on_trace_ready=lambda done: done.export_chrome_trace(path), acc_events=True
            )
            profiler.step_num = first
            profiler.current_action = action(first)  # type: ignore[assignment]
            stack.enter_context(profiler)
        try:
            yield after
        except torch.OutOfMemoryError as error:
            path = str(out / f"out-of-memory-rank-{rank}.pickle")
            try:
                dump_memory(device, path)
                error.add_note(f"Memory snapshot: {path}")
            except Exception as problem:  # the run ends with the first error
                error.add_note(f"No memory snapshot: {one_line(problem)}")
            raise
