"""Memory of units: predicted, measured, and kept within a budget."""

from .._torch_compat import fake_tensors
from .meter import LiveBytes, StepMeter
from .tune import BudgetError, Tuning, tune
from .units import UnitMemory, gathered_memory, unit_memory

__all__ = [
    "BudgetError",
    "LiveBytes",
    "StepMeter",
    "Tuning",
    "UnitMemory",
    "fake_tensors",
    "gathered_memory",
    "tune",
    "unit_memory",
]
