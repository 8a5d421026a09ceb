"""``python -m fsdp_runtime.train`` is ``fsdp-train``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
