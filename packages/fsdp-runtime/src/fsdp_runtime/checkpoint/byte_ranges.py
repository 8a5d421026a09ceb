"""Tensors of a checkpoint folder, of which any box is read by byte range into ordinary memory: nothing stays mapped.

Extent                one tensor, or one chunk of it, as raw bytes in a file
StoredTensors         all tensors of a folder, each of one or more extents
"""

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ragged_shard import Box

from .files import Checkpoint, Ints, Stored, read_header, whole

READ_BYTES = 1 << 24  # of a file at a time
_MAPPED = 1 << 18


def scratch(sizes: Ints, dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap | bytearray]:
    """A contiguous tensor of zeros, and the memory that it is in, which goes back to the kernel when both are gone.

    malloc would keep large blocks for good if small ones lie between them.
    """
    nbytes = math.prod(sizes) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping's pages would outlive MADV_DONTNEED
    memory = mmap.mmap(-1, nbytes, flags=flags) if nbytes >= _MAPPED else bytearray(nbytes)
    if not nbytes:
        return torch.empty(sizes, dtype=dtype), memory
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(sizes), memory


@dataclass(frozen=True)
class Extent:
    """Raw bytes of a box of a tensor.

    Attributes:
        file: path of the file.
        start: byte in the file at which the box's first element is.
        box: elements of the tensor.
        strides: of the box in the file, in elements.
    """

    file: Path
    start: int
    box: Box
    strides: Ints

    def read_into(self, out: torch.Tensor, part: Box) -> None:
        """Read a box inside of this one into `out`, of its shape and the stored dtype. Raises ValueError at the end."""
        wide = [dim for dim, size in enumerate(part.sizes) if size > 1]
        span = 1 + sum((part.sizes[dim] - 1) * self.strides[dim] for dim in wide)
        if span * out.element_size() > READ_BYTES and wide:
            dim = max(wide, key=lambda dim: self.strides[dim])
            offsets, sizes, half = list(part.offsets), list(part.sizes), part.sizes[dim] // 2
            offsets[dim] += half
            for at, size, begin in ((0, half, part.offsets), (half, sizes[dim] - half, tuple(offsets))):
                sizes[dim] = size
                self.read_into(out.narrow(dim, at, size), Box(begin, tuple(sizes)))
            return
        inside = zip(part.offsets, self.box.offsets, self.strides, strict=True)
        first = sum((offset - begin) * stride for offset, begin, stride in inside)
        values, memory = scratch((span,), out.dtype)
        with self.file.open("rb") as file:
            file.seek(self.start + first * out.element_size())
            if file.readinto(memory) != len(memory):
                raise ValueError(f"{self.file} is cut off: it ends before byte {file.tell() + 1}")
        out.copy_(values.as_strided(part.sizes, self.strides))


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a folder.

    Attributes:
        path: the folder or file.
        tensors: by name. Only names, shapes and dtypes count; those of DCP are on meta.
        left_out: how many tensors the folder has besides these, by the entry of the state dict that they belong to.
    """

    path: Path
    tensors: dict[str, Stored]
    extents_of: Callable[[str], list[Extent]] = field(repr=False)
    left_out: dict[str, int] = field(default_factory=dict)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor in ordinary memory. Raises ValueError if the files have not all of it, or have it twice."""
        out = scratch(box.sizes, self.tensors[name].dtype)[0]
        read: list[Box] = []
        for extent in self.extents_of(name):
            common = extent.box.intersection(box)
            if common is not None:
                if any(common.intersection(other) is not None for other in read):
                    raise ValueError(
                        f"{self.path}: {name} has elements from {common.offsets} of {common.sizes} twice"
                    )
                extent.read_into(out[common.slices(box.offsets)], common)
                read.append(common)
        if (covered := sum(common.numel for common in read)) != box.numel:
            raise ValueError(
                f"{self.path}: {name} has {covered} of the {box.numel} elements from {box.offsets} of size {box.sizes}"
            )
        return out


def safetensors_tensors(path: str | os.PathLike[str]) -> StoredTensors:
    """Tensors of a `.safetensors` file, an index, or a folder with either; see `Checkpoint` for errors."""
    tensors = Checkpoint(path).tensors  # the library checks each header against its file
    starts: dict[Path, dict[str, int]] = {}

    def extents_of(name: str) -> list[Extent]:
        stored = tensors[name]
        if stored.file not in starts:
            starts[stored.file] = read_header(stored.file)
        strides = tuple(torch.empty(stored.shape, device="meta").stride())
        return [Extent(stored.file, starts[stored.file][name], whole(stored.shape), strides)]

    return StoredTensors(Path(path), tensors, extents_of)
