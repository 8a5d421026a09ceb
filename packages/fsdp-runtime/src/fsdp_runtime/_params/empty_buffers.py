"""Buffers on meta, or with memory of `to_empty` that nothing has written since: rotary tables are in no state dict."""

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from .. import _torch_compat as compat
from .digest import digest_of

# By id: the buffer, its version and a digest of its memory. A write through `.data`, or a collective,
# changes only this.
_empty: dict[int, tuple[weakref.ref[torch.Tensor], int, int | None]] = {}


def note_empty(modules: Iterable[nn.Module]) -> None:
    """The buffers of these modules have memory without values."""
    for module in modules:
        for buffer in module._buffers.values():
            if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided:
                continue  # unknown
            if buffer.numel() and not (buffer.is_meta or buffer.is_inference()):
                key = id(buffer)
                _mark(buffer)
                known = weakref.ref(buffer, partial(_empty.pop, key))
                _empty[key] = known, compat.VERSION(buffer), digest_of(buffer)


def _mark(buffer: torch.Tensor) -> None:
    """Write what no values are: new memory is often zeros, which a write that torch does not count may repeat."""
    other = 0xFF if buffer.is_floating_point() or buffer.is_complex() else 0xA5  # all ones are NaN
    buffer.detach().reshape(-1).view(torch.uint8).fill_(other)


def is_empty(buffer: torch.Tensor) -> bool:
    """Whether nothing has written to a buffer since `to_empty`."""
    known, version, digest = _empty.get(id(buffer), (None, 0, None))
    if known is None or known() is not buffer:
        return False
    return compat.VERSION(buffer) == version and digest_of(buffer) == digest


def empty_buffers(modules: Iterable[nn.Module]) -> list[str]:
    """Names of the buffers in these modules that have no values."""
    named = (pair for module in modules for pair in module.named_buffers())
    return [name for name, buffer in named if buffer.is_meta or is_empty(buffer)]
