"""The profiler's labels: those of FSDP2, which tools look for."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from . import _torch_compat as compat

_OFF: AbstractContextManager[Any] = nullcontext()


def label(what: str, unit: str = "") -> AbstractContextManager[Any]:
    """A range `FSDP::<what> (<unit>)` in a profile; nothing while none is taken."""
    if not compat.profiling():
        return _OFF
    return torch.profiler.record_function(f"FSDP::{what} ({unit})" if unit else f"FSDP::{what}")
