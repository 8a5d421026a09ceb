"""Gradient reductions under way.

LAUNCHED     a reduce-scatter over the shard axis is under way; it uses the gathered gradient memory
FREED        it has completed, and that memory is free
REPLICATED   the all-reduce over replicas (HSDP) was started
(published)  that has completed too, and `.grad` is set

Whether a reduction is LAUNCHED or FREED may depend on timing, and differ between ranks. All-reduces start in the
order of the reductions and at points that the program fixes, the same on all ranks.
"""

import enum
import operator
from typing import Any

from dbuffer import AllReduce, Handle

from .._grads.gradients import Gradients
from .._grads.memory import GradientMemory
from .._grads.scaling import AllReduceHook, Scaling
from .._params.group import Group
from .._params.unit import Param, Unit
from .._torch.labels import label
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
        unit, groups: those that are reduced.
        updates: whether parameters are updated as soon as their gradients are there.
        state: see `ReductionState`.
    """

    def __init__(self, unit: Unit, groups: list[Group], streams: Streams) -> None:
        self.unit, self.groups = unit, groups
        options = unit.options
        self.updates = options.update is not None
        self.state = ReductionState.LAUNCHED
        self._options = options.reduction
        self._unused = options.reduce_unused
        self._streams = streams
        self._event: Any = None
        self._used: list[list[Param]] = []
        self._memories: list[GradientMemory] = []
        # Of the groups on meshes without replicas, and with them.
        self._sharded: list[tuple[GradientMemory, Scaling]] = []
        self._replicated: list[tuple[GradientMemory, Scaling]] = []
        calls: dict[tuple[Any, ...], list[Gradients]] = {}  # one per mesh and scaling
        for group in groups:
            gradients, how = group.gradients, group.gradients.scaling
            calls.setdefault((group.plan.data, how, gradients.partial), []).append(gradients)
            self._used.append(gradients.close())
            self._memories.append(gradients.memory)
            reduced = self._replicated if group.plan.data.hybrid else self._sharded
            reduced.append((gradients.memory, how))
        self._handles: list[Handle] = []
        with label("post_backward_reduce", unit.name):
            for (_, _, partial), members in calls.items():
                call = members[0].reduction_of(members, options.reduce_by, options.separate_reductions)
                self._handles.append(call.start(accumulate=partial, stream=streams.reduce))

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
            for group, memory in zip(self.groups, self._memories, strict=True):
                partial = group.plan.data.hybrid and not self._options.all_reduce
                group.gradients.free(memory, partial=partial)
            if self._options.hook is not None:
                self._call_hook(self._options.hook, self._sharded)
            self._event = layer.record()
        self.state = ReductionState.FREED

    def replicate(self) -> None:
        """Start the all-reduce over replicas, if there are any. Once, after `free`."""
        if self.state is ReductionState.REPLICATED:
            return
        self.free()
        self.state = ReductionState.REPLICATED
        if not self._replicated or not self._options.all_reduce:
            return
        layer = self._streams.layer
        with layer.on(self._streams.reduce, ()), label("post_backward_all_reduce", self.unit.name):
            for memory, how in self._replicated:
                reduction = AllReduce([memory.buffer], how.replica_op, how.replica_divide)
                self._handles.append(reduction.start())

    def _call_hook(self, hook: AllReduceHook, reduced: list[tuple[GradientMemory, Scaling]]) -> None:
        """Call the user's hook with the shards of these groups."""
        if not reduced:
            return
        layer = self._streams.layer
        with layer.on(self._options.hook_stream):
            for memory, _ in reduced:
                for shard in memory.buffer.shard:
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
                if self._options.hook is not None:
                    self._call_hook(self._options.hook, self._replicated)
                self._event = layer.record()
        layer.wait(self._event)
        if self.groups[0].plan.offload is not None:
            layer.wait_on_host(
                self._event
            )  # the optimizer on the CPU reads what a copy from the device wrote
        for group, memory, used in zip(self.groups, self._memories, self._used, strict=True):
            if group.plan.wire is not None:
                group.forget_codes()
            if not group.gradients.partial:
                group.gradients.publish(memory, used, all_unused=self._unused)

    def abandon(self) -> None:
        """Wait whatever the outcome: a failed iteration is being cleared away."""
        for handle in self._handles:
            try:
                handle.wait()
            except RuntimeError:  # the failure that is being recovered from
                continue
