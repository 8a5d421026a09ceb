"""Memory of units."""

from .._torch_compat import fake_tensors
from ..offload_policy import SelectiveOffloadPolicy
from .units import UnitMemory, gathered_memory, unit_memory

__all__ = [
    "SelectiveOffloadPolicy",
    "UnitMemory",
    "fake_tensors",
    "gathered_memory",
    "unit_memory",
]
