"""What ranks that exchange tensors must have in common, in a few bytes."""

import hashlib
from collections.abc import Sequence

import torch

DIGEST_BYTES = 16


def digest(what: str, tensors: Sequence[torch.Tensor]) -> bytes:
    """Of what is exchanged, and dtype and size of each tensor."""
    text = f"{what} {[(str(tensor.dtype), tensor.numel()) for tensor in tensors]}"
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
