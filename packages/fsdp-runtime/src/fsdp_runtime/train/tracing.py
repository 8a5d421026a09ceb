"""The torch profile that ``--profile`` writes. Steps are counted as in metrics.jsonl, from 0."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from ragged_shard import is_cpu

from .errors import TrainError, agreed


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


class Recorder:
    """Writes the trace of the steps `profile` on this rank: ``trace-rank-N.json`` of `folder`.

    The trace is in Chrome's format. Ranges ``FSDP::... (unit)`` are what units do, ``ProfilerStep#N`` are steps. The
    profiler warms up in the step before. A trace that the end of the run cuts off is also written. Use it as a
    context manager around all steps.
    """

    def __init__(self, profile: str | None, folder: Path, rank: int, device: torch.device) -> None:
        self._profiled = step_range(profile) if profile else range(0)
        self._folder, self._rank, self._device = folder, rank, device
        self._profiler: torch.profiler.profile | None = None  # once it has warmed up
        self._tracing = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around each step. Collective at the last one of a profile: one gather of small objects.

        Raises:
            TrainError: on every rank, if one cannot write.
        """
        if number + 1 == self._profiled.start:
            self._warm_up()
        if number not in self._profiled:
            yield
            return
        if not self._tracing:
            (self._profiler or self._warm_up()).start_trace()
            self._tracing = True
        with torch.profiler.record_function(f"ProfilerStep#{number}"):
            yield
        if number + 1 == self._profiled.stop:
            with agreed("writing the trace"):
                self._write_trace()

    def _warm_up(self) -> torch.profiler.profile:
        self._profiler = torch.profiler.profile()
        self._profiler.prepare_trace()
        return self._profiler

    def _write_trace(self) -> None:
        assert self._profiler is not None
        if not is_cpu(self._device):
            torch.accelerator.synchronize(self._device)  # or kernels under way are missing
        self._profiler.stop_trace()
        self._tracing = False
        self._profiler.export_chrome_trace(str(self._folder / f"trace-rank-{self._rank}.json"))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracing:
            self._write_trace()
