"""How a rank learns that it should stop: by a signal, by the launcher's file, or because the launcher is gone."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class StopFlag:
    """Whether this rank was asked to stop; `received` is the signal's number, 0 for none."""

    stop_file: Path | None = None
    received: int = 0
    asked: bool = False  # the first question comes from the first training step

    def __call__(self) -> int:
        """Look."""
        self.asked = True
        if not self.received and self.stop_file is not None and self.stop_file.exists():
            self.received = signal.SIGTERM
        return self.received

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP for it inside."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.received = number

        with on_stop_signals(on_signal):
            yield

    def watch(self, launcher: int) -> None:
        """Stop when the process `launcher`, this one's parent, is gone: with a checkpoint if training has begun.

        Before the first step there is nothing to save, and setting up may wait minutes for other ranks: then the
        process ends at once. A thread of its own looks twice a second.
        """

        def look() -> None:
            while os.getppid() == launcher:
                time.sleep(0.5)
            self.received = self.received or signal.SIGTERM
            if not self.asked:
                os._exit(128 + signal.SIGTERM)

        threading.Thread(target=look, name="fsdp-train-launcher", daemon=True).start()


@contextmanager
def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` is called for SIGINT, SIGTERM and SIGHUP. A SIGHUP that is ignored (nohup) stays ignored."""
    numbers = [
        number
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
