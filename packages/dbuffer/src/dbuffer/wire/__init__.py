"""In which encoding a gather travels."""

from .form import CastOnWire, Encoder, WireForm

__all__ = ["CastOnWire", "Encoder", "WireForm"]
