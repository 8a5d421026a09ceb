"""``python -m fsdp_runtime.train`` is ``fsdp-train``."""

import os
import sys

from .cli import main

if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:  # of torchrun
        from .worker import end_process

        end_process(status)
    sys.exit(status)
