"""8-bit states: codes, blocks, and the step over them."""
