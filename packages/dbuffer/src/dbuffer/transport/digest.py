"""What ranks that exchange tensors must have in common, in a few bytes."""

import hashlib
from collections.abc import Sequence

import torch

DIGEST_BYTES = 16


def digest(number: int, label: str, tensors: Sequence[torch.Tensor]) -> bytes:
    """Of the exchange's number, what it is, and dtype and size of each tensor."""
    text = f"{number} {label} {[(str(tensor.dtype), tensor.numel()) for tensor in tensors]}"
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
