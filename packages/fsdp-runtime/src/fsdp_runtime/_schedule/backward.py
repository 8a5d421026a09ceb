"""Gradients on their way out of backward: into the groups' buffers, and through the reductions that are under way."""

from typing import NoReturn

from .. import _torch_compat as compat
from .._params.group import Group
from .._params.unit import Param, Unit
from .._torch.streams import Streams
from .reduction import Reduction, ReductionState

_NO_RUN = -1


class Backward:
    """The reductions of one model.

    Attributes:
        waiting: the units with gradients that no reduction has taken.
        is_last: whether the end of backward waits for all reductions and shows the gradients.
        by_hand: whether `finalize_backward` does that instead.
        max_reductions: how many may use gathered gradient memory at once.
        slow_wire: count no reduction as completed before the next one begins: the most memory that timing can take.
        updated: the units whose parameters an optimizer in backward has updated in this one.
    """

    def __init__(self, streams: Streams) -> None:
        self.is_last = True
        self.by_hand = False
        self.max_reductions = 1
        self.slow_wire = False
        self.waiting: set[Unit] = set()
        self._streams = streams
        self._run = _NO_RUN
        self._queue: list[Reduction] = []  # in the order of their launches
        self._flying: list[Reduction] = []  # those that may use gathered memory
        self._of_group: dict[Group, Reduction] = {}
        self.updated: set[Unit] = set()  # in this backward

    def begin(self) -> None:
        """A run of the autograd engine has reached the model."""
        self._run = compat.backward_id()
        self.updated = set()

    def refuse_updated(self, unit: Unit) -> NoReturn:
        """A unit's parameters were updated in this backward, which needs them as they were in forward."""
        raise RuntimeError(
            f"optimizer_in_backward: backward reaches {unit.name} again after its parameters were updated; a unit "
            "that forward runs several times, or whose outputs get gradients at different times, needs an "
            "optimizer after backward"
        )

    # -- gradients --------------------------------------------------------------------------------------------------

    def accept(self, unit: Unit, param: Param) -> None:
        """A gradient has been accumulated: bring it into the buffer and free it."""
        unsharded = param.unsharded
        assert unsharded is not None
        grad, unsharded.grad = unsharded.grad, None
        if grad is None:
            return
        if grad.requires_grad:  # create_graph: the buffer is not part of the graph
            grad = grad.detach()
        if param.other is not None:
            grad = compat.local_of_dtensor_grad(grad, param.other.placements)
        if param.extension is not None:
            grad = param.plain(grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        group = param.group
        gradients = group.gradients
        last = unit.around_others and self._is_last_of(group, param)
        if last and unit.options.reshard_after_backward:
            unit.release_early(group)
        if not gradients.accepting:
            self._make_room(group)
            self.waiting.add(unit)
        gradients.write(param.index, grad, not unit.around_others)
        del grad
        # Ranks that use different parameters must not reduce at different times.
        options = unit.options
        differ = options.reduce_unused or unit.on_several_meshes or options.update is not None
        if last and group.plan.large and options.requires_gradient_sync and not differ:
            self.reduce(unit, [one for one in unit.groups if _is_complete(one)])

    def _is_last_of(self, group: Group, param: Param) -> bool:
        """Whether this is the one gradient that the group still waits for.

        Not in a run inside a run (reentrant checkpoints): there more gradients of this parameter may come.
        """
        if compat.backward_id() != self._run:
            return False
        written, trained = group.gradients.written, group.gradients.trained
        if len(trained) > len(written) + 1:
            return False
        return param.index not in written and trained - written == {param.index}

    def _make_room(self, group: Group) -> None:
        """Have gathered memory for a group's gradients, after what still uses it."""
        self.free_completed()
        using = self._of_group.get(group)
        if using is not None:
            using.free()
        group.gradients.accept()

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, unit: Unit, groups: list[Group]) -> None:
        """Start a reduction. So many are under way at most that gathered gradient memory is bounded."""
        if not groups:
            return
        self.waiting.discard(unit)
        for group in groups:
            earlier = self._of_group.get(group)
            if earlier is not None:
                self._publish_up_to(earlier)
        while self.is_last and len(self._queue) >= self.max_reductions and self._queue[0].updates:
            self._publish_up_to(self._queue[0])
        while len(self._flying) >= self.max_reductions:
            self._flying.pop(0).replicate()
        reduction = Reduction(unit, groups, self._streams)
        self._queue.append(reduction)
        self._flying.append(reduction)
        for group in groups:
            self._of_group[group] = reduction

    def free_completed(self) -> None:
        """Free the gathered memory of reductions that have completed, before more is asked for."""
        if self.slow_wire:
            return
        for reduction in self._flying:
            if reduction.state is ReductionState.LAUNCHED and reduction.completed:
                reduction.free()

    def finish(self) -> None:
        """Wait for all reductions and show the gradients."""
        if self._queue:
            self._publish_up_to(self._queue[-1])

    def _publish_up_to(self, last: Reduction) -> None:
        """Publish in the order of the launches, so that all-reduces start in the same order on every rank."""
        while last in self._queue:
            reduction = self._queue.pop(0)
            reduction.publish()
            if reduction in self._flying:
                self._flying.remove(reduction)
            for group in reduction.groups:
                del self._of_group[group]
            if self.is_last and reduction.updates:
                self.updated.add(reduction.unit)
                reduction.unit.update()

    def abandon(self) -> None:
        """Forget all reductions, whatever becomes of them."""
        queue, self._queue = self._queue, []
        self._flying = []
        self._of_group.clear()
        self.waiting.clear()
        for reduction in queue:
            reduction.abandon()


def _is_complete(group: Group) -> bool:
    """Whether every parameter that is trained has a gradient in the buffer."""
    written = group.gradients.written
    return bool(written) and group.gradients.trained <= written
