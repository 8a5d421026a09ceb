"""Passes through the units of a model: when each is gathered and freed, and when a pass begins and ends.

forward    root enters: begin_forward ... enter_forward(unit), leave_forward(unit) ... root leaves: end_forward
backward   first output's gradient: enter_backward(unit) ... leave_backward(unit) ... engine is done: end_backward

Units that ranks may skip follow the unit around them (`Unit.host`), whose steps every rank takes: it gathers them when
it is entered, and frees and reduces them when it is left. What they do themselves communicates nothing.
"""

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dbuffer import CollectiveOrder, watch_order

from .. import _torch_compat as compat
from .._grads.buffer import Full
from .._params.empty_buffers import empty_buffers
from .._params.seeds import check_same_values
from .._params.unit import Unit, label, refuse_capture
from .._torch.streams import Streams
from .backward import Backward

U = TypeVar("U")
_MAX_PASSES = 64  # forwards before one backward whose order is remembered
_EMPTY = (
    "without values since to_empty, or on meta: compute or load them. No state dict has those of persistent=False, but"
    " set_full_state_dict(model, state_dict, rank0_only=True) sends them from rank 0, if it has them"
)
_AT_ONCE: tuple[Any, ...] = ()  # wait for no event


_begun: "weakref.WeakSet[Pass]" = weakref.WeakSet()  # passes that have begun a forward, some long ago


def model_in_forward() -> str:
    """Name of a model whose forward this thread is in; empty if there is none."""
    names = (each.model_in_forward(threading.get_ident()) for each in list(_begun))
    return next(filter(None, names), "")


class Schedule(Generic[U]):
    """The order in which units run in one kind of pass (forward from one root, or backward), to gather ahead by it.

    first pass      A, B, C: each gathered on demand; the order is recorded
    later passes    A runs: B is gathered ahead;  B runs: C ...
    another order   A, C: a unit that is not next is searched further on (B was skipped); if absent: on demand.
                    The next pass expects the new order.
    """

    def __init__(self) -> None:
        self._known: list[U] = []
        self.seen: list[U] = []  # the units of the pass under way, in order
        self._next = 0
        self._lost = False

    def begin(self, expected: list[U] | None = None) -> None:
        """Start a pass; `expected` replaces the order known from before."""
        if expected is not None:
            self._known = expected
        self.seen = []
        self._next = 0
        self._lost = False

    def enter(self, unit: U) -> None:
        """A unit runs."""
        self.seen.append(unit)
        try:
            self._next = self._known.index(unit, self._next) + 1
        except ValueError:
            self._lost = True  # what comes next is unknown until something expected runs
        else:
            self._lost = False

    def upcoming(self) -> list[U]:
        """Units expected after the unit that entered last, soonest first."""
        return [] if self._lost else self._known[self._next :]

    def end(self) -> None:
        """The pass has ended: expect its order in the next one."""
        self._known, self.seen, self._next = self.seen, [], 0


