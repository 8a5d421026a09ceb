"""Memory of units; `memory.activations` keeps activations in CPU memory."""

from .._torch_compat import fake_tensors
from .units import UnitMemory, gathered_memory, unit_memory

__all__ = ["UnitMemory", "fake_tensors", "gathered_memory", "unit_memory"]
