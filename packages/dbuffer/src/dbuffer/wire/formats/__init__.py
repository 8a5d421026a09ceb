"""Formats of quantized blocks: FP8, int8, NF4 and NVFP4."""
