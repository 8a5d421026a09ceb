"""Real text to train on: the source of Python's standard library."""

import os
from pathlib import Path
from typing import Any


def standard_library(files: int | None = None, most: int | None = None) -> Any:
    """Its modules one after another, a tensor of bytes (int64).

    Args:
        files: only so many of them.
        most: only so many bytes.
    """
    import torch

    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
    return torch.tensor(list(b"".join(path.read_bytes() for path in modules)[:most]), dtype=torch.long)
