"""One parameter as an optimizer sees it: the global tensor's name and shape, and this rank's elements.

Plain tensors, DTensors of torch (FSDP2's uneven `Shard(0)` too) and RaggedDTensors look the same to an optimizer:

    global tensor (5, 4), flattened   0 . . . . . . . . . . . . . . . . . . 19
    this rank's run                           [start            stop)
    local                                      (2, 4), plain, the parameter's own memory
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from block_optim.core._torch_compat import SHARDS, local_of, share_layout
from block_optim.core.holding import (
    Holding,
    Range,
    copies_on,
    cutting_axes,
    first_element,
    holding_of,
    wrap_local,
)
from block_optim.core.runs import is_dense
from layout_planner import Block, TensorSpec
from ragged_shard import RaggedDTensor, RaggedShard
from ragged_shard.dist import DISTRIBUTED

Group = dict[str, Any]  # a parameter group: "params" and options, as torch's optimizers have them


class Param:
    """A parameter: its name, options and global shape, and this rank's elements.

    Attributes:
        tensor: the tensor given to the constructor; the key of `optimizer.state`.
        name: from named parameters, else made of its index and shape; for messages and for seeds.
        group: its parameter group, the dict in `optimizer.param_groups`.
        shape: of the global tensor.
        mesh: its DeviceMesh, or None for a plain tensor.
        placements: one for each mesh axis; () for a plain tensor.
        start: the first element of this rank's run in the flattened global tensor, or None where its elements are
            not one run (a `Shard(1)`, say).
        local_shape: of this rank's elements when the optimizer was given the parameter.
        states: its entry of `optimizer.state` as `init_states` made it; None: it has no states.
        replicas: the mesh whose ranks divide the work on it where each of them holds all of it; None: they do not.
    """

    def __init__(
        self, tensor: torch.Tensor, name: str, group: Group | None = None, replicas: DeviceMesh | None = None
    ) -> None:
        self.tensor, self.name, self.replicas = tensor, name, replicas
        self.group: Group = {} if group is None else group
        self.shape = torch.Size(tensor.shape)
        self.states: Any = None
        self._holding: Holding | None = None
        self.mesh: DeviceMesh | None = None
        self.placements: tuple[Placement, ...] = ()
        if isinstance(tensor, DISTRIBUTED):
            self.mesh, self.placements = tensor.device_mesh, tuple(tensor.placements)
            if any(isinstance(p, Partial) for p in self.placements):
                raise ValueError(
                    f"{name}: a parameter with placements {self.placements} awaits a reduction; reduce it"
                )
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point parameter, got {tensor.dtype}")
        self.start = first_element(tensor)
        self.local_shape, self._layout = local_of(tensor).shape, _layout_of(tensor)

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements: plain, detached, the parameter's own memory. May be empty."""
        return local_of(self.tensor).detach()

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameter."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Device of the local tensor."""
        return local_of(self.tensor).device

    @property
    def holding(self) -> Holding:
        """Each rank's elements, over all axes that cut it; ValueError unless these are Ragged, Shard and Replicate."""
        if self._holding is None:
            self._holding = holding_of(self.name, self.shape, self.mesh, self.placements)
        return self._holding

    def work_holding(self, units: Sequence[Sequence[Range]] | None = None) -> Holding:
        """`holding` of the ranks that divide the work on the parameter.

        Without the axes that leave each of ``units`` on one of their ranks (see `core.holding`); of all ranks of
        `replicas` where no rank holds less than the others.
        """
        holding = self.holding
        if units is not None and len(holding.axes) > 1:
            holding = holding_of(self.name, self.shape, self.mesh, self.placements, units)
        return copies_on(self.replicas, holding)

    def local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a gradient of this parameter, plain.

        Raises:
            ValueError: a gradient in another layout than its parameter.
            RuntimeError: a sparse gradient.
        """
        own = self.tensor
        if (
            not share_layout(grad, own)
            and isinstance(grad, DISTRIBUTED)
            and (grad.device_mesh != self.mesh or tuple(grad.placements) != self.placements)
        ):
            raise ValueError(
                f"{self.name}: its gradient has placements {tuple(grad.placements)}, the parameter {self.placements}; "
                "redistribute the gradient"
            )
        local = local_of(grad)
        if local.layout is not torch.strided:
            raise RuntimeError(f"{self.name}: sparse gradients are not supported; use sparse=False")
        if local.shape != self.local_shape:
            self.check_layout()
            raise ValueError(
                f"{self.name}: its gradient's local tensor has shape {tuple(local.shape)}, the parameter's "
                f"{tuple(self.local_shape)}"
            )
        return local

    def check_layout(self) -> None:
        """Raise ValueError if the tensor has another layout than when the optimizer was given it."""
        if (now := _layout_of(self.tensor)) != self._layout:
            raise ValueError(
                f"{self.name}: it has {_differences(now, self._layout)}, and had {_differences(self._layout, now)} "
                "when its states were made (its .data was set, or its module moved or cast); build a new optimizer"
            )

    def wrap(
        self,
        local: torch.Tensor,
        shape: Sequence[int] | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> torch.Tensor:
        """A state of the parameter's global shape and placement, or of others, around this rank's elements of it.

        Shares the memory of `local`. Communicates nothing.
        """
        ragged = isinstance(self.tensor, RaggedDTensor)
        placements = self.placements if placements is None else placements
        return wrap_local(local, self.mesh, placements, self.shape if shape is None else shape, ragged)

    def zeros(self, dtype: torch.dtype | None = None, *, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A state of zeros of the parameter's global shape and placement, in the dtype of `local` or another.

        With a ``shape`` whose leading dimensions are the parameter's cut ones, such as one number for each
        row, it is cut as the parameter is. Any other shape belongs to the rank that holds the whole parameter: its
        local tensor has all elements there, flattened, and none on other ranks.

        Raises:
            ValueError: another shape, and no rank holds the whole parameter.
        """
        if shape is None:
            return self.wrap(torch.zeros_like(self.local, dtype=dtype))
        local = self.local
        options: Any = {"dtype": dtype or local.dtype, "device": local.device}
        flattened = [len(p.dims) for p in self.placements if isinstance(p, RaggedShard)]
        depth = max([*flattened, *(p.dim + 1 for p in self.placements if isinstance(p, SHARDS))], default=0)
        if tuple(shape[:depth]) == tuple(self.shape[:depth]) and 0 not in flattened:
            kept = local.shape[: depth + 1 - sum(flattened or [1])]
            return self.wrap(torch.zeros((*kept, *shape[depth:]), **options), shape)
        holding, numel = self.holding, math.prod(shape)
        owners = [sum(piece.numel for piece in pieces) == self.numel for pieces in holding.by_rank]
        if not any(owners):
            raise ValueError(
                f"{self.name}: a state of shape {tuple(shape)} cannot be cut as the parameter of shape "
                f"{tuple(self.shape)} is, and no rank holds the whole parameter. Set requires_blocks = True, return "
                "Whole() from block_of, and pass block_policy() to fully_shard"
            )
        lengths = [numel if rank == owners.index(True) else 0 for rank in range(len(owners))]
        own = torch.zeros(lengths[holding.rank], **options)
        return holding.state(own, shape, lengths)

    def check_state(self, key: str, value: Any) -> None:
        """Raise ValueError if a state is plain although ranks hold different elements of the parameter."""
        plain = isinstance(value, torch.Tensor) and value.ndim > 0 and not isinstance(value, DISTRIBUTED)
        if plain and cutting_axes(self.mesh, self.placements):
            raise ValueError(
                f"{self.name}: state {key!r} is a plain tensor of shape {tuple(value.shape)}, and the parameter has "
                f"placements {self.placements}: checkpoints would keep one rank's. Make it in init_states, by "
                "p.zeros(dtype, shape=...)"
            )

    def check_whole(self, block: Block, optimizer: str) -> None:
        """Raise ValueError if a rank's elements begin or end inside a block."""
        grid = TensorSpec(self.name, tuple(self.shape), block).grid
        for pieces in self.holding.by_rank:
            for piece in pieces:
                ends = piece.first, piece.first + piece.width
                if not all(grid.are_cuts(end, piece.stride, piece.rows) for end in ends):
                    raise ValueError(
                        f"{self.name}: its placements {self.placements} cut {block!r}, which {optimizer} needs whole "
                        f"on a rank; pass block_policy={optimizer}.block_policy() to fully_shard"
                    )

    def check_dense(self) -> None:
        """Raise ValueError unless the local tensor fills its memory without holes."""
        if not is_dense(self.local):
            raise ValueError(
                f"{self.name}: its memory has holes (shape {tuple(self.local.shape)}, stride {self.local.stride()}); "
                "make it contiguous() first"
            )

    def check_row_major(self) -> None:
        """Raise ValueError unless the local tensor is contiguous."""
        if not self.local.is_contiguous():
            raise ValueError(
                f"{self.name}: its memory is not row-major (shape {tuple(self.local.shape)}, stride "
                f"{self.local.stride()}); make it contiguous() before the optimizer is built"
            )

    def __repr__(self) -> str:
        return f"Param({self.name!r}, {tuple(self.shape)}, {self.placements})"


def same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two lists have the very same objects; tensors are not compared."""
    return len(first) == len(second) and all(map(operator.is_, first, second))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: of dimensions longer than 1; none of an empty tensor."""
    if not tensor.numel():
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _layout_of(tensor: Any) -> dict[str, Any]:
    """The properties of a parameter that its states depend on, by name."""
    local = local_of(tensor)
    return {
        "shape": tuple(tensor.shape),
        "placements": tuple(getattr(tensor, "placements", ())),
        "local shape": tuple(local.shape),
        "local strides": strides_of(local),
        "precision": "double" if tensor.dtype == torch.float64 else "single or lower",
        "memory": "none (meta)" if local.is_meta else "its own",
    }


def _differences(layout: dict[str, Any], other: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in layout.items() if value != other[name])
