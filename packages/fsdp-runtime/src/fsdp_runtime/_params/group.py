"""The parameters of one unit that share kind, dtype, mesh and training state: a buffer for them and their gradients'.

on meta     no memory: sharded parameters are ragged tensors on the meta device
   |  adopt(): every parameter has memory (to_empty, a loaded state dict)
at rest     sharded parameters are views of the buffer's shard; there is no gathered memory
   |  Unit.unshard / reshard
gathered    unsharded parameters are views of the gathered memory

`Group` is the plain kind. Other kinds, listed in `kinds`, override what differs, so that nothing else asks for the
kind of a group.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from dbuffer import DBuffer, WireForm
from layout_planner import Layout
from ragged_shard import RaggedDTensor
from ragged_shard.dist import installed_versions, raise_on_all_ranks

from .. import _torch_compat as compat
from .._grads.buffer import GradBuffer
from .._grads.scaling import ReduceOptions
from .._plan.group import Dtypes, GroupMemory, GroupPlan, ParamPlan, Request, as_sharded, planned, wrap_local
from .._plan.param import MakeHook, ManagedParam, Settings, local_of, managed_of, refuse_patched
from .._torch.streams import Streams
from .._torch.tree import local_tensor
from .digest import digest_of

# Layouts, messages and checkpoints depend on these, so all ranks must have the same versions.
_PACKAGES = ("torch", "layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")
_IN_COMMON = installed_versions(*_PACKAGES)


class Group:
    """A plan with its memory. This class is for plain parameters; other kinds override its methods."""

    home: nn.Module  # the first module of its unit; set by `Unit.take`
    holds_values: ClassVar[bool] = True  # whether the shard holds the parameters' values
    trained: ClassVar[bool] = True  # whether they can be trained
    refused_whole: ClassVar[str] = ""  # why `full_params` refuses such parameters; empty if it does not

    # -- planning ---------------------------------------------------------------------------------------------------

    @classmethod
    def check(cls, param: ManagedParam[Any], request: Request) -> None:
        """Raise ValueError or NotImplementedError, naming the parameter, if the kind cannot serve the request."""

    @classmethod
    def lay_out(
        cls, params: Sequence[ManagedParam[Any]], request: Request, dtypes: Dtypes
    ) -> tuple[Layout, WireForm | None]:
        """The layout of parameters of this kind, and the wire form of their gathers (None: the compute dtype)."""
        return planned(params, request, dtypes.alignment), None

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
        self.name = unit_name + suffix  # for errors and profiles: the unit's and `suffix`
        self.suffix = suffix
        self.plan = plan  # its layout, dtypes, mesh and placements, which do not change in a step
        self.params = params  # in the order of the module
        self._streams = streams
        self._make_hook = make_hook
        self.buffer: DBuffer | None = None  # their memory; None while one is on the meta device
        self._views: Mapping[str, torch.Tensor] = {}  # of the gathered memory, if parameters are views of it
        self._wire = plan.wire
        self.gradients = GradBuffer(self.name, plan, params, streams, reduction)  # their gradients' memory
        self._gathered_versions: list[int] = []
        self._begun_versions: list[int] = []  # when the pass began
        self._one_a_segment: list[torch.Tensor] = []  # of the views
        self._saved: list[torch.Tensor] = []  # with the version counters of all that autograd may save
        self._full_versions: list[int] = []  # of these, when they became readable; a gather does not count
        self._readable = False  # whether autograd may use tensors that it saved on the gathered memory
        self.keeps_storage = False
        self._loaded: list[RaggedDTensor] = []  # until `commit`
        self._digest = ""  # of the values in `load`, where all are known
        self._initial: Any = None  # the state of the shard that has them

    def rename(self, unit_name: str) -> None:
        """Call the group and its memory by the unit's new name."""
        self.name = unit_name + self.suffix
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
        on_meta = False
        for param, plan in zip(self.params, self.plan.params, strict=True):
            slices.append(self._slice_of(param, plan, values[param.name]))
            on_meta = on_meta or slices[-1].is_meta
        if on_meta:
            for param, plan, local in zip(self.params, self.plan.params, slices, strict=True):
                self._loaded.append(wrap_local(plan, param.wrapper.wrap(local.clone())))
            return
        digests = [param.digest for param in self.params]
        self._digest = "" if None in digests else str(digests)
        self._allocate()
        self._loaded = self._filled(slices)

    def _slice_of(self, param: ManagedParam[Any], plan: ParamPlan, value: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a value, like the local tensor or its plain values; shares memory where it can.

        The value is the plain tensor that this rank computes with, or a RaggedDTensor on the planned mesh, which is
        redistributed if it has another layout (see `ragged_shard.redistribute`).
        """
        value = value.detach()
        if not isinstance(value, RaggedDTensor):
            return self.plan.geometry.cut(param.key, value)
        with torch.no_grad():
            local: torch.Tensor = value.redistribute(placements=plan.placements).to_local()
        return local

    def commit(self) -> None:
        """Point the parameters at the memory that `load` filled, and put the sharded ones into their modules."""
        loaded, self._loaded = self._loaded, []
        self._point_to(loaded)
        for param in self.params:
            for slots, attribute in param.slots:
                slots[attribute] = param.sharded
        if self._digest and self.buffer is not None:
            self._initial = self._state_of(self.buffer)

    @property
    def keeps_initial(self) -> bool:
        """Whether the shard still has the values that this rank gave `fully_shard`, as far as they are known."""
        return self.buffer is not None and self._initial == self._state_of(self.buffer)

    @staticmethod
    def _state_of(buffer: DBuffer) -> Any:
        """A mark that changes with the values of a shard; where ranks differ also after a write through `.data`."""
        return compat.versions(buffer.shard), () if buffer.alike else list(map(digest_of, buffer.shard))

    def adopt(self) -> None:
        """Move parameters that were given other memory (`to`, `to_empty`, an assigned state dict) into the buffer.

        Its shard is new: users may hold the memory before, to put it back. Communicates only for assigned parameters of
        another layout (see `ragged_shard.redistribute`). Raises ValueError for one of another shape or kind, and for
        dtypes that differ within the group.
        """
        moved = self._moved()
        if not moved:
            return
        self._digest, self._initial = "", None
        for param in moved:
            self._accept_assigned(param)
        if any(param.sharded.is_meta for param in self.params):
            return
        dtype = self._common_dtype()
        locals_ = [param.plain(local_of(param.sharded)) for param in self.params]
        if self.buffer is None or self.buffer.dtype != dtype:
            self._replan(dtype)
        else:
            self.buffer.renew_shard()
            self._views = self.buffer.empty_views
        self._point_to(self._filled(locals_))

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

        Those that were on meta are other objects afterwards, as after `to_empty`. If there was no buffer, one 64-byte
        all-reduce per mesh axis compares the ranks' layouts.
        """
        if self.buffer is not None:
            return
        values = [None if p.sharded.is_meta else p.plain(local_of(p.sharded)) for p in self.params]
        dtype = self._common_dtype()
        if dtype == self.plan.dtypes.kept:
            self._allocate()
        else:
            self._replan(dtype)
        sharded = self._filled(values)
        for param, tensor in zip(self.params, sharded, strict=True):
            if param.sharded.is_meta:  # torch does not let a parameter change from meta
                param.renew_sharded(tensor)
        self._point_to(sharded)

    def has_moved(self) -> bool:
        """Whether `adopt` has something to do."""
        return self.buffer is None or bool(self._moved())

    def _moved(self) -> "list[ManagedParam[Group]]":
        """The parameters whose object or memory this group has not made."""
        if self.buffer is None:
            return self.params
        moved = []
        for param in self.params:
            sharded: Any = param.sharded
            for slots, attribute in param.slots:
                registered = slots.get(attribute)
                if registered is not sharded and registered is not param.unsharded:
                    moved.append(param)
                    break
            else:
                if sharded.local is not param.local:
                    moved.append(param)
        return moved

    def _accept_assigned(self, param: "ManagedParam[Group]") -> None:
        """Adopt a parameter object that the user put into the module."""
        assigned = self._assigned(param)
        if assigned is None:
            return
        value = self.as_sharded(param, assigned)
        adopted: Any = assigned
        if isinstance(assigned, RaggedDTensor):
            adopted.data = value
        else:
            adopted = nn.Parameter(value, requires_grad=param.sharded.requires_grad)
        param.adopt_sharded(adopted)

    def _assigned(self, param: "ManagedParam[Group]") -> torch.Tensor | None:
        """The parameter that the user assigned in place of this one, or None."""
        by_id: dict[int, torch.Tensor] = {}
        kept = False
        for slots, attribute in param.slots:
            registered = slots.get(attribute)
            if registered is None:
                self._refuse_swapped(param, None)
            if registered is param.sharded or registered is param.unsharded:
                kept = True
            else:
                by_id[id(registered)] = registered
        assigned = list(by_id.values())
        for value in assigned:
            self._check_assigned(param, value)
        if assigned and kept and not param.sharded.is_meta:
            raise ValueError(
                f"{self.name}: parameter {param.name} was replaced in one of the {len(param.slots)} modules that "
                "share it. Replace it in all of them, or untie it before fully_shard"
            )
        for value in assigned[1:]:
            self.check_same(param, assigned[0], value)
        return assigned[0] if assigned else None

    def _check_assigned(self, param: "ManagedParam[Group]", value: torch.Tensor) -> None:
        """Raise ValueError, naming the parameter, if this cannot take its place."""
        if not isinstance(value, nn.Parameter):
            self._refuse_swapped(param, value)
        other = managed_of(value)
        if other is not None and other is not param:
            raise ValueError(
                f"{self.name}: parameter {param.name} was replaced by {other.name}, which fully_shard has sharded "
                "too. Tie parameters before fully_shard"
            )
        if tuple(value.shape) != tuple(param.sharded.shape):
            raise ValueError(
                f"{self.name}: parameter {param.name} was replaced by one of shape {tuple(value.shape)}; "
                f"expected {tuple(param.sharded.shape)}"
            )

    def _refuse_swapped(self, param: "ManagedParam[Group]", value: torch.Tensor | None) -> NoReturn:
        if value is None:
            raise ValueError(
                f"{self.name}: parameter {param.name} was taken out of its module after fully_shard"
            )
        raise ValueError(
            f"{self.name}: parameter {param.name} is a {type(value).__name__} that was put into the module for this "
            "call, or between forward and backward; a sharded module computes with its own parameters only. "
            "torch.func.functional_call takes those (dict(model.named_parameters())), or a module that is not "
            "sharded; to load values use load_state_dict before the forward"
        )

    def check_same(self, param: "ManagedParam[Group]", value: torch.Tensor, other: torch.Tensor) -> None:
        """Raise ValueError on every rank if values for a tied parameter differ. One all-gather of small objects.

        Also the collectives of `as_sharded`.
        """
        problem: Exception | None = None
        value, other = (
            param.plain(local_tensor(self.values_of(self.as_sharded(param, value))))
            for value in (value, other)
        )
        known = not (value.is_meta or other.is_meta)
        if known and not torch.allclose(value, other, rtol=0, atol=0, equal_nan=True):
            problem = ValueError(
                f"{param.name} is one parameter in {len(param.slots)} modules, and was given different values for "
                "them. Load values that are equal, or untie it before fully_shard"
            )
        if not self.plan.data.simulated:
            raise_on_all_ranks(problem, self.name, groups=self.plan.data.groups)
        elif problem is not None:
            raise problem

    def as_sharded(self, param: "ManagedParam[Group]", value: torch.Tensor) -> RaggedDTensor:
        """A value of the global shape, laid out like the sharded parameter. See `_plan.group.as_sharded`."""
        return as_sharded(self.plan, self.plan_of(param), param.sharded, value)

    def _replan(self, dtype: torch.dtype) -> None:
        """Switch to `dtype`, with new, uninitialised buffers."""
        self.plan = self.plan.with_kept_dtype(dtype)
        options = self.gradients.options
        self.gradients = GradBuffer(self.name, self.plan, self.params, self._streams, options)
        self._allocate()

    def _allocate(self) -> None:
        plan = self.plan
        self.buffer = DBuffer(
            plan.layout,
            plan.data.mesh,
            full_dtype=plan.dtypes.compute,
            wire=self._wire,
            recycler=self._streams.recycler,
            name=self.name,
            check_ranks=not plan.data.simulated,
            in_common=_IN_COMMON,
            hint=self._digest,
            **plan.buffer_options(),
        )
        self._views = self.buffer.empty_views
        if self.keeps_storage:
            self.keep_storage(True)
        segments = plan.layout.segments if self._views and not self.buffer.aliased else ()
        self._one_a_segment = [self._views[segment.names[0]] for segment in segments]
        self._saved, self._full_versions, self._readable = [], [], False

    def _filled(self, values: Sequence[torch.Tensor | None]) -> list[RaggedDTensor]:
        """Copy slices into the buffer (None: already there), and return the sharded tensors on it."""
        assert self.buffer is not None
        self._begun_versions = []  # this memory's count for themselves
        local_views, sharded = self.buffer.local_views, []
        for param, plan, value in zip(self.params, self.plan.params, values, strict=True):
            local = local_views[param.key]
            if value is not None:
                with torch.no_grad():
                    local.copy_(value)
            sharded.append(wrap_local(plan, param.wrapper.wrap(local)))
        return sharded

    def _point_to(self, sharded: Sequence[RaggedDTensor]) -> None:
        """Point both parameters of each pair at these tensors and, if there is a buffer, at the gathered memory."""
        for index, (param, tensor) in enumerate(zip(self.params, sharded, strict=True)):
            param.group, param.index = self, index
            param.set_sharded(tensor)
            if self._views:
                param.set_unsharded(self._views[param.key], self._make_hook, self.plan.dtypes.reduce)

    def keep_storage(self, enable: bool) -> None:
        """Keep gathered memory while parameters are sharded; NotImplementedError if parameters are no views of it."""
        self.keeps_storage = enable
        if self.buffer is None:
            return
        try:
            self.buffer.keep_gathered(enable)
        except ValueError as error:
            raise NotImplementedError(
                f"set_keep_unsharded_storage: {self.name} has tensor subclasses, which are gathered into other memory; "
                "call it on units without them"
            ) from error
        if not self.buffer.gathered.present:
            self._keep_autograd_out()

    # -- which object the module holds ------------------------------------------------------------------------------

    def register_sharded(self) -> None:
        """Put the sharded parameters into their modules, except where a user has assigned one, which `adopt` takes."""
        for param in self.params:
            sharded, unsharded = param.sharded, param.unsharded
            for slots, attribute in param.slots:
                registered = slots.get(attribute)
                if registered is unsharded or registered is None:
                    slots[attribute] = sharded

    def register_unsharded(self) -> None:
        """Put the unsharded parameters into their modules."""
        if not self._readable:
            self._let_autograd_read()
        for param in self.params:
            unsharded: Any = param.unsharded
            if unsharded.requires_grad is not param.sharded.requires_grad:
                self.follow_training()
            for slots, attribute in param.slots:
                registered = slots.get(attribute)
                if registered is not param.sharded and registered is not unsharded:
                    self._refuse_swapped(param, registered)
                slots[attribute] = unsharded

    def follow_training(self) -> None:
        """Update the unsharded parameters and the reduction after parameters were frozen or unfrozen."""
        for param in self.params:
            unsharded = param.unsharded
            if unsharded is not None and unsharded.requires_grad is not param.sharded.requires_grad:
                self.check_trainable(param)
                param.follow_requires_grad()
                self.gradients.training_changed()

    def follow_users(self, param: "ManagedParam[Group]", before: Settings) -> None:
        """Copy attributes set on the unsharded parameter since `before`; ValueError if it cannot require a gradient."""
        unsharded = param.unsharded
        assert unsharded is not None
        if unsharded.requires_grad is not before.requires_grad:
            if unsharded.requires_grad:
                self.check_trainable(param)
            param.sharded.requires_grad_(unsharded.requires_grad)
            param.follow_requires_grad()
            self.gradients.training_changed()
        param.follow_attributes(before)

    def check_trainable(self, param: "ManagedParam[Group]") -> None:
        """Raise ValueError, naming the parameter, if it cannot require a gradient."""

    def release(self) -> bool:
        """Free the gathered parameters, and register the sharded ones. Returns whether the former were written to."""
        assert self.buffer is not None
        written = self.gathered_written()
        self.buffer.release()
        if not self.keeps_storage:
            self._keep_autograd_out()
        self.register_sharded()
        return written

    def _keep_autograd_out(self) -> None:
        """Let backward raise where it reads a saved tensor on gathered memory that is freed, or not gathered yet.

        Autograd compares version counters: https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
        """
        if self._readable:
            self._full_versions = [version + 1 for version in map(compat.VERSION, self._saved)]
            compat.set_versions(self._saved, self._full_versions)
            self._readable = False

    def _let_autograd_read(self) -> None:
        """Undo `_keep_autograd_out`: the gather has completed."""
        compat.set_versions(self._saved, [version - 1 for version in self._full_versions])
        self._saved = list(self._one_a_segment)
        for (
            param
        ) in self.params:  # that a tensor subclass made in other memory; a DTensor has a count of its own
            if param.unsharded is not None and (not self._views or param.other is not None):
                self._saved.append(param.unsharded)
        self._full_versions = compat.versions(self._saved)
        self._readable = True

    # -- staleness --------------------------------------------------------------------------------------------------

    def begin_pass(self) -> bool:
        """Record the versions of the shard. Returns whether it was written to since the pass before began."""
        before, self._begun_versions = self._begun_versions, [] if self.buffer is None else self.versions()
        return self._begun_versions != before

    def begin_gather(self) -> bool:
        """Record the versions of the gathered values. Returns whether the shard was written to in this pass.

        The first time it raises NotImplementedError if all-gather methods were set on a local tensor.
        """
        assert self.buffer is not None
        self._keep_autograd_out()
        if not self._gathered_versions:
            for param in self.params:
                refuse_patched(param.name, local_of(param.sharded))
        self._gathered_versions = self.versions()
        return self._gathered_versions != self._begun_versions

    def changed_since_gather(self) -> bool:
        """Whether the sharded parameters were written to since they were gathered."""
        return self.versions() != self._gathered_versions

    def versions(self) -> list[int]:
        """Counts of writes to the shard, one a segment."""
        assert self.buffer is not None
        return list(map(compat.VERSION, self.buffer.shard))

    def expect_update(self) -> None:
        """Gradients are shown: an optimizer may write to the shard."""

    def gathered_written(self) -> bool:
        """Whether the gathered parameters were written to since they were gathered."""
        return self._readable and self._full_versions != compat.versions(self._saved)

    def forget_writes(self) -> None:
        """Make `release` ignore writes to the gathered memory, after a failure."""
        if self._readable:
            self._full_versions = compat.versions(self._saved)

    # -- outside of passes ------------------------------------------------------------------------------------------

    def split_entry(self, param: ManagedParam[Any], state_dict: dict[str, Any], key: str) -> None:
        """Replace the parameter's entry of a state dict by the entries that its kind is saved as."""

    def join_entries(self, param: ManagedParam[Any], state_dict: dict[str, Any], key: str) -> None:
        """Replace those by the parameter's entry, before they are loaded."""

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Values of a sharded parameter, distributed as it is: itself."""
        return tensor

    def write_back(self, param: ManagedParam[Any], values: torch.Tensor) -> None:
        """Copy this rank's slice of whole values into the shard."""
        param.local.copy_(values)

    def without_memory(self, local: torch.Tensor) -> torch.Tensor:
        """A local tensor like this one without memory: reads as NaN (0 for integers), and cannot be written to."""
        value = float("nan") if local.is_floating_point() else 0
        return torch.full((), value, dtype=local.dtype, device=local.device).expand(local.shape)

    def segment_sizes(self) -> list[int]:
        """Elements of this rank's shard, one number a segment."""
        return [segment.shard_size for segment in self.plan.layout.segments]

    def memory(self) -> GroupMemory:
        """The bytes that the group takes, by its plan."""
        plan, dtypes, sizes = self.plan, self.plan.dtypes, self.segment_sizes()
        ranks, form = plan.data.shard_size, plan.reduction
        kept, computed, reduced = (d.itemsize for d in (dtypes.kept, dtypes.compute, dtypes.reduce))
        aliased = ranks == 1 and dtypes.kept == dtypes.compute  # shard and gathered memory are the same
        return GroupMemory(
            weights=sum(sizes) * kept,
            gradients=sum(sizes) * dtypes.grad.itemsize,
            sent=sum(sizes) * computed,
            gathered=() if aliased else tuple(ranks * size * computed for size in sizes),
            reduced=form.row_bytes(plan.geometry, dtypes.reduce) if form else sum(sizes) * reduced,
            reducing=tuple(ranks * size * reduced for size in sizes),
        )
