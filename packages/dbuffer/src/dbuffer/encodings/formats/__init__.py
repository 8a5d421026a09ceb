"""Formats of quantized blocks: FP8, int8 and NF4."""
