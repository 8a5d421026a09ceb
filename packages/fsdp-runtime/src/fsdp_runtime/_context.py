"""What the units of one model share: streams, the order they run in, reductions under way.

forward    root enters: begin_forward ... enter_forward(unit), leave_forward(unit) ... root leaves: end_forward
backward   first output's gradient: enter_backward(unit) ... unit.post_backward ... engine is done: _end_backward
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch

from dbuffer import DeviceLayer, Recycler, device_layer

from . import _torch_compat as compat
from ._labels import label
from ._reduction import Reduction
from ._registry import join
from ._schedule import Schedule

if TYPE_CHECKING:
    from ._group import Group
    from ._unit import Unit

_MAX_PASSES = 64  # forwards before one backward whose order is remembered

# One for each device, as long as a unit uses it: buffers of all models are recycled together.
_RECYCLERS: "weakref.WeakValueDictionary[torch.device, Recycler]" = weakref.WeakValueDictionary()


def _recycler(device: torch.device) -> Recycler:
    found = _RECYCLERS.get(device)
    if found is None:
        found = _RECYCLERS[device] = Recycler(device, lean=True)
    return found


class Context:
    """Shared by a root unit and all units inside it."""

    def __init__(self, device: torch.device) -> None:
        self.layer: DeviceLayer = device_layer(device)
        self.recycler = _recycler(self.layer.device)
        self.units: list[Unit] = []
        self.joined = -1  # the registry's version when the units inside the root were last looked for
        self.prefetch_depth = 1
        self.is_last_backward = True
        self.max_reductions = 1
        self.post_optim_event: Any = None
        self.root: Unit | None = None  # of the forward pass under way
        self.in_backward = False
        self.backward_id = -1
        self._streams: tuple[Any, Any] | None = None
        self._forward: weakref.WeakKeyDictionary[Unit, Schedule[Unit]] = weakref.WeakKeyDictionary()
        self._backward: Schedule[Unit] = Schedule()
        self._left: list[Unit] = []  # in the order of their post-forwards, since the last backward
        self._last_backward: list[Unit] = []
        self._flying: list[Reduction] = []  # reduce-scatters under way
        self._landed: list[Reduction] = []  # all-reduces under way, or nothing but showing the gradients left

    # -- streams ----------------------------------------------------------------------------------------------------

    @property
    def gather_stream(self) -> Any:
        """Where all-gathers are launched; None on CPU."""
        return self._make_streams()[0]

    @property
    def reduce_stream(self) -> Any:
        """Where reductions are launched; None on CPU."""
        return self._make_streams()[1]

    def _make_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = (self.layer.new_stream(priority=-1), self.layer.new_stream(priority=-1))
        return self._streams

    def share_streams(self, other: "Context") -> None:
        """Use another context's streams."""
        self._streams = other._make_streams()

    def gather_after(self) -> Any:
        """What a gather must wait for: inside a pass nothing more than its beginning waited for, else everything."""
        return () if self.root is not None or self.in_backward else None

    def _gathers_follow(self, event: Any = None) -> None:
        self.layer.wait(self.layer.record() if event is None else event, self.gather_stream)

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self, root: "Unit") -> None:
        """The outermost unit's forward begins."""
        if self.in_backward or self.root is not None:
            self.reset()  # the pass before was cut off by an exception
        with label("root_pre_forward"):
            join(root)
            for unit in self.units:
                unit.prepare()
            self.root = root
            event, self.post_optim_event = self.post_optim_event, None
            self._gathers_follow(event)
            self._order_of(root).begin()

    def _order_of(self, root: "Unit") -> "Schedule[Unit]":
        return self._forward.setdefault(root, Schedule())

    def enter_forward(self, unit: "Unit") -> None:
        """Unshard a unit, and gather ahead what is expected next."""
        unit.unshard()
        if self.root is None:  # recomputed in backward
            return
        order = self._order_of(self.root)
        order.enter(unit)
        self._prefetch("forward", unit, unit.forward_prefetch, order)

    def _prefetch(
        self, what: str, unit: "Unit", explicit: "list[Unit] | None", order: "Schedule[Unit]"
    ) -> None:
        ahead = 0
        for other in order.upcoming() if explicit is None else explicit:
            if explicit is None and ahead == self.prefetch_depth:
                return
            if other is unit or other.unsharded or (what == "backward" and not other.unshard_in_backward):
                continue
            ahead += 1
            if not other.gathered:
                with label(f"{what}_prefetch for {other.name}"):
                    other.gather()
                    other.gathered_ahead = True

    def leave_forward(self, unit: "Unit") -> None:
        """A unit's forward is over."""
        if unit.reshard_after_forward:
            unit.reshard_for_backward()
        if self.root is not None and torch.is_grad_enabled():
            self._left.append(unit)
            del self._left[: -_MAX_PASSES * len(self.units)]  # forwards that no backward follows
        if self.root is unit:
            self.end_forward()

    def end_forward(self) -> None:
        """The outermost unit's forward is over: what was gathered ahead in vain is freed."""
        assert self.root is not None
        for unit in self.units:
            if unit.gathered_ahead:
                unit.reshard()
        self._order_of(self.root).end()
        self.root = None
        self.recycler.trim()  # the loss has the memory to itself

    # -- backward ---------------------------------------------------------------------------------------------------

    def enter_backward(self, unit: "Unit") -> None:
        """A gradient has reached a unit's output."""
        if not self.in_backward:
            self.begin_backward()
        if not unit.entered_backward:
            self.reap()
            unit.entered_backward = True
            self._backward.enter(unit)
        elif unit.unsharded:
            return
        with label("pre_backward", unit.name):
            if unit.unshard_in_backward:
                unit.unshard()
            self._prefetch("backward", unit, unit.backward_prefetch, self._backward)

    def begin_backward(self) -> None:
        """A run of the autograd engine has reached the model: have it finish the reductions at its end."""
        self.in_backward = True
        self.backward_id = compat.backward_id()
        compat.at_end_of_backward(self._end_backward)
        expected = self._left[::-1]
        if sorted(map(id, expected)) == sorted(map(id, self._last_backward)):
            expected = self._last_backward  # the order that really came last time
        self._backward.begin(expected)
        self._gathers_follow()

    def trim_when_last(self) -> None:
        """Give parked memory back where backward expects to gather nothing more."""
        if not self._backward.upcoming():
            self.recycler.trim()

    def _end_backward(self) -> None:
        with label("root_post_backward_callback"):
            self.recycler.trim()  # nothing more is gathered; what is parked would stand beside the last reductions
            for unit in reversed(self.units):
                unit.post_backward()
            if self.is_last_backward:
                self._finish(self._landed + self._flying)
                self._left = []
                self.recycler.trim()  # the optimizer has the memory to itself
            self._last_backward = self._backward.seen
            self._backward.end()
            self.in_backward = False

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, reduction: Reduction) -> None:
        """Start a reduction. So many are under way at most that gathered gradient memory is bounded."""
        self._finish([earlier for earlier in self._flying + self._landed if earlier.shares(reduction)])
        while len(self._flying) >= self.max_reductions:
            self._advance(self._flying[0])
        reduction.launch()
        self._flying.append(reduction)

    def land(self, group: "Group") -> None:
        """Wait for a reduction that still uses the gathered gradient memory of a group that gets new gradients."""
        for reduction in [flying for flying in self._flying if flying.holds(group)]:
            self._advance(reduction)

    def reap(self) -> None:
        """Free the gathered gradient memory of reductions that are over, before more is asked for."""
        for reduction in [flying for flying in self._flying if flying.landed]:
            self._advance(reduction)

    def _advance(self, reduction: Reduction) -> None:
        self._flying.remove(reduction)
        self._landed.append(reduction)
        reduction.advance()

    def _finish(self, reductions: list[Reduction]) -> None:
        for reduction in reductions:
            if reduction in self._flying:
                self._advance(reduction)
            self._landed.remove(reduction)
            reduction.finish()

    # -- recovery ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the pass under way: wait for collectives, free gathered memory, drop unreduced gradients."""
        reductions, self._flying, self._landed = self._flying + self._landed, [], []
        for reduction in reductions:
            reduction.abandon()
        self.root = None
        self.in_backward = False
        self._left = []
        self._backward = Schedule()
        for unit in self.units:
            unit.reset()
