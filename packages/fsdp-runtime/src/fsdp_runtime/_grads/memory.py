"""The buffer that a group's gradients are reduced from, and where in it each of them lies.

all tensors trained     the parameters' own layout: a gradient is one view
some frozen since       only the trained ones travel: a gradient is a view for each rank that holds some of it
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch

from dbuffer import DBuffer
from layout_planner import Layout

from .. import _torch_compat as compat
from .._plan.group import GroupPlan, trained_layout
from .._torch.streams import Streams


class GradientMemory:
    """Memory for the gradients of all tensors of a group.

    Attributes:
        indices: the numbers of the tensors that have a place here.
        buffer: gathered memory to write gradients to, and the shard that a reduction brings.
    """

    def __init__(self, name: str, plan: GroupPlan, streams: Streams) -> None:
        self._name, self._plan, self._streams = name, plan, streams
        self._reductions = 0
        self.indices: Collection[int] = range(len(plan.params))

    @cached_property
    def buffer(self) -> DBuffer:
        """Made at the first use."""
        buffer = DBuffer(
            self._layout(),
            self._plan.data.mesh,
            full_dtype=self._plan.dtypes.reduce,
            recycler=self._streams.recycler,
            alias=False,
            name=f"gradients of {self._name}",
            check_ranks=False,
            **self._plan.buffer_options(),
        )
        buffer.give_shard()
        buffer.reductions = self._reductions
        return buffer

    def _layout(self) -> Layout:
        return self._plan.layout

    @cached_property
    def _views(self) -> list[torch.Tensor]:
        return list(self.buffer.empty_views.values())

    def rename(self, name: str) -> None:
        """Call the memory by the unit's new name."""
        self._name = name
        if "buffer" in self.__dict__:
            self.buffer.name = f"gradients of {name}"

    def count_reductions_from(self, count: int) -> None:
        """Continue the buffer's `reductions` from another number."""
        self._reductions = count
        if "buffer" in self.__dict__:
            self.buffer.reductions = count

    def put(self, index: int, grad: torch.Tensor, scale: float) -> None:
        """Write a gradient, times `scale`."""
        if scale == 1.0:
            self._views[index].copy_(grad)
        else:
            _write(self._views[index], grad, scale)

    def put_all(self, grads: Mapping[int, torch.Tensor], scale: float) -> None:
        """Write gradients by their tensors' numbers, times `scale`."""
        if scale == 1.0:
            compat.copy(list(map(self._views.__getitem__, grads)), list(grads.values()))
            return
        for index, grad in grads.items():
            self.put(index, grad, scale)

    def add(self, index: int, grad: torch.Tensor, scale: float) -> None:
        """Add a gradient, times `scale`, to what is there."""
        self._views[index].add_(grad, alpha=scale)

    def zero(self, indices: Collection[int]) -> None:
        """Set the gradients of these tensors to zero."""
        compat.zero([self._views[index] for index in indices])

    def locals(self) -> Sequence[torch.Tensor]:
        """This rank's slices of the reduced gradients, in their local shapes, by the tensors' numbers."""
        return tuple(self.buffer.local_views.values())


class TrainedMemory(GradientMemory):
    """Memory for the gradients of some tensors of a group; see `_plan.trained_layout`."""

    def __init__(self, name: str, plan: GroupPlan, streams: Streams, trained: frozenset[int]) -> None:
        super().__init__(name, plan, streams)
        self.indices = trained

    def _layout(self) -> Layout:
        return trained_layout(self._plan.layout, frozenset(self.indices))

    @cached_property
    def _runs(self) -> dict[int, list[tuple[int, torch.Tensor]]]:
        """For each tensor its runs: the first element, and the memory."""
        layout, views = self._plan.layout, self.buffer.empty_views
        runs: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index in self.indices:
            name = self._plan.params[index].name
            for rank in range(layout.world_size):
                if (view := views.get(f"{name}@{rank}")) is not None:
                    runs.setdefault(index, []).append((layout.local_range(name, rank)[0], view))
        return runs

    def put(self, index: int, grad: torch.Tensor, scale: float) -> None:
        """Write a gradient, times `scale`."""
        flat = grad.reshape(-1)
        for start, view in self._runs[index]:
            _write(view, flat.narrow(0, start, view.numel()), scale)

    def put_all(self, grads: Mapping[int, torch.Tensor], scale: float) -> None:
        """Write gradients by their tensors' numbers, times `scale`."""
        for index, grad in grads.items():
            self.put(index, grad, scale)

    def add(self, index: int, grad: torch.Tensor, scale: float) -> None:
        """Add a gradient, times `scale`, to what is there."""
        flat = grad.reshape(-1)
        for start, view in self._runs[index]:
            view.add_(flat.narrow(0, start, view.numel()), alpha=scale)

    def zero(self, indices: Collection[int]) -> None:
        """Set the gradients of these tensors to zero."""
        compat.zero([view for index in indices for _, view in self._runs[index]])

    def locals(self) -> Sequence[torch.Tensor]:
        """This rank's slices of the reduced gradients, in their local shapes; empty for tensors without a place."""
        views, rank = self.buffer.local_views, self._plan.geometry.rank
        nothing = self.buffer.shard[0].narrow(0, 0, 0)
        found = []
        for name, known in self._plan.geometry.slices.items():
            view = views.get(f"{name}@{rank}")
            empty = (0, *known.local_shape[1:])
            found.append(nothing.view(empty) if view is None else view.view(known.local_shape))
        return found


def _write(view: torch.Tensor, grad: torch.Tensor, scale: float) -> None:
    if scale == 1.0:
        view.copy_(grad)
    elif view.dtype == grad.dtype:
        torch.mul(grad, scale, out=view)
    else:
        view.copy_(grad).mul_(scale)
