"""The gradients of one group: written into one buffer as autograd makes them, reduced from it, shown as `.grad`.

autograd's gradient --copy, cast--> view of gathered memory --reduce-scatter--> shard --> sharded_param.grad
(freed at once;                     (released)                                  (new in each step, ends with `.grad`)
small ones a few together)

all tensors trained     the parameters' own layout: a gradient is written to one view
some frozen since       only the trained ones are reduced: a gradient is written to a view for each rank's part of it
"""

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import dbuffer
from dbuffer import DBuffer, ReduceScatter, TransportChoice

from .. import _torch_compat as compat
from .._plan.group import GroupPlan, as_sharded, trained_layout
from .._plan.param import ManagedParam
from .._torch.streams import Streams
from .missing import Ledger, Missing, ledger_of
from .scaling import ReduceOptions, Scaling, scaling

Params = list[ManagedParam[Any]]
_SMALL = 1 << 12  # elements. Gradients up to this wait for the next larger one and are copied in one call,
_SMALL_BYTES = 8 * _SMALL  # unless they would keep more memory than this: slices of something larger


class GradState(enum.Enum):
    """Use of a group's gathered gradient memory.

    IDLE       free
    OPEN       gradients may be written; the first write allocates it
    FILLING    allocated, and gradients may be written
    REDUCING   a reduction reads it

        IDLE --accept--> OPEN --write--> FILLING --close--> REDUCING --free--> IDLE
    """

    IDLE = enum.auto()
    OPEN = enum.auto()
    FILLING = enum.auto()
    REDUCING = enum.auto()


WRITABLE = (GradState.OPEN, GradState.FILLING)


