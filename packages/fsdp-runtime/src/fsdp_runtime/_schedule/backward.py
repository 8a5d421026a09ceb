"""Gradients on their way out of backward: into the groups' buffers, and through reductions.

    reduce-scatter          lane "reduce"        gathered gradients -> shards
    (all-reduce             lane "replicate"     over replicas, in the reduction's dtype)
    hook, divide, `.grad`   on the last lane     and the users' post-accumulate hooks

On a device all of it is queued when the reduction is launched. On a CPU the host waits and goes on at fixed points:

    F1  before a reduction is launched: the oldest one, until fewer than `max_reductions` remain
    F2  before the first gradient is written to a group whose memory a reduction uses
    F3  at the end of the last backward of a step

Gathered memory is freed at these points only, also on a device. So which collectives, copies and hooks a rank queues,
and in which order, depends on its program and never on timing.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from dbuffer import AllReduce, DBuffer, Handle

from .._grads.buffer import Closed, Full, GradBuffer
from .._grads.scaling import AllReduceHook
from .._grads.used import UsedParameters
from .._params.group import Group
from .._params.unit import Param, Unit, label
from .._torch.streams import Streams


class Reduction:
    """A reduction under way: of some groups of one unit, with the unit's options as they were at its launch.

    Attributes:
        unit, groups: the reduced unit and groups.
        scatters, sums: collectives that have not been waited for: over shards, and over replicas.
        scattered, done: on a device, events after the reduce-scatters, and after all of it.
        closed: what was reduced.
        used: memory that `finalize` has used on a lane, held until the computation has waited.
        offloaded: whether gradients are copied to the CPU.
    """

    def __init__(self, unit: Unit, groups: list[Group]) -> None:
        options = unit.options.reduction
        self.unit, self.groups = unit, groups
        self.hook, self._hook_stream = options.hook, options.hook_stream
        self.scatters: list[Handle] = []
        self.sums: list[Handle] = []
        self.scattered: Any = None
        self.done: Any = None
        self.used: list[torch.Tensor] = []
        shows_all = unit.options.reduce_unused or options.hook is not None
        self.closed = [(group, group.gradients.close(shows_all=shows_all)) for group in groups]
        self.offloaded = any(group.plan.offload is not None for group in groups)

    @property
    def missing(self) -> list[Param]:
        """The parameters without a gradient on this rank, which another rank may have used."""
        return [
            group.params[index] for group, closed in self.closed for index in sorted(closed.others.missing)
        ]

    @property
    def stays_partial(self) -> bool:
        """Whether sums over replicas are left to a later reduction."""
        return any(closed.stays_partial for _, closed in self.closed)

    def replicated(self) -> dict[tuple[Any, ...], list[DBuffer]]:
        """The buffers whose shards are summed over replicas, by (mesh, dtype, op)."""
        calls: dict[tuple[Any, ...], list[DBuffer]] = {}
        for group, closed in self.closed:
            if group.plan.data.hybrid and not closed.stays_partial:
                buffer = closed.slots.buffer
                calls.setdefault((*group.plan.call, buffer.dtype, closed.op), []).append(buffer)
        return calls

    def scatter(self, partial: dict[Group, bool], streams: Streams) -> None:
        """Start the reduce-scatters: one for each mesh and scaling."""
        options = self.unit.options
        calls: dict[tuple[Any, ...], tuple[GradBuffer, list[DBuffer]]] = {}
        for group, closed in self.closed:
            gradients = group.gradients
            key = (*group.plan.call, gradients.scaling, partial[group])
            calls.setdefault(key, (gradients, []))[1].append(closed.slots.buffer)
        with label("post_backward_reduce", self.unit.name):
            for (*_, adds), (first, buffers) in calls.items():
                call = first.reduction_of(buffers, options.reduce_by, options.separate_reductions)
                self.scatters.append(call.start(accumulate=adds, stream=streams.reduce))

    def finalize(self, streams: Streams, refusal: str) -> None:
        """Call the all-reduce hook, and show the gradients. On the current stream.

        `refusal`: why hooks of parameters may not communicate; empty if they may.
        """
        layer = streams.layer
        shown = [(group, closed) for group, closed in self.closed if not closed.stays_partial]
        if self.hook is not None:
            self._call(self.hook, shown, streams)
        for group, closed in shown:
            group.expect_update()
            group.gradients.publish(closed, self.used, refusal)
        self.done = layer.record()

    def _call(self, hook: AllReduceHook, shown: list[tuple[Group, Closed]], streams: Streams) -> None:
        layer = streams.layer
        with layer.on(self._hook_stream):
            for _, closed in shown:
                for shard in closed.slots.buffer.shard:
                    hook(shard)
            done = layer.record()
        layer.wait(done)


class Backward:
    """The reductions of one model."""

    def __init__(self, streams: Streams) -> None:
        self.is_last = True  # whether the end of backward waits for all reductions
        self.by_hand = False  # whether `finalize_backward` does that instead
        self.max_reductions = 1  # how many may use gathered gradient memory at once
        self.waiting: set[Unit] = set()  # the units with gradients that no reduction has taken
        self.partial: set[Unit] = set()  # the units with sums that wait to be taken over replicas (HSDP)
        self._streams = streams
        self._scattering: list[Reduction] = []  # use gathered memory; the oldest first
        self._summing: list[Reduction] = []  # on a CPU: over replicas, not finalized
        self._held: list[Reduction] = []  # on a device: have shards that the computation has not waited for
        # on a device: events after copies to the CPU, by whether replicas are summed
        self._copies: dict[bool, Any] = {}
        self._refusal = ""  # in this step: why hooks of parameters may not communicate
        # By process groups, since ranks compared the used parameters.
        self._reduced: dict[tuple[dist.ProcessGroup, ...], dict[GradBuffer, None]] = {}

    @property
    def ends_step(self) -> bool:
        """Whether the end of backward waits for all reductions."""
        return self.is_last and not self.by_hand

    # -- gradients --------------------------------------------------------------------------------------------------

    def accept(self, unit: Unit, param: Param) -> None:
        """A gradient has been accumulated: it is the group's from now on."""
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
        if self._streams.recycler.lends(grad.untyped_storage()):  # a function returned the weight, soon freed
            grad = grad.clone()
        group = param.group
        gradients = group.gradients
        if gradients.full is not Full.PRESENT:
            self._make_room(group)
            self.waiting.add(unit)
        gradients.write(param.index, grad)

    def _make_room(self, group: Group) -> None:
        """F2: let the group's gradient buffer accept gradients."""
        while any(group in reduction.groups for reduction in self._scattering):
            self._free_oldest()
        group.gradients.accept()

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, unit: Unit, groups: list[Group]) -> None:
        """Start a reduction, after F1."""
        if not groups:
            return
        self.waiting.discard(unit)
        while len(self._scattering) >= self.max_reductions or any(map(_is_reducing, groups)):
            self._free_oldest()
        if any(group in reduction.groups for reduction in self._summing for group in groups):
            self._finish_sums()
        streams = self._streams
        partial = {group: group.gradients.partial for group in groups}
        reduction = Reduction(unit, groups)
        self._scattering.append(reduction)
        self._look_for_hooks(reduction)
        (self.partial.add if reduction.stays_partial else self.partial.discard)(unit)
        reduction.scatter(partial, streams)
        for group, closed in reduction.closed:
            if not closed.stays_partial:
                self._reduced.setdefault(group.plan.data.groups, {})[group.gradients] = None
        if streams.layer.asynchronous:
            self._wait_for_scatter(reduction)
            self._sum(reduction)
            self._finish_sums()

    def _look_for_hooks(self, reduction: Reduction) -> None:
        """From a parameter with hooks and without a gradient on, other ranks call hooks in another order."""
        for param in () if self._refusal else reduction.missing:
            if param.has_hooks:
                self._refusal = (
                    f"a hook on a gradient communicates, and {param.name} of {reduction.unit.name}, which has a hook "
                    "too, got no gradient on this rank: ranks that have one call hooks in another order, and would "
                    "take part in other collectives. Call set_reduce_scatter_unused_params(True) on the model, so that "
                    "each parameter has a gradient on every rank"
                )
                return

    def _finalize(self, reduction: Reduction) -> None:
        reduction.finalize(self._streams, self._refusal)
        if reduction.offloaded:
            self._copies[bool(reduction.sums)] = reduction.done

    def _wait_for_scatter(self, reduction: Reduction) -> None:
        layer = self._streams.layer
        with layer.on(self._streams.reduce, ()):
            for handle in reduction.scatters:
                handle.wait()
            reduction.scatters = []
            reduction.scattered = layer.record()

    def _sum(self, reduction: Reduction) -> None:
        """After the reduce-scatter: start the sums over replicas, or show the gradients."""
        streams, replicated = self._streams, reduction.replicated()
        if not replicated:
            with streams.layer.on(streams.reduce, ()):
                self._finalize(reduction)
            return
        self._summing.append(reduction)
        after = (reduction.scattered,)
        with label("post_backward_all_reduce", reduction.unit.name):
            for (*_, op), buffers in replicated.items():
                reduction.sums.append(AllReduce(buffers, op).start(stream=streams.replicate, after=after))

    def _finish_sums(self) -> None:
        """Show the gradients that are summed over replicas."""
        while self._summing:
            reduction = self._summing[0]
            with self._streams.layer.on(self._streams.replicate, ()):
                for handle in reduction.sums:
                    handle.wait()
                self._finalize(reduction)
            self._summing.pop(0)

    def _free_oldest(self) -> None:
        """Free the gathered memory of the oldest reduction; on a CPU wait for it first."""
        layer = self._streams.layer
        reduction = self._scattering[0]
        if not layer.asynchronous:
            self._finish_sums()  # of the one before: hooks are called in the order of the reductions
            self._wait_for_scatter(reduction)
        layer.wait(reduction.scattered)
        for group, closed in reduction.closed:
            group.gradients.free(closed)
        self._scattering.pop(0)
        if layer.asynchronous:
            self._let_go([held for held in self._held if not held.replicated()])
            self._held.append(reduction)
        else:
            self._sum(reduction)

    def _let_go(self, reductions: list[Reduction]) -> None:
        """Order the computation after reductions: their shards, which it allocated, may be freed from then on."""
        for reduction in reductions:
            self._streams.layer.wait(reduction.done)
            self._held.remove(reduction)

    def finish(self) -> None:
        """F3: wait for all reductions, and let ranks compare which parameters they used."""
        layer = self._streams.layer
        exchanges = [UsedParameters(groups, own, self._streams) for groups, own in self._reduced.items()]
        self._reduced = {}
        while self._scattering:
            self._free_oldest()
        self._finish_sums()
        self._let_go(self._held.copy())
        for exchange in exchanges:
            exchange.finish(self._refusal)
        self._refusal = ""
        for event in self._copies.values():
            layer.wait_on_host(event)  # the CPU reads copies from the device
        self._copies = {}

    def abandon(self) -> None:
        """Wait, ignoring failures, and free gathered memory: a failed iteration is being cleared away."""
        streams, layer = self._streams, self._streams.layer
        scattering, self._scattering = self._scattering, []
        summing, self._summing = self._summing, []
        self._reduced = {}
        self.waiting.clear()
        self.partial.clear()
        for reduction in (*scattering, *summing):
            for handle in (*reduction.scatters, *reduction.sums):
                with layer.on(streams.reduce, ()), contextlib.suppress(RuntimeError):
                    handle.wait()
        for lane in (streams.reduce, streams.replicate):
            layer.wait(layer.record(lane))
            if self._copies or (layer.asynchronous and any(reduction.offloaded for reduction in scattering)):
                layer.wait_on_host(layer.record(lane))  # memory of the host is given back
        self._held, self._copies, self._refusal = [], {}, ""  # now that the computation is behind the lanes
        for reduction in scattering:
            for _, closed in reduction.closed:
                closed.slots.buffer.release()


def _is_reducing(group: Group) -> bool:
    """Whether a reduction uses the group's gathered gradient memory."""
    return group.gradients.full is Full.BUSY