class Pass:
    """The order of the units of one model. Shared by a root and all units inside it."""

    def __init__(self, streams: Streams) -> None:
        self.units: list[Unit] = []  # all of them
        self.backward = Backward(streams)  # their gradients
        self.prefetch_depth = 1  # how many units are gathered ahead
        self.in_backward = False  # whether a run of the autograd engine has reached the model
        self.frozen = False  # whether a forward has begun, so that no unit can be added
        self.streams = streams  # on which they communicate, and the recycler of their gathered memory
        self._post_optim_event: Any = None
        self._root: Unit | None = None  # of the forward under way
        self._forward: weakref.WeakKeyDictionary[Unit, Schedule[Unit]] = weakref.WeakKeyDictionary()
        self._order: Schedule[Unit] = Schedule()  # of the forward under way
        self._nothing_ahead = False  # in this forward, after the unit that entered last
        self._trimmed = False  # since then nothing was parked
        self._backward: Schedule[Unit] = Schedule()
        self._ahead: set[Unit] = set()  # gathered because they were expected, and not used yet
        self._in_backward_of: set[Unit] = set()  # entered, and not left
        self._left_backward: set[Unit] = set()  # in this backward
        self._left: list[Unit] = []  # in the order of their post-forwards, since the last backward
        self._left_before: list[Unit] = []  # the forward under way began
        self._ran: set[Unit] = set()  # in a forward since then, also without gradients
        self.last_backward: list[Unit] = []  # the units in the order of the last backward
        self.resets = 0  # how often a pass was forgotten
        self._thread = 0  # that ran the last forward
        self._graph: Any = None  # weak, to what the graph of the last forward holds
        self._orders: list[CollectiveOrder] = []  # of the process groups in use
        # passes of units that were wrapped inside of this one's root when it had run, the first one first
        self._guests: weakref.WeakKeyDictionary[Pass, None] = weakref.WeakKeyDictionary()

    def gather_after(self, event: Any) -> None:
        """Let the next forward's gathers wait for this event, once, instead of all work of the current stream."""
        self._post_optim_event = event

    def _gathers_follow(self, event: Any = None) -> None:
        layer = self.streams.layer
        if event is None:
            layer.wait(layer.record(), self.streams.gather)
        else:
            layer.wait_for_users(event, self.streams.gather)

    # -- forward ----------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward is under way."""
        return self._root is None and not self.in_backward

    def is_begun_by(self, unit: Unit, module: nn.Module) -> bool:
        """Whether this is the forward of a root, which begins a pass."""
        outermost = self._root is None or (self._root is unit and not unit.is_inside(module))
        return outermost and compat.backward_id() == -1

    def begin_forward(self, root: Unit) -> None:
        """The outermost unit's forward begins."""
        if self.in_backward or self._root is not None:
            self.reset()  # the pass before was cut off by an exception
        alone = root.options.skippable or root.host is not None  # not on every rank
        if alone:
            self._check_follower(root)
        if self.streams.layer.capturing:
            refuse_capture(root.name)
        with label("root_pre_forward"):
            event, self._post_optim_event = self._post_optim_event, None
            if event is not None and any(unit.has_moved() for unit in self.units):
                self.streams.layer.wait_for_users(event)  # the shards are written here too
                event = None
            for unit in self.units:
                unit.prepare()
            self._gathers_follow(event)
            written = [group.begin_pass() for unit in self.units for group in unit.groups]
            if any(written):
                # Hooks of gradients may have, in reductions that the last backward did not wait for.
                for reduced in self.streams.reduced():
                    self.streams.layer.wait(reduced, self.streams.gather)
            self._root = root
            self._thread = threading.get_ident()
            _begun.add(self)
            if root not in self._forward:
                for host in list(_begun):
                    if host is not self and host.has_inside(root, self._thread):
                        host._guests[self] = None
                empty = empty_buffers(root.modules)
                if not alone:
                    check_same_values(self.units)
                    self._watch_order(empty)
                if empty:
                    raise RuntimeError(f"{', '.join(empty)}: buffers {_EMPTY}")
                self._forward[root] = Schedule()
            self._order = self._forward[root]
            self._order.begin()
            self._left_before = self._left.copy()

    def _watch_order(self, empty: list[str]) -> None:
        """Compare the ranks' parameters, in a root's first forward, and from then on the order of their collectives.

        Ranks that train different parameters would start different reductions; those with empty buffers start none.
        """
        trained: dict[dist.ProcessGroup, dict[str, None]] = {}
        for unit in self.units:
            for group in unit.groups:
                if group.buffer is not None and not group.plan.data.simulated:
                    for ranks in group.plan.data.groups_in_use:
                        trained.setdefault(ranks, {})[unit.trained] = None
        self._orders = []
        for ranks, facts in trained.items():
            order = watch_order(ranks)
            if order is not None:
                text = f"nothing, with {', '.join(empty)}: buffers {_EMPTY}" if empty else "; ".join(facts)
                order.compare(text, self.streams.layer)
                self._orders.append(order)

    def model_in_forward(self, thread: int) -> str:
        """Name of the root whose forward is under way in a thread; empty if none is."""
        return self._root.name if self._root is not None and self._thread == thread else ""

    def has_inside(self, unit: Unit, thread: int) -> bool:
        """Whether a forward is under way in a thread, of a root that has all modules of a unit."""
        root = self._root if self._thread == thread else None
        return root is not None and {*unit.modules} <= {
            inner for each in root.modules for inner in each.modules()
        }

    def enter_forward(self, unit: Unit, module: nn.Module) -> bool:
        """Unshard a unit, and gather the next ones ahead. Returns whether the unit's own backward recomputes it."""
        if unit.host is not None:
            self._check_follower(unit)
            unit.unshard(_AT_ONCE)
            return self._recomputes(unit)
        unit.enter_module(module)
        self._ahead.discard(unit)
        if self._root is None:  # recomputed in backward
            unit.unshard(_AT_ONCE if self.in_backward else None)
            if unit.followers:
                _gather_followers(unit, backward=self._recomputes(unit))
        else:
            unit.unshard(_AT_ONCE)
            if unit.followers:
                _gather_followers(unit, backward=False)
            self._order.enter(unit)
            explicit = unit.options.forward_prefetch
            expected = self._order.upcoming() if explicit is None else explicit
            self._nothing_ahead = explicit is None and not expected
            self._trimmed = False
            if expected:
                self._prefetch("forward", unit, expected, explicit is None)
        return self._recomputes(unit)

    def _recomputes(self, unit: Unit) -> bool:
        return unit in self._in_backward_of and compat.backward_id() != -1

    def _prefetch(self, what: str, unit: Unit, expected: Sequence[Unit], limited: bool) -> None:
        ahead = 0
        for other in expected:
            if limited and ahead == self.prefetch_depth:
                return
            skipped = what == "backward" and not other.options.unshard_in_backward
            if other is unit or other.full is Full.PRESENT or skipped:
                continue
            ahead += 1
            if other.full is not Full.BUSY:
                with label(f"{what}_prefetch for {other.name}"):
                    other.gather(_AT_ONCE)
                    self._ahead.add(other)

    def leave_forward(self, unit: Unit, module: nn.Module) -> bool:
        """A forward has ended. Returns whether it was a recomputation inside the unit's own backward."""
        recomputed = self._recomputes(unit)
        if unit.host is not None:
            self._leave_alone(unit)
            return recomputed
        is_root = self._root is unit
        if not unit.leave_module(module, end=is_root and not recomputed) or recomputed:
            return recomputed
        for follower in unit.followers:
            if follower.reshard_after_forward:
                follower.reshard(keep_slices=True)
            else:
                _finish_gathering(follower)
        backward_follows = self.in_backward and torch.is_grad_enabled() and compat.backward_id() != -1
        if (
            unit.reshard_after_forward and not backward_follows
        ):  # else a checkpoint recomputes: gather it once
            unit.reshard(keep_slices=True)
            if self._nothing_ahead:
                self.streams.recycler.trim()  # what follows, a head or the loss, has the memory to itself
                self._trimmed = True
        if self._root is not None:
            self._ran.add(unit)
        if self._root is not None and torch.is_grad_enabled():
            self._left.append(unit)
            del self._left[: -_MAX_PASSES * len(self.units)]  # forwards that no backward follows
        if is_root:
            self._end_forward()
        return False

    def _leave_alone(self, unit: Unit) -> None:
        """End the pass of a unit that ranks may skip and that was called by itself, after `unshard()` on every rank."""
        if self._root is unit:
            self._root = None
            for each in self.units:
                if each.installed:
                    each.show()

    def _end_forward(self) -> None:
        """Finish the root's forward, and free prefetched units that were not used."""
        trimmed = self._trimmed and not self._ahead
        shows = self.backward.ends_step  # else a pipeline may write gradients by hand
        for unit in self.units:
            if unit in self._ahead and not unit.by_hand:
                unit.reshard()
            if shows and unit.installed:
                unit.show()
        self._ahead.clear()
        self._order.end()
        self._root = None
        if not trimmed:
            self.streams.recycler.trim()  # the loss has the memory to itself
        self._end_orders()

    def abandon_forward(self, unit: Unit, module: nn.Module) -> None:
        """An exception leaves a unit's forward: free its parameters, and end the pass if the unit is the root.

        Nothing here waits, since other ranks may be gone or elsewhere: gathers under way are left to the next forward,
        and so are parameters that were changed, for which it raises.
        """
        if unit.host is not None:
            self._leave_alone(unit)
            return
        is_root = self._root is unit
        if not unit.leave_module(module, end=True) or compat.backward_id() != -1:
            return
        for each in self.units if is_root else (unit, *unit.followers):
            if each.installed and not each.written:
                each.reshard()
        if is_root:
            self._root = None
            self._left = self._left_before  # no backward follows
            self.streams.recycler.trim()
            for order in self._orders:
                order.cut_off()

    def abandon_interrupted(self, unit: Unit, module: nn.Module, method: CodeType) -> None:
        """Abandon forwards whose calls have ended: torch calls no hooks after a `KeyboardInterrupt`.

        Args:
            unit, module: whose forward begins. Inside of an interrupted one is looked for only if it is strange there.
            method: the function that calls methods in place of a forward.
        """
        root = self._root
        strange = unit.is_inside(module) or (unit.root and root is not unit)
        if root is None or not strange or self._thread != threading.get_ident() or compat.backward_id() != -1:
            return
        for each in (*(other for other in self.units if other is not root), root):
            # A unit that ranks may skip notes nothing when it is entered.
            for inside in each.entered[::-1] or each.modules[: int(each is root)]:
                running = compat.calls_under_way(inside, method) - (inside is module)
                if running < max(1, each.entered.count(inside)):
                    self.abandon_forward(each, inside)

    def _end_orders(self) -> None:
        for order in self._orders:
            order.end_pass(self.streams.layer)

    def before_save(self) -> None:
        """Put the sharded parameters into the modules if no pass is under way.

        In another thread than the one that runs passes: leave the modules as they are.
        """
        if threading.get_ident() == self._thread:
            self.rest(free=False)

    def follow_graph(self, token: object) -> None:
        """Put the sharded parameters into the modules when this forward's graph, which holds the token, is dropped.

        No backward can follow then. The next pass raises for changes of gathered parameters.
        """
        known_self = weakref.ref(self)

        def dropped(graph: object) -> None:
            passes = known_self()
            if passes is None or passes._graph is not graph or threading.get_ident() != passes._thread:
                return
            if not any(unit.lost_changes() for unit in passes.units):
                passes.rest(free=False)

        if self.backward.ends_step:
            self._graph = weakref.ref(token, dropped)

    def forget_graph(self) -> None:
        """Put modules into the state after a dropped graph of the last forward: a user gathers by hand."""
        self._graph = None

    def rest(self, *, free: bool) -> None:
        """Put the sharded parameters into the modules if no pass is under way: users may look at them now.

        With `free` gathered memory is freed, except of units that were asked to keep it after forward. Units that users
        have unsharded stay as they are.
        """
        if self.is_idle:
            offloaded = False
            for unit in self.units:
                offloaded = offloaded or unit.offloaded
                if unit.installed and not (unit.by_hand or unit.entered):  # a backward recomputes it
                    if free and unit.options.reshard_after_forward is not False:
                        unit.reshard()
                    else:
                        unit.park()
            if offloaded:
                self.finish_copies()

    def finish_copies(self) -> None:
        """Let the host wait until gathers have read shards that are in CPU memory: users may write to them now."""
        layer = self.streams.layer
        layer.wait_on_host(layer.record(self.streams.gather))

    # -- backward ---------------------------------------------------------------------------------------------------

    def enter_backward(self, unit: Unit) -> None:
        """A gradient has reached a unit's output."""
        if not self.in_backward:
            if self._root is None:  # inside of a forward they are the forward's own
                self._refuse_captured(unit)
            self.begin_backward()
        if unit.host is not None:
            if unit.host not in self._in_backward_of:
                self.enter_backward(unit.host)  # returned the follower's output as its own
            self._check_follower(unit)
            self._in_backward_of.add(unit)
            unit.unshard(_AT_ONCE)
            return
        if unit not in self._in_backward_of:
            self._in_backward_of.add(unit)
            self._backward.enter(unit)
        elif unit.installed:
            return
        with label("pre_backward", unit.name):
            if unit.options.unshard_in_backward:
                unit.unshard(_AT_ONCE)
                self._ahead.discard(unit)
                if unit.followers:
                    _gather_followers(unit, backward=True)
            explicit = unit.options.backward_prefetch
            expected = self._backward.upcoming() if explicit is None else explicit
            if expected:
                self._prefetch("backward", unit, expected, explicit is None)

    def _refuse_captured(self, unit: Unit) -> None:
        """Raise NotImplementedError if `torch.autograd.grad` is asked for gathered parameters: it would return this
        rank's gradients, and nothing for the sharded ones.

        Args:
            unit: the first one that backward has reached.
        """
        shown = (param for other in self.units for param, _ in other.shown)
        for param in itertools.chain(unit.params, shown):
            if param.unsharded is None or not param.unsharded.requires_grad:
                continue
            try:
                if compat.is_accumulated(param.unsharded):
                    return  # as in most backwards, then of all
            except LookupError:
                raise NotImplementedError(
                    f"torch.autograd.grad of {param.name} in {param.group.name}: it would return the gradient of this "
                    "rank's batch, and None for parameters that are sharded. Call loss.backward() and read `.grad`; "
                    "to keep the gradients that are there, store them before and call zero_grad()"
                ) from None

    def begin_backward(self) -> None:
        """A run of the autograd engine has reached the model: finish the reductions at its end.

        Raises NotImplementedError if it is compiled autograd's.
        """
        if compat.compiled_autograd():
            raise NotImplementedError(
                f"backward of {self.units[0].name} under compiled autograd: fully_shard gathers and reduces from "
                "hooks, which a traced backward would not call. Turn it off; torch.compile of blocks works"
            )
        self.in_backward = True
        for unit in self.units:
            if unit.shown:
                unit.hide(in_backward=True)
        # A backward may run, and end, inside a transform of torch.func: a forward that takes gradients, under jacrev.
        compat.at_end_of_backward(lambda: compat.outside_transforms(self._end_backward))
        expected, last = self._left[::-1], self.last_backward
        # A reentrant checkpoint's first forward has no gradients: backward reaches more units than are known.
        more = set(expected) < set(last) and self._ran.issuperset(last)
        if more or sorted(map(id, expected)) == sorted(map(id, last)):
            expected = last  # the order that really came last time
        self._backward.begin(expected)

    def leave_backward(self, unit: Unit) -> None:
        """A unit's backward has ended: free the parameters, start reducing the gradients."""
        self._in_backward_of.discard(unit)
        if unit.host is not None:
            return
        self._left_backward.add(unit)
        under_way = bool(unit.entered)  # in a forward that this run of the engine is inside of
        if unit.followers and not under_way:
            self._leave_followers(unit.followers)
        if unit.options.reshard_after_backward and not (unit.at_rest or under_way):
            with label("post_backward_reshard", unit.name):
                unit.reshard()
                if not self._backward.upcoming():
                    self.streams.recycler.trim()  # nothing more is expected to be gathered
        if unit.options.requires_gradient_sync:
            self.backward.reduce(unit, unit.groups_to_reduce())

    def _leave_followers(self, followers: Sequence[Unit]) -> None:
        """Free units that ranks may skip, and reduce their gradients, zeros where this rank has none."""
        for unit in followers:
            if not unit.options.reshard_after_backward:
                _finish_gathering(unit)
            elif not unit.at_rest:
                unit.reshard()
            if unit.options.requires_gradient_sync:
                self.backward.reduce(unit, unit.groups_to_reduce())

    def _check_follower(self, unit: Unit) -> None:
        """Raise RuntimeError if a unit that ranks may skip is not gathered: other ranks may not gather it now."""
        if unit.full is not Full.EMPTY:
            return
        host = "another unit that is not" if unit.host is None else unit.host.name
        raise RuntimeError(
            f"{unit.name} is skippable: every rank gathers it with {host}, and it has to run inside its forward. "
            "Call its unshard() on every rank to run it alone, or shard it without skippable=True"
        )

    def _end_backward(self) -> None:
        with label("root_post_backward_callback"):
            self.finish_backward()
            self.last_backward = self._backward.seen
            self._backward.end()
            self.in_backward = False
        if self.backward.ends_step:
            self.rest(free=False)

    def finish_backward(self) -> None:
        """Finish units without a post-backward; after the last backward of a step, wait for the reductions.

        Guests that this backward has not reached are finished too, with gradients of backwards before.
        """
        recycler = self.streams.recycler
        recycler.trim()  # nothing more is gathered; parked memory would add to the last reductions' memory
        for unit in reversed(self.units):
            if self._has_work_left(unit):
                self.leave_backward(unit)
        for unit in self.backward.waiting:
            if unit.host is not None and unit.options.requires_gradient_sync:
                raise RuntimeError(
                    f"{unit.name} is skippable, and got gradients after the backward of {unit.host.name}, which "
                    "reduces them, had ended; let its output depend on that one's inputs"
                )
        self._left_backward.clear()
        if self.backward.ends_step:
            self.publish()
            for guest in list(self._guests):
                if (guest.backward.waiting or guest.backward.partial) and not guest.in_backward:
                    guest.finish_backward()

    def publish(self) -> None:
        """Wait for the reductions of a step and show the gradients."""
        self.backward.finish()
        self._left, self._ran = [], set()
        self.streams.recycler.trim()  # the optimizer has the memory to itself
        self._end_orders()

    def leave_backward_by_hand(self, unit: Unit) -> None:
        """Like `leave_backward`, for pipeline schedules that split backward and write `.grad` without running hooks."""
        for each in (unit, *unit.followers):
            for param in each.params:
                if param.unsharded is not None and param.unsharded.grad is not None:
                    self.backward.accept(each, param)
        self.leave_backward(unit)

    def gather_for_backward(self, units: Iterable[Unit]) -> None:
        """Unshard the units whose backward is still pending."""
        if self.in_backward:
            return
        for unit in units:
            # One with new parameters has no backward to come: its forward failed, or its loss was dropped.
            if unit in self._left and unit.options.unshard_in_backward and not unit.has_moved():
                unit.unshard()

    def _has_work_left(self, unit: Unit) -> bool:
        """Whether this unit's post-backward is missing or incomplete at the end of backward."""
        options = unit.options
        if unit.host is not None:
            return False
        return (
            unit in self._in_backward_of
            or (bool(unit.followers) and not unit.entered and unit not in self._left_backward)
            or unit in self.backward.waiting
            or (options.reduction.all_reduce and unit in self.backward.partial)
            or (options.reduce_unused and unit not in self._left_backward)
            or (options.reshard_after_backward and not (unit.at_rest or unit.entered or unit.by_hand))
        )

    # -- recovery ---------------------------------------------------------------------------------------------------

    def forget_failed_backward(self) -> None:
        """Forget a backward that raised: it is under way, and no autograd engine runs."""
        if self.in_backward and compat.backward_id() == -1:
            self.reset()

    def reset(self) -> None:
        """Forget the pass under way: wait for collectives, free gathered memory, drop unreduced gradients.

        Raises RuntimeError if gathered parameters were changed, as by a user after a failure: that is lost.
        """
        self.resets += 1
        self.backward.abandon()
        self._root = None
        self.in_backward = False
        self._left, self._ran = [], set()
        self._backward = Schedule()
        for units in (self._ahead, self._in_backward_of, self._left_backward):
            units.clear()
        changed = [unit.name for unit in self.units if unit.reset()]
        if any(unit.offloaded for unit in self.units):
            self.finish_copies()
        for order in self._orders:
            order.cut_off()
        if changed:
            raise RuntimeError(
                f"{changed[0]}: gathered parameters were changed since a forward or backward failed, and the change is "
                "lost. Call model.reset_iter_state() after a failure, so that modules hold the sharded parameters, and "
                "then change them"
            )


def _gather_followers(unit: Unit, *, backward: bool) -> None:
    for follower in unit.followers:
        follower.gather(_AT_ONCE)
        for group in follower.groups if not backward else ():
            group.follow_training()  # on ranks that skip it too: all reduce the same gradients


def _finish_gathering(follower: Unit) -> None:
    """Wait for its gather, on ranks that skipped it too: `CollectiveOrder.compare` needs that on all ranks."""
    if follower.full is Full.BUSY:
        follower.unshard(_AT_ONCE)