@dataclass(eq=False)
class Slots:
    """A gradient buffer, and where each gradient is written in it.

    Attributes:
        indices: numbers of the parameters with a slot.
        buffer: gathered memory, and the shard that a reduction fills.
        whole: view of each gradient, if the buffer has the parameters' layout.
        runs: else for each gradient its runs: the first element, and the view.
    """

    indices: Collection[int]
    buffer: DBuffer
    whole: list[torch.Tensor]
    runs: dict[int, list[tuple[int, torch.Tensor]]]

    def pairs(self, index: int, grad: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The views of a gradient, each with the part of `grad` that belongs there."""
        if self.whole:
            return [(self.whole[index], grad)]
        flat = grad.reshape(-1)
        return [(view, flat.narrow(0, start, view.numel())) for start, view in self.runs[index]]

    def views(self, indices: Collection[int]) -> list[torch.Tensor]:
        """All views of some gradients."""
        if self.whole:
            return [self.whole[index] for index in indices]
        return [view for index in indices for _, view in self.runs[index]]


@dataclass(frozen=True, eq=False)
class Closed:
    """Gradients that a reduction takes.

    Attributes:
        slots: where they are.
        used: the parameters that got one on this rank since the last `.grad`.
        missing: trained parameters without a gradient.
        used_anywhere: numbers of the parameters that got one on any rank, if that was asked; else None.
        number: number of this on the mesh, the same on every rank.
    """

    slots: Slots
    used: Params
    missing: Params
    used_anywhere: frozenset[int] | None
    number: int


class GradBuffer:
    """The gradients of a group between backward and `.grad`.

    Attributes:
        state: see `GradState`.
        options, scaling: the unit's options, and the resulting divisions; set by `scale`.
        written: numbers of the parameters whose gradients wait for their reduction.
        used_anywhere: numbers of gradients that wait on any rank or are in the partial sum, if the ranks were asked.
        partial: whether the shard holds a sum that was not yet taken over replicas; the next reduction adds to it.
    """

    options: ReduceOptions
    scaling: Scaling

    def __init__(
        self, name: str, plan: GroupPlan, params: Params, streams: Streams, options: ReduceOptions
    ) -> None:
        self._name = name
        self._plan = plan
        self._params = params
        self._streams = streams
        self.state = GradState.IDLE
        self.written: set[int] = set()
        self.used_anywhere: frozenset[int] | None = None
        self.partial = False
        self._in_partial: frozenset[int] = frozenset()  # the parameters with a part of that sum here
        self.published: Missing | None = None  # of the reduction under way
        self._whole: Slots | None = None  # of all parameters; made at the first use, as are the others
        self._slots: Slots | None = None  # in use
        self._indices: Collection[int] = range(len(params))  # with a slot
        self._kept: dict[int, torch.Tensor] = {}  # written gradients that are still to be copied
        self._small: set[int] = set()
        for index, param in enumerate(plan.params):
            if math.prod(param.shape) <= _SMALL:
                self._small.add(index)
        self.scale(options)
        self._training_changed = True
        self._trained: frozenset[int] | None = None
        self._first_reduction = 0
        self._prepared: tuple[tuple[Any, ...], ReduceScatter] | None = None

    @cached_property
    def ledger(self) -> Ledger:
        """The store to which the ranks of the mesh write the parameters that they did not use."""
        return ledger_of(self._plan.data)

    def rename(self, name: str) -> None:
        """Rename the buffers after the unit's new name."""
        self._name, self._prepared = name, None
        for slots in (self._whole, self._slots):
            if slots is not None:
                slots.buffer.name = f"gradients of {name}"

    def set_step(self, step: int) -> None:
        """Let stochastic rounding depend on the step; multiples of the golden ratio leave room for many reductions."""
        self._first_reduction = step * 0x9E3779B9 & 0xFFFFFFFF
        for slots in (self._whole, self._slots):
            if slots is not None:
                slots.buffer.reductions = self._first_reduction

    def scale(self, options: ReduceOptions) -> None:
        """Apply new reduction options, from the next reduction on."""
        plan = self._plan
        self.options = options
        self.scaling = scaling(options, plan.dtypes.reduce, plan.data.shard_size, plan.data.num_replicas)

    def training_changed(self) -> None:
        """Parameters were frozen or unfrozen: from the next reduction on only trained ones are reduced."""
        self._training_changed = True
        self._trained = None

    @property
    def trained(self) -> frozenset[int]:
        """The numbers of the parameters that gradients are expected for."""
        if self._trained is None:
            self._trained = frozenset([param.index for param in self._params if param.sharded.requires_grad])
        return self._trained

    def _follow_training(self) -> None:
        self._training_changed = False
        trained, everything = self.trained, range(len(self._params))
        indices: Collection[int] = everything if len(trained) in (0, len(everything)) else trained
        if indices != self._indices:
            self._indices = indices
            self._slots = self._whole if indices == everything else None

    @property
    def buffer(self) -> DBuffer:
        """The buffer in use."""
        return self._slots_in_use().buffer

    def _slots_in_use(self) -> Slots:
        if self._slots is None:
            self._slots = self._new_slots()
            if isinstance(self._indices, range):
                self._whole = self._slots
        return self._slots

    def _new_slots(self) -> Slots:
        plan, indices = self._plan, self._indices
        whole = isinstance(indices, range)
        buffer = DBuffer(
            plan.layout if whole else trained_layout(plan.layout, frozenset(indices)),
            plan.data.mesh,
            full_dtype=plan.dtypes.reduce,
            recycler=self._streams.recycler,
            alias=False,
            name=f"gradients of {self._name}",
            check_ranks=False,
            **plan.buffer_options(gradients=True),
        )
        buffer.give_shard()
        buffer.reductions = self._first_reduction
        views = buffer.empty_views
        if whole:
            return Slots(indices, buffer, list(views.values()), {})
        runs: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index in indices:
            name = plan.params[index].name
            for rank in range(plan.layout.world_size):
                if (view := views.get(f"{name}@{rank}")) is not None:
                    runs.setdefault(index, []).append((plan.layout.local_range(name, rank)[0], view))
        return Slots(indices, buffer, [], runs)

    # -- before the reduction ---------------------------------------------------------------------------------------

    def accept(self) -> None:
        """Start accepting gradients. The last reduction must have released the buffer; the first write allocates it."""
        if self._training_changed and not self.partial:
            self._follow_training()
        self.state = GradState.OPEN

    def write(self, index: int, grad: torch.Tensor) -> None:
        """Put one gradient into the buffer, or add it to the gradients since the last reduction.

        A small gradient waits for others, and is copied with them.

        Raises:
            RuntimeError: the parameter was unfrozen while gradients of others wait for their reduction.
        """
        if index in self.written:
            if self._kept:
                self._copy_kept()
            for view, part in self._slots_in_use().pairs(index, grad):
                view.add_(part, alpha=self.scaling.before)
            return
        if index not in self._indices:
            raise RuntimeError(
                f"{self._params[index].name} in {self._name} was unfrozen while gradients of other parameters of its "
                "group wait to be reduced; change requires_grad between optimizer steps"
            )
        self.written.add(index)
        if self.options.copy_late or (
            index in self._small and grad.untyped_storage().nbytes() <= _SMALL_BYTES
        ):
            self._kept[index] = grad
        else:
            if self._kept or self.state is not GradState.FILLING:
                self._copy_kept()
            self._put(index, grad)

    def _put(self, index: int, grad: torch.Tensor) -> None:
        slots, scale = self._slots or self._slots_in_use(), self.scaling.before
        if slots.whole and scale == 1.0:
            slots.whole[index].copy_(grad)
            return
        for view, part in slots.pairs(index, grad):
            if scale == 1.0:
                view.copy_(part)
            elif view.dtype == part.dtype:
                torch.mul(part, scale, out=view)
            else:
                view.copy_(part).mul_(scale)

    def _copy_kept(self) -> None:
        """Allocate the buffer if needed, and copy the deferred gradients into it."""
        slots = self._slots or self._slots_in_use()
        if self.state is not GradState.FILLING:
            slots.buffer.materialize()
            self.state = GradState.FILLING
        kept, self._kept = self._kept, {}
        if kept and slots.whole and self.scaling.before == 1.0:
            compat.copy(list(map(slots.whole.__getitem__, kept)), list(kept.values()))
            return
        for index, grad in kept.items():
            self._put(index, grad)

    def close(self, *, stays_partial: bool) -> Closed:
        """Zero the slots without a gradient, and hand the buffer to a reduction.

        Afterwards there is a shard for its result: a new one, or a partial sum to add to.

        Args:
            stays_partial: the result will not be summed over replicas.
        """
        if self.state not in WRITABLE:
            self.accept()
        if self._kept or self.state is not GradState.FILLING:
            self._copy_kept()
        slots, self.state = self._slots or self._slots_in_use(), GradState.REDUCING
        self.ledger.count += 1
        written, self.written = self.written, set()
        if not self.partial:
            slots.buffer.new_shard()
        used = self._params
        missing: Params = []
        if len(written) < len(self._params):
            if empty := [index for index in slots.indices if index not in written]:
                compat.zero(slots.views(empty))
            used, missing = self._used_and_missing(slots, written | self._in_partial)
        closed = Closed(slots, used, missing, self.used_anywhere, self.ledger.count)
        # Now, not when the reduction has completed, which ranks may notice at different times.
        self.partial = stays_partial
        self._in_partial = frozenset([param.index for param in used]) if stays_partial else frozenset()
        if not stays_partial:
            self.used_anywhere = None
        return closed

    def _used_and_missing(self, slots: Slots, written: set[int]) -> tuple[Params, Params]:
        used: Params = []
        missing: Params = []
        for param in self._params:
            if param.index in written:
                used.append(param)
            elif param.index in slots.indices and param.index in self.trained:
                missing.append(param)
        return used, missing

    def reduction_of(
        self, buffers: list[DBuffer], transport: TransportChoice | None, separate: bool
    ) -> ReduceScatter:
        """The reduction of closed buffers of one mesh and scaling; prepared again if anything has changed since.

        Args:
            buffers: this one's first.
            transport: of the reduction. Defaults to that given to `fully_shard`.
            separate: whether reductions have separate process groups.
        """
        how = self.scaling
        key = (buffers, how.op, how.divide, transport, separate)
        if self._prepared is None or self._prepared[0] != key:
            group = self._plan.data.reduction_group() if separate else None
            call = dbuffer.ReduceScatter(
                buffers, op=how.op, divide=how.divide, transport=transport, group=group
            )
            self._prepared = (key, call)
        return self._prepared[1]

    def discard(self) -> None:
        """Forget gradients that were not reduced, and free their memory."""
        self.written = set()
        self.used_anywhere = None
        self._kept = {}
        if self.state is GradState.FILLING:
            self.buffer.wait()
            self.buffer.release()
        self.state = GradState.IDLE
        self.partial, self._in_partial = False, frozenset()
        if self.published is not None:
            self.published.withdraw()
            self.published = None

    # -- after the reduction ----------------------------------------------------------------------------------------

    def free(self, closed: Closed) -> None:
        """Free the buffer after its reduce-scatter."""
        closed.slots.buffer.release()
        self.state = GradState.IDLE

    def publish(self, closed: Closed, unused: Collection[int]) -> None:
        """Show reduced gradients as `.grad` of the sharded parameters, or add them there, and call the users' hooks.

        From then on their memory belongs to the parameters: it is free as soon as all their gradients are dropped.

        Args:
            unused: numbers of the missing parameters that get no `.grad`.
        """
        planned, slots, params = self._plan.params, closed.slots, closed.used
        views = list(slots.buffer.local_views.values()) if slots.whole else self._locals_of_runs(slots)
        if closed.missing:
            params = params + [param for param in closed.missing if param.index not in unused]
        grads: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for param in params:
            sharded: Any = param.sharded
            view, grad = views[param.index], sharded.grad
            if grad is None:
                sharded.grad = sharded.with_local(view)
                continue
            grads.append(as_sharded(self._plan, planned[param.index], sharded, grad).to_local())
            added.append(view)
        if grads:
            with torch.no_grad():
                compat.add(grads, added)
        slots.buffer.give_shard()
        for param in params:
            for hook in list((compat.post_accumulate_hooks(param.sharded) or {}).values()):
                hook(param.sharded)

    def _locals_of_runs(self, slots: Slots) -> list[torch.Tensor]:
        """This rank's slices of reduced gradients, in their local shapes; empty for parameters without a slot."""
        views, rank = slots.buffer.local_views, self._plan.geometry.rank
        nothing = slots.buffer.shard[0].narrow(0, 0, 0)
        slices = []
        for name, known in self._plan.geometry.slices.items():
            view = views.get(f"{name}@{rank}")
            empty = (0, *known.local_shape[1:])
            slices.append(nothing.view(empty) if view is None else view.view(known.local_shape))
        return slices
