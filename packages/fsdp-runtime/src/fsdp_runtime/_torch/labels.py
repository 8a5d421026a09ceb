"""The profiler's labels: those of FSDP2, which tools look for."""

from contextlib import AbstractContextManager, nullcontext

import torch

from .._torch_compat import profiling

_OFF: AbstractContextManager[None] = nullcontext()


def label(what: str, unit: str = "") -> AbstractContextManager[object]:
    """A range `FSDP::<what> (<unit>)` in a profile; nothing while none is taken."""
    if not profiling():
        return _OFF
    return torch.profiler.record_function(f"FSDP::{what} ({unit})" if unit else f"FSDP::{what}")
