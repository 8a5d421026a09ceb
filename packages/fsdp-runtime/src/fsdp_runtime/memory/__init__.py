"""Memory of units: predicted, measured, or in CPU memory."""

from .._torch_compat import fake_tensors
from ..offload_policy import SelectiveOffloadPolicy
from .meter import LiveBytes, StepMeter
from .units import UnitMemory, gathered_memory, unit_memory

__all__ = [
    "LiveBytes",
    "SelectiveOffloadPolicy",
    "StepMeter",
    "UnitMemory",
    "fake_tensors",
    "gathered_memory",
    "unit_memory",
]
