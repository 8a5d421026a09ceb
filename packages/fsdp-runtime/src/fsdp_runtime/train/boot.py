"""A rank's first lines, run as a script: it ends with its launcher also while torch is being imported."""

import os
import signal
import sys
import threading


def _end_with(launcher: int, imported: threading.Event) -> None:
    while not imported.wait(0.2):
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGTERM)


def main(control: str, launcher: int) -> None:
    """Import the worker and run it; from then on it looks at its launcher itself."""
    imported = threading.Event()
    threading.Thread(target=_end_with, args=(launcher, imported), daemon=True).start()
    from fsdp_runtime.train.worker import run_and_leave

    imported.set()
    run_and_leave(control)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
