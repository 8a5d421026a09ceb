"""One parameter as an optimizer sees it: the global tensor's name and shape, and this rank's part of it.

Plain tensors, DTensors of torch (FSDP2's uneven `Shard(0)` too) and RaggedDTensors look alike from here:

    global tensor (5, 4), flattened   0 . . . . . . . . . . . . . . . . . . 19
    this rank's run                           [start            stop)
    local                                      (2, 4), plain, the parameter's own memory
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from block_optim._torch_compat import DISTRIBUTED, local_of
from ragged_shard import RaggedDTensor


class Param:
    """A parameter, its name, its global shape, and where its local part lies.

    Attributes:
        param: the tensor that the user handed over; the key of `optimizer.state`.
        name: from named parameters, else made of its index and shape; for messages and for seeds.
        shape: of the global tensor.
        mesh: its DeviceMesh, or None for a plain tensor.
        placements: one for each mesh axis; () for a plain tensor.
        start: the first element of the local run in the flattened global tensor, or None where the local part is
            not one run (a `Shard(1)`, say).
    """

    __slots__ = ("mesh", "name", "param", "placements", "shape", "start")

    def __init__(self, param: torch.Tensor, name: str) -> None:
        self.param = param
        self.name = name
        self.shape = torch.Size(param.shape)
        self.mesh: DeviceMesh | None = None
        self.placements: tuple[Any, ...] = ()
        if isinstance(param, DISTRIBUTED):
            self.mesh, self.placements = param.device_mesh, tuple(param.placements)
            if any(isinstance(p, Partial) for p in self.placements):
                raise ValueError(
                    f"{name}: a parameter with placements {self.placements} awaits a reduction; reduce it"
                )
        if not param.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point parameter, got {param.dtype}")
        self.start = self._first_element()

    @property
    def local(self) -> torch.Tensor:
        """This rank's part: plain, detached, the parameter's own memory. May be empty."""
        return local_of(self.param).detach()

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.param.dtype

    @property
    def device(self) -> torch.device:
        """Where the local part is."""
        return local_of(self.param).device

    def local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient of this parameter, plain.

        Raises:
            ValueError: a gradient in another layout than its parameter.
            RuntimeError: a sparse gradient.
        """
        if isinstance(grad, DISTRIBUTED) and (
            grad.device_mesh != self.mesh or tuple(grad.placements) != self.placements
        ):
            raise ValueError(
                f"{self.name}: its gradient lies as {tuple(grad.placements)} and the parameter as {self.placements}; "
                "redistribute the gradient"
            )
        local = local_of(grad)
        if local.layout is not torch.strided:
            raise RuntimeError(f"{self.name}: sparse gradients are not supported; use sparse=False")
        if local.shape != local_of(self.param).shape:
            raise ValueError(
                f"{self.name}: its gradient's local part has shape {tuple(local.shape)}, the parameter's "
                f"{tuple(local_of(self.param).shape)}"
            )
        return local

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A state of the parameter's global shape around this rank's part of it: in the parameter's placement.

        Shares the memory of `local`. Communicates nothing.
        """
        return wrap_local(
            local, self.mesh, self.placements, self.shape, isinstance(self.param, RaggedDTensor)
        )

    def _first_element(self) -> int | None:
        if not isinstance(self.param, DISTRIBUTED) or all(isinstance(p, Replicate) for p in self.placements):
            return 0
        boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in self.param.__create_chunk_list__()]
        count = sum(math.prod(size) for _, size in boxes)
        if count != local_of(self.param).numel():
            return None
        if count == 0:
            return 0
        first = min(flat_offset(offset, self.shape) for offset, size in boxes if math.prod(size))
        last = max(
            flat_offset([o + s - 1 for o, s in zip(offset, size, strict=True)], self.shape)
            for offset, size in boxes
            if math.prod(size)
        )
        return first if last - first + 1 == count else None

    def __repr__(self) -> str:
        return f"Param({self.name!r}, {tuple(self.shape)}, {self.placements})"


def flat_offset(index: Sequence[int], shape: Sequence[int]) -> int:
    """Of an element in the row-major flattened tensor."""
    offset = 0
    for i, size in zip(index, shape, strict=True):
        offset = offset * size + i
    return offset


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, a dimension of size 0 counting as 1."""
    stride, running = [], 1
    for size in reversed(shape):
        stride.append(running)
        running *= max(size, 1)
    return tuple(reversed(stride))


def wrap_local(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Any],
    shape: Sequence[int],
    ragged: bool,
) -> torch.Tensor:
    """A global tensor of this shape around this rank's part; the plain part itself where there is no mesh."""
    if mesh is None:
        return local
    stride = contiguous_stride(shape)
    if ragged:
        return RaggedDTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
