"""Memory of units, and activations in CPU memory."""

from .._torch_compat import fake_tensors
from .activations import OffloadActivations
from .units import UnitMemory, gathered_memory, unit_memory

__all__ = [
    "OffloadActivations",
    "UnitMemory",
    "fake_tensors",
    "gathered_memory",
    "unit_memory",
]
