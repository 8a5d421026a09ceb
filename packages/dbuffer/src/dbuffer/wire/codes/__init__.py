"""Codes instead of values: in gathers, at rest, and the tensors that show them."""
