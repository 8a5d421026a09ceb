"""Gradient buffers, and how gradients are scaled."""
