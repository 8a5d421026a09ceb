"""The gradients of one group: kept as autograd makes them, reduced from one buffer, shown as `.grad`.

autograd's gradients --one copy, cast--> gathered memory --reduce-scatter--> shard --> sharded_param.grad
(freed when copied)                      (released)                          (new in each step, ends with `.grad`)

They are copied at the reduction, or when a second gradient is added: until then one that comes early in backward, such
as a tied head's, keeps its own memory and not the group's.

A shard that replicas or a hook change has the reduction's dtype and is on the device; it is divided, and where
dtypes or devices differ copied, when they are done.

all tensors trained     the parameters' own layout: a gradient is written to one view
some frozen since       only the trained ones are reduced: a gradient is written to a view for each rank's part of it
"""

import contextlib
import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import dbuffer
from dbuffer import DBuffer, ReduceScatter, ShardMemory, TransportChoice
from ragged_shard.device import CPU

from .. import _torch_compat as compat
from .._plan.group import GroupPlan, as_sharded, is_laid_out, trained_layout
from .._plan.param import ManagedParam
from .._torch.streams import Streams
from .scaling import Op, ReduceOptions, Scaling, scaling

Params = list[ManagedParam[Any]]


class Full(enum.Enum):
    """The state of full parameters, or of full gradients.

    EMPTY     none; no memory
    BUSY      a collective uses them
    PRESENT   the computation may use them

        parameters of a unit     EMPTY --gather--> BUSY --unshard--> PRESENT --reshard--> EMPTY
        gradients of a group     EMPTY --accept--> PRESENT --close--> BUSY --free--> EMPTY
    """

    EMPTY = enum.auto()
    BUSY = enum.auto()
    PRESENT = enum.auto()


@dataclass(eq=False)
class Slots:
    """A gradient buffer, and where each gradient is written in it."""

    indices: Collection[int]  # numbers of the parameters with a slot
    buffer: DBuffer  # gathered memory, and the shard that a reduction fills
    whole: list[torch.Tensor]  # view of each gradient, if the buffer has the parameters' layout
    # else for each gradient its runs: the first element, and the view
    runs: dict[int, list[tuple[int, torch.Tensor]]]
    staged: bool  # whether the shard has the reduction's dtype and is on the device, whatever gradients have

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
class Unconfirmed:
    """A reduction since the ranks compared last which parameters they used."""

    expected: list[int]  # numbers of all trained parameters, the same on every rank
    missing: set[int]  # numbers of those without a gradient on this rank: another rank may have one
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # the reduced gradients of these


@dataclass(frozen=True, eq=False)
class Closed:
    """Gradients that a reduction takes."""

    slots: Slots  # where they are
    # memory for the complete gradients, where the shard has another dtype or device; else None
    copy: ShardMemory | None
    used: Params  # the parameters that got one on this rank since the last `.grad`; or all that are trained
    others: Unconfirmed  # the other trained parameters
    op: Op  # of the sum over replicas
    # the sum is divided by this when replicas have been added and the hook was called; None: it is complete
    divide: float | None
    stays_partial: bool  # whether the sum over replicas is left to a later reduction


