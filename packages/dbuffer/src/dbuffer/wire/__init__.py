"""In which encoding a gather travels."""

from .form import CastOnWire, Encoder, Transfer, WireForm

__all__ = ["CastOnWire", "Encoder", "Transfer", "WireForm"]
