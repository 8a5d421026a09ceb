"""Memory of units: predicted, measured, kept within a budget or in CPU memory."""

from .._torch_compat import fake_tensors
from ..offload_policy import SelectiveOffloadPolicy
from .meter import LiveBytes, StepMeter
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
    "tune",
    "unit_memory",
]
