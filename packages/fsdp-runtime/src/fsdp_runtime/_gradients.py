"""The gradients of one group: written into one buffer as autograd makes them, reduced from it, shown as `.grad`.

autograd's gradient --copy, cast--> view of full --reduce-scatter--> shard --> sharded_param.grad
(freed at once)                     (released)                       (new in each step, ends with `.grad`)
"""

from typing import TYPE_CHECKING

import torch

from dbuffer import DBuffer

from . import _torch_compat as compat
from ._param import ManagedParam

if TYPE_CHECKING:
    from ._group import Group


class Gradients:
    """Gradient memory of a group; nothing until the first gradient comes."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self.buffer: DBuffer | None = None
        self._written: set[str] = set()
        self._partial = False  # reduced inside shards, not yet across replicas

    def forget(self) -> None:
        """Drop the memory: parameters have new memory, of another dtype perhaps."""
        self.__init__(self._group)  # type: ignore[misc]

    # -- before the reduction ---------------------------------------------------------------------------------------

    @property
    def has_memory(self) -> bool:
        """Whether the gathered buffer has memory."""
        return self.buffer is not None and self.buffer.materialized

    @property
    def complete(self) -> bool:
        """Whether every parameter that is trained has a gradient in the buffer."""
        return bool(self._written) and all(
            p.name in self._written for p in self._group.params if p.sharded.requires_grad
        )

    def awaits_only(self, param: ManagedParam) -> bool:
        """Whether every other parameter that is trained has a gradient in the buffer, and this one has none."""
        trained = {p.name for p in self._group.params if p.sharded.requires_grad}
        return trained - self._written == {param.name}

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be reduced."""
        return bool(self._written)

    def write(self, param: ManagedParam, grad: torch.Tensor, scale: float) -> None:
        """Put one gradient into the buffer, or add it to what is there since the last reduction."""
        buffer = self._ready()
        buffer.materialize()
        view = buffer.empty_views[param.name]
        if param.name in self._written:
            view.add_(grad, alpha=scale)
            return
        self._written.add(param.name)
        if scale == 1.0:
            view.copy_(grad)
        elif view.dtype == grad.dtype:
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad).mul_(scale)

    def close(self) -> list[ManagedParam]:
        """Zero what no gradient came for, so that the whole buffer may be reduced. Returns the others' parameters."""
        buffer = self._ready()
        buffer.materialize()
        missing = [view for name, view in buffer.empty_views.items() if name not in self._written]
        if missing:
            compat.zero(missing)
        used = [param for param in self._group.params if param.name in self._written]
        self._written.clear()
        return used

    def discard(self) -> None:
        """Forget gradients that were not reduced, and free their memory."""
        self._written.clear()
        self._partial = False
        if self.buffer is not None and self.buffer.materialized:
            self.buffer.wait()
            self.buffer.release()

    def _ready(self) -> DBuffer:
        if self.buffer is None:
            group, params = self._group, self._group.buffer
            assert params is not None
            self.buffer = DBuffer(
                group.layout,
                group.data.mesh,
                dtype=group.dtypes.kept,
                full_dtype=group.dtypes.reduce,
                device=params.device,
                shard_dim=-1,
                replicate_dim=0 if group.data.hybrid else None,
                recycler=group.recycler,
                alias=False,
                name=f"gradients of {group.name}",
                check_ranks=False,
                **group.shard_options,
            )
            self.buffer.give_shard()
        return self.buffer

    # -- the reduction ----------------------------------------------------------------------------------------------

    def take_up(self) -> bool:
        """Have memory for what a reduction brings; whether to add to what is there: a partial sum."""
        if not self._partial:
            self.filled.new_shard()
        return self._partial

    def reduced(self, everywhere: bool) -> None:
        """The reduction has landed: free the gathered memory.

        Args:
            everywhere: also across replicas; else the shard holds a partial sum that the next reduction adds to.
        """
        self.filled.release()
        self._partial = not everywhere

    @property
    def filled(self) -> DBuffer:
        """The buffer, which must be there by now."""
        assert self.buffer is not None
        return self.buffer

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """This rank's flat gradients, one a segment."""
        return self.filled.shard

    @property
    def partial(self) -> bool:
        """Whether the shard holds a sum that was not taken across replicas yet."""
        return self._partial

    def local(self, param: ManagedParam) -> torch.Tensor:
        """This rank's part of a reduced gradient."""
        return self.filled.local_views[param.name]

    def with_unused(self, used: list[ManagedParam], all_of_them: bool) -> list[ManagedParam]:
        """Add parameters that got no gradient on this rank: all, or those to which other ranks contributed.

        What others contributed shows in this rank's shard. On CUDA looking waits for the device; it happens only where
        a parameter went unused.
        """
        missing = [p for p in self._group.params if p.sharded.requires_grad and p not in used]
        if all_of_them or not missing:
            return used + missing
        asked = [p for p in missing if p.sharded.grad is None and self.local(p).numel()]
        largest = compat.largest([self.local(p) for p in asked]) if asked else ()
        return used + [p for p, norm in zip(asked, list(largest), strict=True) if norm != 0]  # also NaN

    def publish(self, params: list[ManagedParam]) -> None:
        """Show reduced gradients as `.grad` of the sharded parameters, or add them there, and call the users' hooks.

        From then on their memory belongs to the parameters: it is free as soon as all their gradients are dropped.
        """
        add: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param in params:
            view, held = self.local(param), param.sharded.grad
            if held is None:
                param.sharded.grad = self._group.ragged(param, view)
            else:
                add.append((self._group.as_sharded(param, held).to_local(), view))
        with torch.no_grad():
            if add:
                compat.add([held for held, _ in add], [view for _, view in add])
        self.filled.give_shard()
        for param in params:
            for hook in compat.post_accumulate_hooks(param.sharded):
                hook(param.sharded)
