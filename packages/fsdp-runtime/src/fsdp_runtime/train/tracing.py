"""Traces and memory snapshots of steps. Steps are counted as in metrics.jsonl, from 0."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from ragged_shard import is_cpu

from .._torch_compat import dump_memory, has_memory_snapshots, record_memory
from .errors import TrainError, agreed, one_line

_EVENTS = 100_000  # of the allocator, that a snapshot has


def step_range(text: str) -> range:
    """Steps of "START:STOP", without STOP.

    Raises:
        TrainError: it is another text, or has no steps.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps:
        raise TrainError(f"--profile {text}: expected START:STOP with START before STOP, such as 10:13")
    return steps


def check_snapshot(step: int, steps: int, device: torch.device) -> None:
    """Raises `TrainError` if a run of `steps` steps on a device can write no memory snapshot of `step`."""
    if not has_memory_snapshots(device):
        raise TrainError(f"--memory-snapshot {step}: torch records no allocations of {device.type} devices")
    if step >= steps:
        raise TrainError(f"--memory-snapshot {step}: the last step of --steps {steps} is {steps - 1}")


class Recorder:
    """Records steps of this rank into files of `folder`. Use it as a context manager around all steps.

    ``trace-rank-N.json``: the steps `profile`, in Chrome's format. Ranges ``FSDP::... (unit)`` are what units do,
    ``ProfilerStep#N`` are steps. The profiler warms up in the step before. A trace that the end of the run cuts off
    is also written.

    ``memory-rank-N.pickle``: torch's snapshot of an accelerator's memory when the step `snapshot` ends; allocations
    are recorded from the first step on. ``out-of-memory-rank-N.pickle``: one more where an out-of-memory error ends
    the steps; without `snapshot` it has no stacks.
    """

    def __init__(
        self, profile: str | None, snapshot: int | None, folder: Path, rank: int, device: torch.device
    ) -> None:
        self._profiled = step_range(profile) if profile else range(0)
        self._snapshot, self._folder, self._rank, self._device = snapshot, folder, rank, device
        self._profiler: torch.profiler.profile | None = None  # once it has warmed up
        self._tracing = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around each step. Collective where a file is written: one gather of small objects.

        Raises:
            TrainError: on every rank, if one cannot write.
        """
        profiled = number in self._profiled
        if self._profiler is None and (profiled or number + 1 in self._profiled):
            # Without it torch 2.11 warns that a cycle clears the one before.
            self._profiler = torch.profiler.profile(acc_events=True)
            self._profiler.prepare_trace()
        if self._profiler is not None and profiled and not self._tracing:
            self._profiler.start_trace()
            self._tracing = True
        label = torch.profiler.record_function(f"ProfilerStep#{number}")
        with label if profiled else contextlib.nullcontext():
            yield
        if number + 1 == self._profiled.stop:
            with agreed("writing the trace"):
                self._write_trace()
        if number == self._snapshot:
            with agreed("writing the memory snapshot"):
                dump_memory(self._device, str(self._path("memory", "pickle")))

    def _write_trace(self) -> None:
        assert self._profiler is not None
        if not is_cpu(self._device):
            torch.accelerator.synchronize(self._device)  # or kernels under way are missing
        self._profiler.stop_trace()
        self._tracing = False
        self._profiler.export_chrome_trace(str(self._path("trace", "json")))

    def _path(self, kind: str, extension: str) -> Path:
        return self._folder / f"{kind}-rank-{self._rank}.{extension}"

    def __enter__(self) -> "Recorder":
        if self._snapshot is not None:
            record_memory(self._device, _EVENTS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._save_after(error)
        if self._snapshot is not None:
            record_memory(self._device, 0)
        if self._tracing:
            self._write_trace()

    def _save_after(self, error: torch.OutOfMemoryError) -> None:
        path = self._path("out-of-memory", "pickle")
        try:
            dump_memory(self._device, str(path))
            error.add_note(f"Memory snapshot: {path}")
        except Exception as problem:  # the run ends with the first error
            error.add_note(f"No memory snapshot: {one_line(problem)}")
