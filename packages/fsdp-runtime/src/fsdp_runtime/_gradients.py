"""The gradients of one group: written into one buffer as autograd makes them, reduced from it, shown as `.grad`.

autograd's gradient --copy, cast--> view of gathered memory --reduce-scatter--> shard --> sharded_param.grad
(freed at once)                     (released)                                  (new in each step, ends with `.grad`)
"""

from typing import Any

import torch

from dbuffer import DBuffer

from . import _torch_compat as compat
from ._param import ManagedParam
from ._plan import GroupPlan, as_sharded
from ._scaling import ReduceOptions, Scaling, scaling
from ._streams import Streams

Params = list[ManagedParam[Any]]


class Gradients:
    """Gradient memory of a group; none until the first gradient comes.

    Attributes:
        buffer: the memory.
        options, scaling: the unit's options, and what follows from them: what is divided when.
        written: the numbers of the parameters whose gradients wait in the gathered memory.
        accepting: whether that memory is there and no reduction uses it.
        partial: whether the shard holds a sum that was not taken across replicas yet.
    """

    def __init__(self, name: str, plan: GroupPlan, params: Params, streams: Streams) -> None:
        self._name = name
        self._plan = plan
        self._params = params
        self._streams = streams
        self._made: DBuffer | None = None
        self._views: list[torch.Tensor] = []
        self.written: set[int] = set()
        self.accepting = False
        self.partial = False
        self._kept: list[tuple[int, torch.Tensor]] = []  # of the written, those that are still to be copied
        self.options = ReduceOptions()
        self.scaling = self._scaling_of(self.options)

    def rename(self, name: str) -> None:
        """Call the memory by the unit's new name."""
        self._name = name
        if self._made is not None:
            self._made.name = f"gradients of {name}"

    def scale(self, options: ReduceOptions) -> bool:
        """Follow the unit's options from the next reduction on. Returns whether gradients are scaled otherwise then."""
        before, self.scaling = self.scaling, self._scaling_of(options)
        self.options = options
        return self.scaling != before

    def _scaling_of(self, options: ReduceOptions) -> Scaling:
        data = self._plan.data
        return scaling(options, self._plan.dtypes.reduce, data.shard_size, data.num_replicas)

    @property
    def buffer(self) -> DBuffer:
        """The memory; made at the first use."""
        if self._made is None:
            plan = self._plan
            self._made = DBuffer(
                plan.layout,
                plan.data.mesh,
                full_dtype=plan.dtypes.reduce,
                recycler=self._streams.recycler,
                alias=False,
                name=f"gradients of {self._name}",
                check_ranks=False,
                **plan.buffer_options(),
            )
            self._made.give_shard()
            self._views = list(self._made.empty_views.values())
        return self._made

    # -- before the reduction ---------------------------------------------------------------------------------------

    def accept(self) -> None:
        """Have memory for gradients. No reduction may use it any more."""
        if not self.options.copy_late:
            self.buffer.materialize()
        self.accepting = True

    def write(self, index: int, grad: torch.Tensor) -> None:
        """Put one gradient into the memory, or add it to what is there since the last reduction."""
        if index in self.written:
            self._copy_kept()
            self._views[index].add_(grad, alpha=self.scaling.before)
            return
        self.written.add(index)
        if self.options.copy_late:
            self._kept.append((index, grad))
        else:
            self._copy(index, grad)

    def _copy(self, index: int, grad: torch.Tensor) -> None:
        view, scale = self._views[index], self.scaling.before
        if scale == 1.0:
            view.copy_(grad)
        elif view.dtype == grad.dtype:
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad).mul_(scale)

    def _copy_kept(self) -> None:
        """Bring the gradients into the memory that were kept as autograd made them."""
        self.buffer.materialize()
        kept, self._kept = self._kept, []
        for index, grad in kept:
            self._copy(index, grad)

    def close(self) -> list[ManagedParam[Any]]:
        """Zero what no gradient came for, so that all of it may be reduced. Returns the others' parameters.

        Afterwards there is a shard for what the reduction brings: a new one, or a partial sum to add to.
        """
        self._copy_kept()
        written, self.written = self.written, set()
        self.accepting = False
        if not self.partial:
            self.buffer.new_shard()
        if len(written) == len(self._views):
            return self._params
        compat.zero([view for index, view in enumerate(self._views) if index not in written])
        return [param for param in self._params if param.index in written]

    def discard(self) -> None:
        """Forget gradients that were not reduced, and free their memory."""
        self.written = set()
        self._kept = []
        self.accepting = self.partial = False
        if self._made is not None and self._made.materialized:
            self._made.wait()
            self._made.release()

    # -- after the reduction ----------------------------------------------------------------------------------------

    def release(self, *, partial: bool) -> None:
        """Free the gathered memory; what was reduced from it is in the shard, perhaps a partial sum."""
        self.buffer.release()
        self.partial = partial

    def add_unused(self, used: list[ManagedParam[Any]], all_of_them: bool) -> list[ManagedParam[Any]]:
        """Add parameters that got no gradient on this rank: all, or those to which other ranks contributed.

        What others contributed shows in this rank's shard. On CUDA looking waits for the device; it happens only where
        a parameter went unused.
        """
        if len(used) == len(self._params):
            return used
        missing = [p for p in self._params if p.sharded.requires_grad and p not in used]
        if all_of_them or not missing:
            return used + missing
        local = self.buffer.local_views
        asked = [p for p in missing if p.sharded.grad is None and local[p.name].numel()]
        largest = compat.largest([local[p.name] for p in asked]) if asked else ()
        return used + [p for p, norm in zip(asked, list(largest), strict=True) if norm != 0]  # also NaN

    def publish(self, params: list[ManagedParam[Any]]) -> None:
        """Show reduced gradients as `.grad` of the sharded parameters, or add them there, and call the users' hooks.

        From then on their memory belongs to the parameters: it is free as soon as all their gradients are dropped.
        """
        buffer, planned = self.buffer, self._plan.params
        views = buffer.local_views
        held: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for param in params:
            sharded: Any = param.sharded
            view, grad = views[param.name], sharded.grad
            if grad is None:
                sharded.grad = sharded.with_local(view)
            else:
                found = as_sharded(self._plan, planned[param.index], sharded, grad)
                held.append(found.to_local())
                added.append(view)
        if held:
            with torch.no_grad():
                compat.add(held, added)
        buffer.give_shard()
        for param, hook in compat.post_accumulate_hooks(params):
            hook(param.sharded)
