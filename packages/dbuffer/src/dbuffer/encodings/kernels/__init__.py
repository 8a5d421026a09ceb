"""Encode and decode blocks: torch ops on the CPU, Triton kernels on a GPU, and the choice between them."""
