"""Gradients on their way out of backward: into the groups' buffers, and through the reductions that are under way."""

import torch

from . import _torch_compat as compat
from ._group import Group
from ._reduction import Reduction
from ._streams import Streams
from ._unit import Param, Unit

_NO_RUN = -1


class Backward:
    """The reductions of one model.

    Attributes:
        waiting: the units with gradients that no reduction has taken.
        is_last: whether the end of backward waits for all reductions and shows the gradients.
        max_reductions: how many may use gathered gradient memory at once.
    """

    def __init__(self, streams: Streams) -> None:
        self.is_last = True
        self.max_reductions = 1
        self.waiting: set[Unit] = set()
        self._streams = streams
        self._run = _NO_RUN
        self._queue: list[Reduction] = []  # in the order of their launches

    def begin(self) -> None:
        """A run of the autograd engine has reached the model."""
        self._run = compat.backward_id()

    # -- gradients --------------------------------------------------------------------------------------------------

    def accept(self, unit: Unit, param: Param) -> None:
        """A gradient has been accumulated: bring it into the buffer and free it."""
        if torch.is_grad_enabled():  # create_graph: the buffer is no part of the graph
            with torch.no_grad():
                return self._accept(unit, param)
        return self._accept(unit, param)

    def _accept(self, unit: Unit, param: Param) -> None:
        grad = param.take_grad()
        if grad is None:
            return
        group = param.group
        gradients = group.gradients
        last = unit.around_others and self._is_last_of(group, param)
        if last and unit.options.reshard_after_backward:
            unit.release_early(group)
        if not gradients.accepting:
            self._make_room(group)
            self.waiting.add(unit)
        gradients.write(param.index, grad)
        del grad
        # Ranks that use different parameters must not reduce at different times.
        options = unit.options
        if last and group.plan.large and options.requires_gradient_sync and not options.reduce_unused:
            self.reduce(unit, [one for one in unit.groups if _is_complete(one)])

    def _is_last_of(self, group: Group, param: Param) -> bool:
        """Whether this is the one gradient that the group still waits for.

        Not in a run inside a run (reentrant checkpoints): there more gradients of this parameter may come.
        """
        if compat.backward_id() != self._run:
            return False
        written = group.gradients.written
        return param.index not in written and _trained(group) - written == {param.index}

    def _make_room(self, group: Group) -> None:
        """Have gathered memory for a group's gradients, after what still uses it."""
        self.free_completed()
        for reduction in self._queue:
            if group in reduction.groups:
                reduction.free()
        group.gradients.accept()

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, unit: Unit, groups: list[Group]) -> None:
        """Start a reduction. So many are under way at most that gathered gradient memory is bounded."""
        if not groups:
            return
        self.waiting.discard(unit)
        self._publish([one for one in self._queue if any(group in one.groups for group in groups)])
        for earlier in self._queue[: max(len(self._queue) + 1 - self.max_reductions, 0)]:
            earlier.replicate()
        self._queue.append(Reduction(unit, groups, self._streams))

    def free_completed(self) -> None:
        """Free the gathered memory of reductions that have completed, before more is asked for."""
        for reduction in self._queue:
            if reduction.completed:
                reduction.free()

    def finish(self) -> None:
        """Wait for all reductions and show the gradients."""
        self._publish(list(self._queue))

    def _publish(self, reductions: list[Reduction]) -> None:
        for reduction in reductions:
            # All-reduces start in the order of the queue, on every rank.
            for earlier in self._queue[: self._queue.index(reduction)]:
                earlier.replicate()
            reduction.publish()
            self._queue.remove(reduction)

    def abandon(self) -> None:
        """Forget all reductions, whatever becomes of them."""
        queue, self._queue = self._queue, []
        self.waiting.clear()
        for reduction in queue:
            reduction.abandon()


def _trained(group: Group) -> set[int]:
    return {param.index for param in group.params if param.sharded.requires_grad}


def _is_complete(group: Group) -> bool:
    """Whether every parameter that is trained has a gradient in the buffer."""
    written = group.gradients.written
    return bool(written) and _trained(group) <= written
