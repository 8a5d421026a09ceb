"""Profiles of steps, which are counted as in metrics.jsonl, from 0."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from ragged_shard.device import is_cpu

from .errors import TrainError, agreed


def step_range(text: str) -> range:
    """Steps of "START:STOP", without STOP; raises `TrainError` for another text, or no steps."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match and (steps := range(int(match[1]), int(match[2]))):
        return steps
    raise TrainError(f"--profile {text}: expected START:STOP with START before STOP, such as 10:13")


@contextlib.contextmanager
def profiling(
    asked: str | None, first: int, path: Path, device: torch.device
) -> Iterator[Callable[[int], None]]:
    """Around all steps from `first` on; call what it yields after each, with its number. Collective where it writes.

    Writes the steps `asked` in Chrome's format, also if the run ends within them.
    """
    if asked is None:
        yield lambda step: None
        return
    steps = step_range(asked)

    def action(step: int) -> ProfilerAction:
        if step in steps:
            return ProfilerAction.RECORD if step + 1 in steps else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step + 1 in steps else ProfilerAction.NONE

    def after(step: int) -> None:
        last = step + 1 == steps.stop
        if last and not is_cpu(device):
            torch.accelerator.synchronize(device)  # or kernels under way are missing
        with agreed("writing the trace") if last else contextlib.nullcontext():
            profiler.step()

    profiler = torch.profiler.profile(
        schedule=action, on_trace_ready=lambda done: done.export_chrome_trace(str(path)), acc_events=True
    )
    profiler.step_num = first
    profiler.current_action = action(first)  # type: ignore[assignment]
    with profiler:
        yield after
