"""Memory of units: predicted, measured, kept within a budget or in CPU memory."""

from .._torch_compat import fake_tensors, has_memory_snapshots
from ..offload_policy import SelectiveOffloadPolicy
from .meter import LiveBytes, StepMeter
from .snapshots import memory_history, save_memory_snapshot
from .tune import BudgetError, Tuning, tune
from .units import UnitMemory, gathered_memory, unit_memory

__all__ = [
    "BudgetError",
    "LiveBytes",
    "SelectiveOffloadPolicy",
    "StepMeter",
    "Tuning",
    "UnitMemory",
    "fake_tensors",
    "gathered_memory",
    "has_memory_snapshots",
    "memory_history",
    "save_memory_snapshot",
    "tune",
    "unit_memory",
]
