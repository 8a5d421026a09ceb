"""Gradients on their way out of backward: into the groups' buffers, and through reductions.

A reduction:

LAUNCHED     a reduce-scatter over the shard axis is under way; it uses the gathered gradient memory
FREED        it has completed, and that memory is free
REPLICATED   the all-reduce over replicas (HSDP) was started, or the user's hook has run where there are none
(published)  that has completed too (with replicas the hook runs now), and `.grad` is set

Whether a reduction is LAUNCHED or FREED may depend on timing, and differ between ranks. All-reduces and hooks, which
may communicate, start in the order of the reductions and at points that the program fixes, the same on all ranks.
"""

import contextlib
import enum
import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from dbuffer import AllReduce, DBuffer, Handle

from .._grads.buffer import WRITABLE, Closed, GradBuffer
from .._grads.missing import Missing
from .._grads.scaling import AllReduceHook, Scaling
from .._params.group import Group
from .._params.unit import Param, Unit, label
from .._plan.mesh import DataMesh
from .._torch.streams import Streams

_COMPLETED = operator.attrgetter("completed")


class ReductionState(enum.Enum):
    """See above."""

    LAUNCHED = enum.auto()
    FREED = enum.auto()
    REPLICATED = enum.auto()


class Reduction:
    """An in-flight reduction of some groups of one unit. The constructor launches it.

    Attributes:
        unit, groups: the reduced unit and groups.
        stays_partial: whether there are replicas, and their sum is left to a later one.
        updates: whether parameters are updated as soon as their gradients are there.
        state: see `ReductionState`.
    """

    def __init__(self, unit: Unit, groups: list[Group], streams: Streams, *, updates: bool) -> None:
        self.unit, self.groups, self.updates = unit, groups, updates
        options = unit.options
        self.state = ReductionState.LAUNCHED
        self._options = options.reduction
        self._shows_all = options.reduce_unused or options.reduction.hook is not None
        self._streams = streams
        self._event: Any = None
        self._closed: list[Closed] = []
        self._missing: dict[Group, Missing] = {}  # of groups for which other ranks decide what gets a `.grad`
        # Buffers on meshes without replicas, and with them.
        self._sharded: list[tuple[DBuffer, Scaling]] = []
        self._replicated: list[tuple[DBuffer, Scaling]] = []
        calls: dict[tuple[Any, ...], tuple[GradBuffer, list[DBuffer]]] = {}  # one per mesh and scaling
        for group in groups:
            gradients, data = group.gradients, group.plan.data
            key = (data, gradients.scaling, gradients.partial)
            closed = gradients.close(stays_partial=data.hybrid and not self._options.all_reduce)
            self._closed.append(closed)
            if closed.missing:
                self._publish_missing(group, closed)
            buffer = closed.slots.buffer
            calls.setdefault(key, (gradients, []))[1].append(buffer)
            (self._replicated if data.hybrid else self._sharded).append((buffer, gradients.scaling))
        self.stays_partial = bool(self._replicated) and not self._options.all_reduce
        self._handles: list[Handle] = []
        with label("post_backward_reduce", unit.name):
            for (_, _, partial), (first, buffers) in calls.items():
                call = first.reduction_of(buffers, options.reduce_by, options.separate_reductions)
                self._handles.append(call.start(accumulate=partial, stream=streams.reduce))

    def _publish_missing(self, group: Group, closed: Closed) -> None:
        """Publish which parameters have no gradient on this rank, if other ranks decide whether they get one.

        Raises:
            RuntimeError: they do, and the store does not answer.
        """
        data = group.plan.data
        stays_partial = data.hybrid and not self._options.all_reduce
        if self._shows_all or stays_partial or closed.used_anywhere is not None:
            return
        names = {param.index: f"{param.name} of {group.name}" for param in closed.missing}
        key = f"{group.name} {closed.number}"
        missing = self._missing[group] = Missing(data, group.gradients.ledger, key, names)
        group.gradients.published = missing
        missing.publish()

    def _unused(self, group: Group, closed: Closed) -> Collection[int]:
        """Numbers of the missing parameters that get no `.grad`. The reduction has completed on its stream."""
        if closed.used_anywhere is not None:
            return [param.index for param in closed.missing if param.index not in closed.used_anywhere]
        missing = self._missing.get(group)
        if missing is None:
            return ()
        if missing.asks:
            self._streams.layer.wait_on_host(self._event)  # then every rank has published
        unused = missing.unused()
        group.gradients.published = None
        return unused

    @property
    def completed(self) -> bool:
        """Whether the reduce-scatter has completed. Does not block."""
        return all(map(_COMPLETED, self._handles))

    def free(self) -> None:
        """Wait for the reduce-scatter on its own stream, and free the gathered gradient memory. Once."""
        if self.state is not ReductionState.LAUNCHED:
            return
        layer = self._streams.layer
        handles, self._handles = self._handles, []
        with layer.on(self._streams.reduce, ()):
            for handle in handles:
                handle.wait()
            for group, closed in zip(self.groups, self._closed, strict=True):
                group.gradients.free(closed)
            self._event = layer.record()
        self.state = ReductionState.FREED

    def replicate(self) -> None:
        """Call the user's hook, or where there are replicas start the all-reduce over them. Once, after `free`."""
        if self.state is ReductionState.REPLICATED:
            return
        self.free()
        self.state = ReductionState.REPLICATED
        layer = self._streams.layer
        if self._options.hook is not None and self._sharded:
            with layer.on(self._streams.reduce, ()):
                self._call_hook(self._options.hook, self._sharded)
                self._event = layer.record()
        if not self._replicated or self.stays_partial:
            return
        with layer.on(self._streams.reduce, ()), label("post_backward_all_reduce", self.unit.name):
            for buffer, how in self._replicated:
                reduction = AllReduce([buffer], how.replica_op, how.replica_divide)
                self._handles.append(reduction.start())

    def _call_hook(self, hook: AllReduceHook, reduced: list[tuple[DBuffer, Scaling]]) -> None:
        """Call the user's hook with the shards of these groups."""
        layer = self._streams.layer
        if any(buffer.offloaded for buffer, _ in reduced):
            layer.wait_on_host(layer.record())  # the hook may read copies from the device
        with layer.on(self._options.hook_stream):
            for buffer, _ in reduced:
                for shard in buffer.shard:
                    hook(shard)
            done = layer.record()
        layer.wait(done)

    def publish(self) -> None:
        """Wait for all of it and show the gradients."""
        self.replicate()
        layer = self._streams.layer
        if self._handles:
            with layer.on(self._streams.reduce, ()):
                for handle in self._handles:
                    handle.wait()
                if self._options.hook is not None and self._replicated:
                    self._call_hook(self._options.hook, self._replicated)
                self._event = layer.record()
        layer.wait(self._event)
        if self.groups[0].plan.offload is not None:
            layer.wait_on_host(self._event)  # the CPU reads copies from the device
        for group, closed in zip(self.groups, self._closed, strict=True):
            group.expect_update()
            if not group.gradients.partial:
                group.gradients.publish(closed, self._unused(group, closed) if closed.missing else ())

    def abandon(self) -> None:
        """Wait, ignoring failures, and free the gathered gradient memory: a failed iteration is being cleared away."""
        layer = self._streams.layer
        with layer.on(self._streams.reduce, ()):
            for handle in self._handles:
                with contextlib.suppress(RuntimeError):  # the failure that is being recovered from
                    handle.wait()
            if self.state is ReductionState.LAUNCHED:
                for closed in self._closed:
                    closed.slots.buffer.release()
            self._event = layer.record()
        if self.groups[0].plan.offload is not None:  # memory of the host is given back
            layer.wait_on_host(self._event)
        else:
            layer.wait(self._event)


