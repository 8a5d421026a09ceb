"""A machine with GPUs and nothing but PyTorch."""
