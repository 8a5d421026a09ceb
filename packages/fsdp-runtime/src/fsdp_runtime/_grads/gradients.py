"""The gradients of one group: written into one buffer as autograd makes them, reduced from it, shown as `.grad`.

autograd's gradient --copy, cast--> view of gathered memory --reduce-scatter--> shard --> sharded_param.grad
(freed at once;                     (released)                                  (new in each step, ends with `.grad`)
small ones a few together)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

import dbuffer
from dbuffer import ReduceScatter, TransportChoice

from .. import _torch_compat as compat
from .._plan.group import GroupPlan, as_sharded
from .._plan.param import ManagedParam
from .._torch.streams import Streams
from .memory import GradientMemory, TrainedMemory
from .scaling import ReduceOptions, Scaling, scaling

Params = list[ManagedParam[Any]]
_SMALL = 1 << 12  # elements. Gradients up to this wait for the next larger one and are copied in one call,
_SMALL_BYTES = 8 * _SMALL  # unless they would keep more memory than this: slices of something larger


class Gradients:
    """The gradients of a group between backward and `.grad`.

    Attributes:
        memory: the buffer, and what is where in it; another one after parameters were frozen or unfrozen.
        options, scaling: the unit's options, and what follows from them: what is divided when.
        written: the numbers of the parameters whose gradients wait in the gathered memory.
        accepting: whether gradients may be written: no reduction uses that memory.
        partial: whether the shard holds a sum that was not taken across replicas yet.
    """

    def __init__(
        self, name: str, plan: GroupPlan, params: Params, streams: Streams, options: ReduceOptions
    ) -> None:
        self._name = name
        self._plan = plan
        self._params = params
        self._streams = streams
        self.memory = self._whole = GradientMemory(name, plan, streams)
        self.written: set[int] = set()
        self.accepting = False
        self.partial = False
        self._writable = False  # whether the gathered memory is there
        self._kept: dict[int, torch.Tensor] = {}  # of the written, those that are still to be copied
        self._small: set[int] = set()
        for index, param in enumerate(plan.params):
            if math.prod(param.shape) <= _SMALL:
                self._small.add(index)
        self.options = options
        self.scaling = self._scaling_of(options)
        self._training_changed = True
        self._trained: frozenset[int] | None = None
        self._first_reduction = 0
        self._prepared: tuple[tuple[Any, ...], ReduceScatter] | None = None

    def rename(self, name: str) -> None:
        """Call the memory by the unit's new name."""
        self._name, self._prepared = name, None
        for memory in {self._whole, self.memory}:
            memory.rename(name)

    def set_step(self, step: int) -> None:
        """Let stochastic rounding depend on the step; multiples of the golden ratio leave room for many reductions."""
        self._first_reduction = step * 0x9E3779B9 & 0xFFFFFFFF
        for memory in {self._whole, self.memory}:
            memory.count_reductions_from(self._first_reduction)

    def scale(self, options: ReduceOptions) -> None:
        """Apply new reduction options, from the next reduction on."""
        self.options, self.scaling = options, self._scaling_of(options)

    def _scaling_of(self, options: ReduceOptions) -> Scaling:
        data = self._plan.data
        return scaling(options, self._plan.dtypes.reduce, data.shard_size, data.num_replicas)

    def training_changed(self) -> None:
        """Parameters were frozen or unfrozen: from the next reduction on only those that are trained travel."""
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
        trained = self.trained
        if len(trained) in (0, len(self._params)):
            self.memory = self._whole
        elif trained != self.memory.indices:
            self.memory = TrainedMemory(self._name, self._plan, self._streams, trained)
            self.memory.count_reductions_from(self._first_reduction)

    # -- before the reduction ---------------------------------------------------------------------------------------

    def accept(self) -> None:
        """Start accepting gradients. The last reduction must have released the buffer; the first write allocates it."""
        if self._training_changed and not self.partial:
            self._follow_training()
        self.accepting = True

    def write(self, index: int, grad: torch.Tensor, soon: bool = False) -> None:
        """Put one gradient into the memory, or add it to what is there since the last reduction.

        Args:
            soon: the reduction is near, so that a small gradient may wait for it and be copied with others.

        Raises:
            RuntimeError: the parameter was unfrozen while gradients of others wait for their reduction.
        """
        if index in self.written:
            if self._kept:
                self._copy_kept()
            self.memory.add(index, grad, self.scaling.before)
            return
        if index not in self.memory.indices:
            raise RuntimeError(
                f"{self._params[index].name} in {self._name} was unfrozen while gradients of other parameters of its "
                "group wait to be reduced; change requires_grad between optimizer steps"
            )
        self.written.add(index)
        if self.options.copy_late or (
            soon and index in self._small and grad.untyped_storage().nbytes() <= _SMALL_BYTES
        ):
            self._kept[index] = grad
        else:
            if self._kept or not self._writable:
                self._copy_kept()
            self.memory.put(index, grad, self.scaling.before)

    def _copy_kept(self) -> None:
        """Allocate the buffer if needed, and copy the deferred gradients into it."""
        if not self._writable:
            self.memory.buffer.materialize()
            self._writable = True
        if self._kept:
            kept, self._kept = self._kept, {}
            self.memory.put_all(kept, self.scaling.before)

    def close(self) -> Params:
        """Zero the slots without a gradient. Returns the parameters that have one.

        Afterwards there is a shard for what the reduction brings: a new one, or a partial sum to add to.
        """
        if not self.accepting:
            self.accept()
        if self._kept or not self._writable:
            self._copy_kept()
        written, self.written = self.written, set()
        self.accepting = self._writable = False
        if not self.partial:
            self.memory.buffer.new_shard()
        if len(written) == len(self._params):
            return self._params
        if missing := [index for index in self.memory.indices if index not in written]:
            self.memory.zero(missing)
        return [param for param in self._params if param.index in written]

    def reduction_of(
        self, members: "list[Gradients]", transport: TransportChoice | None, separate: bool
    ) -> ReduceScatter:
        """The reduction of the memory of `members`, after `close`; prepared again if anything has changed since.

        Args:
            members: groups of one mesh and scaling, of which this is the first.
            transport: of the reduction; None: as given to `fully_shard`.
            separate: whether reductions have separate process groups.
        """
        memories, how = [gradients.memory for gradients in members], self.scaling
        key = (memories, how.op, how.divide, transport, separate)
        if self._prepared is None or self._prepared[0] != key:
            group = self._plan.data.reduction_group() if separate else None
            buffers = [memory.buffer for memory in memories]
            call = dbuffer.ReduceScatter(
                buffers, op=how.op, divide=how.divide, transport=transport, group=group
            )
            self._prepared = (key, call)
        return self._prepared[1]

    def discard(self) -> None:
        """Forget gradients that were not reduced, and free their memory."""
        self.written = set()
        self._kept = {}
        if self._writable:
            self.memory.buffer.wait()
            self.memory.buffer.release()
        self.accepting = self.partial = self._writable = False

    # -- after the reduction ----------------------------------------------------------------------------------------

    def free(self, memory: GradientMemory, *, partial: bool) -> None:
        """Free the buffer after its reduce-scatter. `partial`: the shard is not yet summed over replicas."""
        memory.buffer.release()
        self.partial = partial

    def publish(self, memory: GradientMemory, used: Params, *, all_unused: bool) -> None:
        """Show reduced gradients as `.grad` of the sharded parameters, or add them there, and call the users' hooks.

        From then on their memory belongs to the parameters: it is free as soon as all their gradients are dropped.

        Args:
            memory: what was reduced.
            used: those that got a gradient on this rank.
            all_unused: show those of the other trained parameters too; else where other ranks contributed.
        """
        planned = self._plan.params
        views = memory.locals()
        params = used
        if len(used) < len(self._params):
            params = used + self._unused(memory, views, used, all_unused)
        held: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for param in params:
            sharded: Any = param.sharded
            view, grad = views[param.index], sharded.grad
            if grad is None:
                sharded.grad = sharded.with_local(view)
            else:
                found = as_sharded(self._plan, planned[param.index], sharded, grad)
                held.append(found.to_local())
                added.append(view)
        if held:
            with torch.no_grad():
                compat.add(held, added)
        memory.buffer.give_shard()
        for param, hook in compat.post_accumulate_hooks(params):
            hook(param.sharded)

    def _unused(
        self, memory: GradientMemory, views: Sequence[torch.Tensor], used: Params, all_of_them: bool
    ) -> Params:
        """The trained parameters that got no gradient on this rank: all, or those to which other ranks contributed.

        What others contributed shows in this rank's shard. On CUDA looking waits for the device; it happens only where
        a parameter went unused.
        """
        known = {param.index for param in used}
        missing = [
            param
            for param in self._params
            if param.index not in known and param.index in memory.indices and param.sharded.requires_grad
        ]
        if all_of_them or not missing:
            return missing
        if self._streams.layer.capturing:
            raise RuntimeError(
                f"{[param.name for param in missing]} of {self._name} got no gradient, and a graph cannot look "
                "at what other ranks contributed; use every parameter, or set_reduce_scatter_unused_params(True)"
            )
        asked = [p for p in missing if p.sharded.grad is None and views[p.index].numel()]
        largest = compat.largest([views[p.index] for p in asked]) if asked else ()
        return [p for p, norm in zip(asked, list(largest), strict=True) if norm != 0]  # also NaN