def find_used_anywhere(groups: list[Group]) -> None:
    """Set `GradBuffer.used_anywhere` of groups. One all-reduce of a byte a parameter for each axis of their meshes."""
    by_mesh: dict[DataMesh, list[GradBuffer]] = {}
    for group in groups:
        if group.gradients.trained:
            by_mesh.setdefault(group.plan.data, []).append(group.gradients)
    for data, members in by_mesh.items():
        numbers = [(own, index) for own in members for index in sorted(own.trained)]
        flags = torch.tensor([index in own.written for own, index in numbers], dtype=torch.uint8)
        flags = flags.to(data.device)
        for ranks in data.groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=ranks)
        used: dict[GradBuffer, set[int]] = {own: set(own.used_anywhere or ()) for own in members}
        for (own, index), flag in zip(numbers, flags.tolist(), strict=True):
            if flag:
                used[own].add(index)
        for own, indices in used.items():
            own.used_anywhere = frozenset(indices) or None


class Backward:
    """The reductions of one model.

    Attributes:
        waiting: the units with gradients that no reduction has taken.
        partial: the units with sums that wait to be taken over replicas (HSDP).
        is_last: whether the end of backward waits for all reductions and shows the gradients.
        by_hand: whether `finalize_backward` does that instead.
        max_reductions: how many may use gathered gradient memory at once.
        slow_wire: treat each reduction as pending until the next one starts: the most memory that timing can take.
        updated: the units whose parameters an optimizer in backward has updated in this one.
    """

    def __init__(self, streams: Streams) -> None:
        self.is_last = True
        self.by_hand = False
        self.max_reductions = 1
        self.slow_wire = False
        self.waiting: set[Unit] = set()
        self.partial: set[Unit] = set()
        self._streams = streams
        self._queue: list[Reduction] = []  # in the order of their launches
        self._flying: list[Reduction] = []  # reductions that may use gathered memory
        self._of_group: dict[Group, Reduction] = {}
        self.updated: set[Unit] = set()  # in this backward

    @property
    def ends_step(self) -> bool:
        """Whether the end of backward shows the gradients."""
        return self.is_last and not self.by_hand

    def begin(self) -> None:
        """A run of the autograd engine has reached the model."""
        self.updated = set()

    def check_not_updated(self, unit: Unit) -> None:
        """Raise RuntimeError if this backward updates the parameters with fewer gradients than it computes."""
        if unit in self.updated or any(other.unit is unit and other.updates for other in self._queue):
            raise RuntimeError(
                f"optimizer_in_backward: backward reaches {unit.name} again after its parameters were updated; a unit "
                "that forward runs several times, or whose outputs get gradients at different times, needs an "
                "optimizer after backward"
            )

    # -- gradients --------------------------------------------------------------------------------------------------

    def accept(self, unit: Unit, param: Param) -> None:
        """A gradient has been accumulated: write it into the buffer and free it."""
        unsharded = param.unsharded
        assert unsharded is not None
        grad, unsharded.grad = unsharded.grad, None
        if grad is None:
            return
        if grad.requires_grad:  # create_graph: the buffer is not part of the graph
            grad = grad.detach()
        if type(grad) is not torch.Tensor:
            grad = param.plain_gradient(grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        group = param.group
        gradients = group.gradients
        if gradients.state not in WRITABLE:
            self._make_room(group)
            self.waiting.add(unit)
        gradients.write(param.index, grad)

    def _make_room(self, group: Group) -> None:
        """Wait until the group's gradient buffer is free, then let it accept gradients."""
        self.free_completed()
        using = self._of_group.get(group)
        if using is not None:
            using.free()
        group.gradients.accept()

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, unit: Unit, groups: list[Group]) -> None:
        """Start a reduction, after limiting the number in flight to `max_reductions`."""
        if not groups:
            return
        self.waiting.discard(unit)
        updates = self.is_last and unit.options.update is not None
        if updates:
            self.check_not_updated(unit)
        for group in groups:
            earlier = self._of_group.get(group)
            if earlier is not None:
                self._publish_up_to(earlier)
        while updates and len(self._queue) >= self.max_reductions:
            self._publish_up_to(self._queue[0])
        while len(self._flying) >= self.max_reductions:
            self._flying.pop(0).replicate()
        reduction = Reduction(unit, groups, self._streams, updates=updates)
        (self.partial.add if reduction.stays_partial else self.partial.discard)(unit)
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
            if reduction.updates:
                self.updated.add(reduction.unit)
                reduction.unit.update()

    def abandon(self) -> None:
        """Forget all reductions, and ignore how they end."""
        queue, self._queue = self._queue, []
        self._flying = []
        self._of_group.clear()
        self.waiting.clear()
        self.partial.clear()
        for reduction in queue:
            reduction.abandon()
