"""Gradient reductions under way.

launched    reduce-scatter inside the shard dimension
advance()   it has landed: gathered gradient memory is freed; the all-reduce over replicas starts (HSDP)
finish()    that has landed too: `.grad` is set
"""

from typing import TYPE_CHECKING, Any

import dbuffer
from dbuffer import Handle

from ._group import Group
from ._labels import label
from ._param import ManagedParam
from ._scaling import AllReduceHook, ReduceOptions

if TYPE_CHECKING:
    from ._context import Context


class Reduction:
    """The gradients of one unit on their way. Made by `launch`."""

    def __init__(
        self, context: "Context", unit: str, groups: list[Group], options: ReduceOptions, unused: bool
    ) -> None:
        self._context = context
        self._unit = unit
        self._groups = groups
        self._options = options
        self._unused = unused
        self._handles: list[Handle] = []
        self._used: list[list[ManagedParam]] = []
        self._event: Any = None

    def holds(self, group: Group) -> bool:
        """Whether this reduces the group's gradients."""
        return group in self._groups

    def shares(self, other: "Reduction") -> bool:
        """Whether both reduce gradients of one group."""
        return any(other.holds(group) for group in self._groups)

    @property
    def landed(self) -> bool:
        """Whether the reduce-scatter is over."""
        return all(handle.completed for handle in self._handles)

    def launch(self) -> None:
        """Start the reduce-scatter: one call for the unit (one for each mesh, and apart what is added to)."""
        context = self._context
        calls: dict[tuple[Any, ...], list[Group]] = {}
        for group in self._groups:
            self._used.append(group.gradients.close())
            add = group.gradients.take_up()
            calls.setdefault((group.data.mesh, add, group.scaling(self._options)), []).append(group)
        with label("post_backward_reduce", self._unit):
            for (_, add, how), groups in calls.items():
                buffers = [group.gradients.filled for group in groups]
                self._handles.append(
                    dbuffer.reduce_scatter(
                        buffers, op=how.op, divide=how.divide, accumulate=add, stream=context.reduce_stream
                    )
                )

    def advance(self) -> None:
        """Wait for the reduce-scatter, on its own stream, and start what follows. Once, before `finish`."""
        context, hook = self._context, self._options.hook
        handles, self._handles = self._handles, []
        with context.layer.on(context.reduce_stream, after=()):
            for handle in handles:
                handle.wait()
            for group in self._groups:
                across = group.data.hybrid and self._options.all_reduce
                group.gradients.reduced(everywhere=across or not group.data.hybrid)
            if hook is not None and not any(group.data.hybrid for group in self._groups):
                self._call_hook(hook)
            self._start_all_reduce()
            self._event = context.layer.record()

    def _start_all_reduce(self) -> None:
        if not self._options.all_reduce:
            return
        for group in self._groups:
            if group.data.hybrid:
                how = group.scaling(self._options)
                with label("post_backward_all_reduce", self._unit):
                    self._handles.append(
                        group.gradients.filled.all_reduce(op=how.replica_op, divide=how.replica_divide)
                    )

    def _call_hook(self, hook: AllReduceHook) -> None:
        context, stream = self._context, self._options.hook_stream
        with context.layer.on(stream):
            for group in self._groups:
                for shard in group.gradients.shards:
                    hook(shard)
            done = context.layer.record()
        context.layer.wait(done)

    def finish(self) -> None:
        """Wait for all of it and show the gradients."""
        context, hook = self._context, self._options.hook
        with context.layer.on(context.reduce_stream, after=()):
            for handle in self._handles:
                handle.wait()
            if hook is not None and self._options.all_reduce and any(g.data.hybrid for g in self._groups):
                self._call_hook(hook)
            self._event = context.layer.record()
        context.layer.wait(self._event)
        if any(group.offloaded for group in self._groups):
            self._event.synchronize()  # the optimizer on the CPU reads what a copy from the device wrote
        for group, used in zip(self._groups, self._used, strict=True):
            if not group.gradients.partial:
                group.gradients.publish(group.gradients.with_unused(used, self._unused))

    def abandon(self) -> None:
        """Wait without minding the outcome: a failed iteration is being cleared away."""
        for handle in self._handles:
            try:
                handle.wait()
            except RuntimeError:  # the failure that is being recovered from
                continue