class GradBuffer:
    """The gradients of a group between backward and `.grad`."""

    # options, scaling: the unit's options, and the resulting divisions; set by `scale`
    options: ReduceOptions
    scaling: Scaling

    def __init__(
        self, name: str, plan: GroupPlan, params: Params, streams: Streams, options: ReduceOptions
    ) -> None:
        self._name = name
        self._plan = plan
        self._params = params
        self._streams = streams
        self.full = Full.EMPTY  # whether there are gradients; the first one, or the reduction, allocates them
        self.written: set[int] = set()  # numbers of the parameters whose gradients wait for their reduction
        # whether the shard holds a sum that was not yet taken over replicas; the next reduction adds to it
        self.partial = False
        self._in_partial: frozenset[int] = frozenset()  # the parameters with a part of that sum here
        # reductions since the ranks compared last which parameters they used
        self.unconfirmed: list[Unconfirmed] = []
        self._whole: Slots | None = None  # of all parameters; made at the first use, as are the others
        self._slots: Slots | None = None  # in use
        self._indices: Collection[int] = range(len(params))  # with a slot
        self._kept: dict[int, torch.Tensor] = {}  # written gradients that are still to be copied
        self.scale(options)
        self._training_changed = True
        self._trained: frozenset[int] | None = None
        self._first_reduction = 0
        self._prepared: tuple[tuple[Any, ...], ReduceScatter] | None = None

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
    def _summed_later(self) -> bool:
        """Whether replicas or a hook change a reduced shard, which is complete after that."""
        return self._plan.data.hybrid or self.options.hook is not None

    @property
    def _staged(self) -> bool:
        dtypes = self._plan.dtypes
        return self._summed_later and (dtypes.reduce != dtypes.grad or self._plan.offload is not None)

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
        plan, indices, staged = self._plan, self._indices, self._staged
        whole = isinstance(indices, range)
        options = plan.buffer_options(gradients=True)
        if staged:
            options |= {"dtype": plan.dtypes.reduce, "shard_device": None, "pin_memory": False}
        buffer = DBuffer(
            plan.layout if whole else trained_layout(plan.layout, frozenset(indices)),
            plan.data.mesh,
            full_dtype=plan.dtypes.reduce,
            recycler=self._streams.recycler,
            alias=False,
            name=f"gradients of {self._name}",
            check_ranks=False,
            **options,
        )
        buffer.give_shard()
        buffer.reductions = self._first_reduction
        views = buffer.empty_views
        if whole:
            return Slots(indices, buffer, list(views.values()), {}, staged)
        runs: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index in indices:
            name = plan.params[index].name
            for rank in range(plan.layout.world_size):
                if (view := views.get(f"{name}@{rank}")) is not None:
                    runs.setdefault(index, []).append((plan.layout.local_range(name, rank)[0], view))
        return Slots(indices, buffer, [], runs, staged)

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for their reduction, or the end of backward has not waited for reductions since."""
        return bool(self.written or self.unconfirmed)

    # -- before the reduction ---------------------------------------------------------------------------------------

    def accept(self) -> None:
        """Start accepting gradients. The last reduction must have released the buffer."""
        if not self.partial:
            if self._slots is not None and self._slots.staged is not self._staged:
                self._slots = self._whole = None
            if self._training_changed:
                self._follow_training()
        self.full = Full.PRESENT

    def write(self, index: int, grad: torch.Tensor) -> None:
        """Keep one gradient for the reduction, or add it to the gradients since the last one.

        Raises RuntimeError if the parameter was unfrozen while gradients of others wait for their reduction.
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
        self._kept[index] = grad

    def _copy_kept(self) -> None:
        """Allocate the buffer if needed, and copy the kept gradients into it."""
        slots, scale = self._slots or self._slots_in_use(), self.scaling.before
        slots.buffer.materialize()
        if not self._kept:
            return
        kept, self._kept = self._kept, {}
        if slots.whole:
            views, parts = list(map(slots.whole.__getitem__, kept)), list(kept.values())
        else:
            pairs = [pair for index, grad in kept.items() for pair in slots.pairs(index, grad)]
            views, parts = [view for view, _ in pairs], [part for _, part in pairs]
        compat.copy(views, parts)
        if scale != 1.0:
            compat.scale(views, scale)

    def close(self, *, shows_all: bool) -> Closed:
        """Zero the slots without a gradient, and give the buffer to a reduction.

        Afterwards there is a shard for its result: a new one, or a partial sum to add to. With `shows_all` all trained
        parameters count as used.
        """
        stays_partial = self._plan.data.hybrid and not self.options.all_reduce
        if self.full is not Full.PRESENT:
            self.accept()
        self._copy_kept()
        slots, self.full = self._slots or self._slots_in_use(), Full.BUSY
        written, self.written = self.written, set()
        if not self.partial:
            slots.buffer.new_shard()
        used, expected = self._params, sorted(self.trained.intersection(slots.indices))
        if len(written) < len(self._params):
            if empty := [index for index in slots.indices if index not in written]:
                compat.zero(slots.views(empty))
            written |= self._in_partial
            if shows_all:
                written.update(expected)
            used = [param for param in self._params if param.index in written]
        self.partial = stays_partial
        self._in_partial = frozenset([param.index for param in used]) if stays_partial else frozenset()
        divide = self.scaling.divide if self._summed_later else None
        copy = self._new_copy(slots) if slots.staged and not stays_partial else None
        others = Unconfirmed(expected, set(expected) - written)
        if not stays_partial:
            self.unconfirmed.append(others)
        return Closed(slots, copy, used, others, self.scaling.op, divide, stays_partial)

    def _new_copy(self, slots: Slots) -> ShardMemory:
        plan, offload = self._plan, self._plan.offload
        if offload is None:
            return slots.buffer.other_shard(plan.dtypes.grad, plan.data.device)
        return slots.buffer.other_shard(plan.dtypes.grad, CPU, pin_memory=offload.pin_memory)

    def reduction_of(
        self, buffers: list[DBuffer], transport: TransportChoice | None, separate: bool
    ) -> ReduceScatter:
        """The reduction of closed buffers, this one's first, of one mesh and scaling; prepared again after a change.

        The transport is by default as given to `fully_shard`; `separate`: reductions have separate process groups.
        """
        op, divide = self.scaling.op, None if self._summed_later else self.scaling.divide
        key = (buffers, op, divide, transport, separate)
        if self._prepared is None or self._prepared[0] != key:
            group = self._plan.data.reduction_group() if separate else None
            call = dbuffer.ReduceScatter(buffers, op=op, divide=divide, transport=transport, group=group)
            self._prepared = (key, call)
        return self._prepared[1]

    def discard(self) -> None:
        """Forget gradients that were not reduced, and free their memory."""
        self.written, self.unconfirmed, self._kept = set(), [], {}
        if self.full is Full.PRESENT and self._slots is not None:
            self._slots.buffer.wait()
            self._slots.buffer.release()
        self.full = Full.EMPTY
        self.partial, self._in_partial = False, frozenset()

    # -- after the reduction ----------------------------------------------------------------------------------------

    def free(self, closed: Closed) -> None:
        """Free the buffer after its reduce-scatter."""
        closed.slots.buffer.release()
        self.full = Full.EMPTY

    def publish(self, closed: Closed, used: list[torch.Tensor], refusal: str) -> None:
        """Show reduced gradients as `.grad` of the sharded parameters, or add them there, and call the users' hooks.

        From then on their memory belongs to the parameters: it is free as soon as all their gradients are dropped.
        Gradients of parameters that were not used here wait for `publish_missing`.

        Args:
            used: gets the tensors that this uses on the current stream, before any hook is called, which may raise;
                they are not to be freed before that.
            refusal: why hooks may not communicate; empty if they may.
        """
        buffer, copy = closed.slots.buffer, closed.copy
        if closed.divide is not None:
            for flat in buffer.shard:
                flat.mul_(1.0 / closed.divide)
        used += buffer.shard
        if copy is not None:
            for to, flat in zip(copy.flats, buffer.shard, strict=True):
                to.copy_(flat, non_blocking=True)
            used += copy.flats
        views = buffer.local_views if copy is None else copy.views
        buffer.give_shard()
        if not closed.slots.whole:
            views = self._locals_of_runs(views)
        for index in closed.others.missing:
            closed.others.kept[index] = views[self._params[index].key]
        self._show({param.index: views[param.key] for param in closed.used}, used, refusal)

    def publish_missing(self, used_anywhere: Iterator[int], refusal: str) -> None:
        """Show gradients of parameters that were not used here, but on another rank.

        `used_anywhere` says of each expected parameter of each unconfirmed reduction whether any rank has used it; it
        is empty where this rank misses none.
        """
        unconfirmed, self.unconfirmed = self.unconfirmed, []
        for reduction in unconfirmed:
            flags = {index: next(used_anywhere, 0) for index in reduction.expected}
            self._show({index: view for index, view in reduction.kept.items() if flags[index]}, [], refusal)

    @torch.no_grad()
    def _show(self, grads: Mapping[int, torch.Tensor], used: list[torch.Tensor], refusal: str) -> None:
        """Set or add to `.grad` of these parameters, with the users' hooks before and after; see `publish`."""
        planned, shown = self._plan.params, [self._params[index] for index in sorted(grads)]
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # to add to, what to add
        hooked = [param for param in shown if param.has_hooks]
        if self._plan.offload is not None and (
            hooked or any(param.sharded.grad is not None for param in shown)
        ):
            self._streams.layer.wait_on_host(self._streams.layer.record())  # for copies from the device
        with compat.RefuseCollectives(refusal) if refusal and hooked else contextlib.nullcontext():
            for param in hooked:
                self._call_gradient_hooks(param, grads[param.index], used)
            for param in shown:
                sharded: Any = param.sharded
                view, grad, cut = grads[param.index], sharded.grad, planned[param.index]
                if grad is not None and is_laid_out(cut, grad):
                    sums.append((grad.to_local(), view))
                    continue
                if grad is not None:  # a user's, of another layout: adding to a copy would change none
                    used.append(grad)
                    sums.append((view, as_sharded(self._plan, cut, sharded, grad).to_local()))
                sharded.grad = sharded.with_local(view)
            if sums:
                into, added = map(list, zip(*sums, strict=True))
                used += into
                compat.add(into, added)
            for param in hooked:
                for hook in param.post_accumulate_hooks:
                    hook(param.sharded)

    def _call_gradient_hooks(
        self, param: ManagedParam[Any], view: torch.Tensor, used: list[torch.Tensor]
    ) -> None:
        """Write the results of the users' `register_hook` on a parameter into its reduced gradient."""
        sharded: Any = param.sharded
        for hook in param.gradient_hooks:
            grad = sharded.with_local(view)
            result = hook(grad)
            if result is None or result is grad:
                continue
            if not isinstance(result, torch.Tensor) or result.shape != grad.shape:
                returned = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise RuntimeError(
                    f"a hook on the gradient of {param.name} in {self._name} returned {returned}; expected None or a "
                    f"tensor of shape {tuple(grad.shape)}"
                )
            used.append(result)
            view.copy_(as_sharded(self._plan, self._plan.params[param.index], sharded, result).to_local())

    def _locals_of_runs(self, views: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """This rank's slices of reduced gradients, in their local shapes; empty for parameters without a slot."""
        rank, slices = self._plan.geometry.rank, {}
        nothing = next(iter(views.values())).reshape(-1).narrow(0, 0, 0)
        for name, known in self._plan.geometry.slices.items():
            view = views.get(f"{name}@{rank}")
            empty = (0, *known.local_shape[1:])
            slices[name] = nothing.view(empty) if view is None else view.view(known.local_shape)
        return slices
