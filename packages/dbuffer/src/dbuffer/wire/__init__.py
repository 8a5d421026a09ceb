"""In which encoding a gather or a reduction travels."""

from .form import CastOnWire, Encoder, WireForm
from .reduction import CastReduction, Reducer, ReductionForm

__all__ = ["CastOnWire", "CastReduction", "Encoder", "Reducer", "ReductionForm", "WireForm"]
