"""The parameters of one unit that share dtype, mesh and training state: one buffer for them, one for their gradients.

on meta     no memory: sharded parameters are ragged tensors on the meta device
   |  adopt(): every parameter has memory (to_empty, a loaded state dict)
at rest     sharded parameters are views of the buffer's shard; there is no gathered memory
   |  Unit.unshard / reshard
gathered    unsharded parameters are views of the gathered memory
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dbuffer import DBuffer
from ragged_shard import RaggedDTensor, installed_versions

from .. import _torch_compat as compat
from .._grads.buffer import GradBuffer
from .._grads.scaling import ReduceOptions
from .._plan.extension import refuse_patched
from .._plan.group import GroupPlan, ParamPlan, as_sharded, local_value, wrap_local
from .._plan.param import MakeHook, ManagedParam, local_of
from .._torch.streams import Streams
from .at_rest import is_at_rest, quantized
from .extended_gather import ExtendedGather

# Layouts, messages and checkpoints depend on these, so all ranks must have the same versions.
_PACKAGES = ("torch", "layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")
_IN_COMMON = installed_versions(*_PACKAGES)


class Group:
    """A plan with its memory.

    Attributes:
        name: for errors and profiles.
        plan: what is fixed.
        params: in the order of the module.
        buffer: their memory; None while one is on the meta device.
        gradients: their gradients' memory.
        extended: gather of parameters that are tensor subclasses with FSDP2's all-gather extensions, else None.
    """

    def __init__(
        self,
        unit_name: str,
        suffix: str,
        plan: GroupPlan,
        params: "list[ManagedParam[Group]]",
        streams: Streams,
        make_hook: MakeHook,
        reduction: ReduceOptions,
    ) -> None:
        self.name = unit_name + suffix
        self._suffix = suffix
        self.plan = plan
        self.params = params
        self._streams = streams
        self._make_hook = make_hook
        self.buffer: DBuffer | None = None
        self._views: Mapping[str, torch.Tensor] = {}  # of the gathered memory
        self.gradients = GradBuffer(self.name, plan, params, streams, reduction)
        self._gathered_versions: list[int] = []
        self._one_a_segment: list[torch.Tensor] = []  # of the views
        self._full_versions: list[int] = []  # of the gathered memory; a gather does not count
        self._users_at_rest = 0
        self.extended: ExtendedGather | None = None
        self._loaded: list[RaggedDTensor] = []  # until `commit`

    def rename(self, unit_name: str) -> None:
        """Call the group and its memory by the unit's new name."""
        self.name = unit_name + self._suffix
        if self.buffer is not None:
            self.buffer.name = self.name
        self.gradients.rename(self.name)

    def plan_of(self, param: "ManagedParam[Group]") -> ParamPlan:
        """Plan of a parameter of this group."""
        return self.plan.params[param.index]

    # -- getting memory ---------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy values into new memory: full plain tensors, the same on every rank; sharded ones; or any on meta.

        The parameters themselves do not change before `commit`. While one has no memory, they stay where their values
        are, until `adopt`. Communicates for sharded ones of another layout (see `ragged_shard.redistribute`).
        """
        slices: list[torch.Tensor] = []
        on_meta, at_rest = False, self.plan.at_rest
        for param, plan in zip(self.params, self.plan.params, strict=True):
            value = values[param.name]
            if param.extension is not None:
                value = param.plain(value)
            if at_rest is not None and is_at_rest(value):  # values of these would be quantized twice
                slices.append(quantized(self.plan, plan, value))
            else:
                slices.append(local_value(self.plan, plan, value))
            on_meta = on_meta or slices[-1].is_meta
        if on_meta:
            for param, plan, local in zip(self.params, self.plan.params, slices, strict=True):
                kept = (
                    param.extended(local.clone())
                    if at_rest is None
                    else quantized(self.plan, plan, values[param.name])
                )
                self._loaded.append(wrap_local(plan, kept))
            return
        self._allocate()
        self._loaded = self._filled(slices)

    def commit(self) -> None:
        """Point the parameters at the memory that `load` filled, and put the sharded ones into their modules."""
        loaded, self._loaded = self._loaded, []
        self._point_to(loaded)
        for param in self.params:
            for slots, attribute in param.slots:
                slots[attribute] = param.sharded

    def adopt(self) -> None:
        """Move parameters that were given other memory (`to`, `to_empty`, an assigned state dict) into the buffer.

        Communicates only for assigned parameters of another layout (the collective that `ragged_shard.redistribute`
        uses for it).

        Raises:
            ValueError: an assigned parameter of another shape or kind, or dtypes that differ within the group.
        """
        moved = self._moved()
        if not moved:
            return
        for param in moved:
            self._accept_assigned(param)
        if any(param.sharded.is_meta for param in self.params):
            return
        dtype = self._common_dtype()
        locals_ = [param.plain(local_of(param.sharded)) for param in self.params]
        if self.buffer is None or self.buffer.dtype != dtype:
            self._replan(dtype)
            moved = self.params
        assert self.buffer is not None
        values: list[torch.Tensor | None] = [None] * len(self.params)
        for param in moved:
            values[param.index] = locals_[param.index]
        self._point_to(self._filled(values))

    def _common_dtype(self) -> torch.dtype:
        dtypes = {param.sharded.dtype: param.name for param in self.params}
        if len(dtypes) > 1:
            names = {str(dtype): name for dtype, name in dtypes.items()}
            raise ValueError(
                f"{self.name}: parameters that were sharded together now have different dtypes {names}; "
                "convert all of them, or shard the module again"
            )
        return next(iter(dtypes))

    def materialize(self) -> None:
        """Allocate zeros in the buffer for parameters on the meta device; move the others there with their values.

        Those that were on meta are other objects afterwards, as after `to_empty`.
        Issues the 64-byte all-reduce per mesh axis that compares the ranks' layouts, if there was no buffer.
        """
        if self.buffer is not None:
            return
        values = [None if p.sharded.is_meta else p.plain(local_of(p.sharded)) for p in self.params]
        dtype = self._common_dtype()
        if dtype == self.plan.dtypes.kept:
            self._allocate()
        else:
            self._replan(dtype)
        self._renew_from_meta()
        self._point_to(self._filled(values))

    def _renew_from_meta(self) -> None:
        assert self.buffer is not None
        for param, plan in zip(self.params, self.plan.params, strict=True):
            if param.sharded.is_meta:  # torch does not let a parameter change from meta
                local = param.extended(self.buffer.local_views[param.name])
                param.renew_sharded(wrap_local(plan, local))

    def has_moved(self) -> bool:
        """Whether `adopt` has something to do."""
        return self.buffer is None or bool(self._moved())

    def _moved(self) -> "list[ManagedParam[Group]]":
        """The parameters whose object, or whose memory, is not what this group has given them."""
        if self.buffer is None:
            return self.params
        moved = []
        for param in self.params:
            slots, attribute = param.slots[0]
            sharded: Any = param.sharded
            registered = slots.get(attribute)
            if (
                registered is not sharded and registered is not param.unsharded
            ) or sharded.local is not param.local:
                moved.append(param)
        return moved

    def _accept_assigned(self, param: "ManagedParam[Group]") -> None:
        """Adopt a parameter object that the user put into the module."""
        assigned = param.registered()
        if assigned is param.sharded or assigned is param.unsharded:
            return
        if assigned is None:
            raise ValueError(
                f"{self.name}: parameter {param.name} was taken out of its module after fully_shard"
            )
        if tuple(assigned.shape) != tuple(param.sharded.shape):
            raise ValueError(
                f"{self.name}: parameter {param.name} was replaced by one of shape {tuple(assigned.shape)}; "
                f"expected {tuple(param.sharded.shape)}"
            )
        value = self.as_sharded(param, assigned)
        if isinstance(assigned, RaggedDTensor):
            adopted = assigned if isinstance(assigned, nn.Parameter) else nn.Parameter(assigned)
            adopted.data = value
        else:
            adopted = nn.Parameter(value, requires_grad=param.sharded.requires_grad)
        param.adopt_sharded(adopted)

    def as_sharded(self, param: "ManagedParam[Group]", value: torch.Tensor) -> RaggedDTensor:
        """A value of the global shape, laid out like the sharded parameter. See `_plan.group.as_sharded`."""
        plan = self.plan_of(param)
        if self.plan.at_rest is not None:
            return wrap_local(plan, quantized(self.plan, plan, value))
        sharded = as_sharded(self.plan, plan, param.sharded, param.plain(value.detach()))
        return sharded if param.extension is None else sharded.with_local(param.extended(sharded.local))

    def _replan(self, dtype: torch.dtype) -> None:
        """Switch to `dtype`, with new, uninitialised buffers."""
        self.plan = self.plan.with_kept_dtype(dtype)
        options = self.gradients.options
        self.gradients = GradBuffer(self.name, self.plan, self.params, self._streams, options)
        self._allocate()

    def _allocate(self) -> None:
        plan = self.plan
        if self.params[0].extension is not None:
            compute, layer = plan.dtypes.compute, self._streams.layer
            self.extended = ExtendedGather(
                self.name, self.params, plan.data, plan.precision, compute, layer, self._make_hook
            )
        self.buffer = DBuffer(
            self.plan.layout,
            self.plan.data.mesh,
            full_dtype=self.plan.dtypes.compute,
            wire=self.extended or self.plan.wire,
            recycler=self._streams.recycler,
            name=self.name,
            check_ranks=not self.plan.data.simulated,
            in_common=_IN_COMMON,
            **self.plan.buffer_options(),
        )
        self._views = self.buffer.empty_views
        if not (self.buffer.aliased or self.extended or self.plan.scaled):
            self._one_a_segment = [self._views[segment.names[0]] for segment in plan.layout.segments]
        if self.plan.scaled:
            from .scaled import scaled_weight

            self._views = {name: scaled_weight(view) for name, view in self._views.items()}

    def _filled(self, values: Sequence[torch.Tensor | None]) -> list[RaggedDTensor]:
        """Copy slices into the buffer (None: already there), and return the sharded tensors on it."""
        assert self.buffer is not None
        local_views, sharded = self.buffer.local_views, []
        for param, plan, value in zip(self.params, self.plan.params, values, strict=True):
            local = local_views[param.name]
            if value is not None:
                with torch.no_grad():
                    local.copy_(value)
            sharded.append(wrap_local(plan, local if param.extension is None else param.extended(local)))
        return sharded

    def _point_to(self, sharded: Sequence[RaggedDTensor]) -> None:
        """Point both parameters of each pair at these tensors and, if there is a buffer, at the gathered memory."""
        for index, (param, tensor) in enumerate(zip(self.params, sharded, strict=True)):
            param.group, param.index = self, index
            param.set_sharded(tensor)
            if self.buffer is not None and self.extended is None:
                param.set_unsharded(self._views[param.name], self._make_hook)
        if self.buffer is not None:
            self._users_at_rest = self.buffer.count_users()

    # -- which object the module holds ------------------------------------------------------------------------------

    def register_sharded(self) -> None:
        """Put the sharded parameters into their modules."""
        for param in self.params:
            sharded = param.sharded
            for slots, attribute in param.slots:
                slots[attribute] = sharded

    def register_unsharded(self) -> None:
        """Put the unsharded parameters into their modules."""
        for param in self.params:
            unsharded: Any = param.unsharded
            if unsharded.requires_grad is not param.sharded.requires_grad:
                self._check_trainable(param)
                param.follow_requires_grad()
                self.gradients.training_changed()
            for slots, attribute in param.slots:
                slots[attribute] = unsharded

    def _check_trainable(self, param: "ManagedParam[Group]") -> None:
        if self.plan.at_rest is not None:
            raise ValueError(
                f"{self.name}: parameter {param.name} requires a gradient since, but is kept as codes "
                f"({self.plan.at_rest}), which are not trained; call requires_grad_(False), or shard it without at_rest"
            )

    def release(self) -> bool:
        """Free the gathered parameters, and register the sharded ones. Returns whether the former were written to."""
        assert self.buffer is not None
        versions, self._full_versions = self._full_versions, []
        written = bool(versions) and versions != list(map(compat.VERSION, self._one_a_segment))
        self.buffer.release()
        self.register_sharded()
        return written

    def held_by_autograd(self) -> bool:
        """Whether a tensor on the gathered memory is saved for a backward to come.

        Once all gradients are there, every use that has one is done; one that has none, of a detached parameter, is
        not, and shows here.
        """
        assert self.buffer is not None
        if self.extended is not None or self.plan.scaled:
            return True  # what a tensor subclass saves does not show
        return self.buffer.count_users() > self._users_at_rest

    # -- codes ------------------------------------------------------------------------------------------------------

    def forget_codes(self) -> None:
        """Quantize the parameters again before the next gather: an optimizer may have written to them."""
        if self.buffer is not None:
            self.buffer.forget_encoding()

    # -- staleness --------------------------------------------------------------------------------------------------

    def remember_gather(self) -> None:
        """Record the versions of the gathered values.

        Raises:
            NotImplementedError: before the first gather, if all-gather methods were set on a local tensor.
        """
        assert self.buffer is not None
        if self.extended is None and not self._gathered_versions:
            for param in self.params:
                refuse_patched(param.name, local_of(param.sharded))
        if self.extended is None:
            self._gathered_versions = compat.versions(self.buffer.shard)
            self._full_versions = list(map(compat.VERSION, self._one_a_segment))
        else:
            self._gathered_versions = self._versions_of_subclasses(self.buffer)

    def changed_since_gather(self) -> bool:
        """Whether the sharded parameters were written to since they were gathered."""
        assert self.buffer is not None
        if self.extended is None:
            return compat.versions(self.buffer.shard) != self._gathered_versions
        return self._versions_of_subclasses(self.buffer) != self._gathered_versions

    def gathered_written(self) -> bool:
        """Whether the gathered parameters were written to since they were gathered."""
        versions = self._full_versions
        return bool(versions) and versions != list(map(compat.VERSION, self._one_a_segment))

    def forget_writes(self) -> None:
        """Make `release` ignore writes to the gathered memory, after a failure."""
        self._full_versions = []

    def _versions_of_subclasses(self, buffer: DBuffer) -> list[int]:
        """Writes through a tensor subclass count in the subclass."""
        return compat.versions([*buffer.shard, *(local_of(param.sharded) for param in self.params)])
