"""One `fully_shard` call: its parameters, gathered and freed together."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn

import dbuffer
from dbuffer import Gather, Handle, TransportChoice

from .. import _torch_compat as compat
from .._grads.buffer import Full
from .._grads.scaling import ReduceOptions
from .._plan.group import Request, plan_group
from .._plan.mesh import DataMesh, check_alike
from .._plan.param import MakeHook, ManagedParam, Place, Settings
from .._torch.streams import Streams
from .group import Group

Param = ManagedParam[Group]
_NO_LABEL: AbstractContextManager[None] = nullcontext()


def refuse_capture(name: str) -> NoReturn:
    """Raise RuntimeError: a graph would gather into the same memory in each replay, and record no host work."""
    raise RuntimeError(
        f"{name} cannot be captured into a graph: fully_shard moves memory and starts collectives from the host. "
        "Capture a part inside the unit, such as its attention, or use torch.compile"
    )


# Units that hold more than their shards; few at a time, however many units there are.
not_at_rest: "weakref.WeakSet[Unit]" = weakref.WeakSet()


def label(what: str, unit: str = "") -> AbstractContextManager[object]:
    """A range `FSDP::<what> (<unit>)` in a profile, the labels of FSDP2; does nothing while no profile is taken."""
    if not compat.profiling():
        return _NO_LABEL
    return torch.profiler.record_function(f"FSDP::{what} ({unit})" if unit else f"FSDP::{what}")


@dataclass(frozen=True)
class UnitOptions:
    """A unit's options; see the methods of `FSDPModule` that set them."""

    reshard_after_forward: bool | None = None  # None: unless it is a root
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    reduce_unused: bool = False
    keep_storage: bool = False
    skippable: bool = False
    reduction: ReduceOptions = field(default_factory=ReduceOptions)
    gather_by: TransportChoice | None = None  # None: as given to `fully_shard`
    reduce_by: TransportChoice | None = None
    separate_reductions: bool = False  # whether reductions have separate process groups
    forward_prefetch: "tuple[Unit, ...] | None" = None
    backward_prefetch: "tuple[Unit, ...] | None" = None


class Unit:
    """The state of one unit."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        request: Request,
        options: UnitOptions,
        streams: Streams,
        make_hook: MakeHook,
    ) -> None:
        self.modules = modules  # those passed to `fully_shard`
        self.name = type(modules[0]).__name__  # the first module's name in the root, for errors and profiles
        self.data = request.data  # the mesh that `fully_shard` was given; parameters may have others
        self.mp_policy = request.precision  # of `fully_shard`
        self.full = Full.EMPTY  # the full parameters
        self.installed = False  # whether modules hold them; else the sharded ones
        self.by_hand = False  # whether a user has unsharded them, until they are freed
        self.options = options  # the user's settings; changed by `configure`
        self.groups: list[Group] = []  # its parameters by kind, dtype, mesh and training state
        self.root = True  # whether no other unit is around it
        # of a unit that ranks may skip: the nearest unit around it that no rank skips; else None
        self.host: Unit | None = None
        # units whose host this is. It gathers and reduces them, on every rank
        self.followers: tuple[Unit, ...] = ()
        # whether some rank may use none of its parameters: units inside that ranks may skip use them
        self.always_reduced = False
        # why its parameters cannot be used now, and the remedy; empty if they can. See `checkpoint`
        self.closed = ""
        self._request = request
        # whether a slice of a smaller group is kept after forward
        self.keeps_slices = request.neighbors is not None
        self._streams = streams
        if streams.layer.asynchronous:
            weakref.finalize(self, streams.take_back).atexit = False
        self._make_hook = make_hook
        self._handles: list[Handle] = []
        # the parameters that users see gathered outside of passes, with their settings as they were
        self.shown: list[tuple[Param, Settings]] = []
        self._shrunk = False  # after forward slices were kept among neighbors
        self._gathers: list[Gather] = []  # made when first needed
        self.entered: list[nn.Module] = []  # the modules whose forward is under way, the outer ones first
        self._waiting_for: set[nn.Module] = set()
        self.first: nn.Module | None = None  # the module that began the forward of a list of modules

    # -- what it is -------------------------------------------------------------------------------------------------

    def become_inner(self, name: str | None) -> None:
        """Mark this unit as nested, and rename it to its name in the root."""
        self.root = False
        if name is not None and name != self.name:
            self.name = name
            for group in self.groups:
                group.rename(name)
            self._gathers = []

    def configure(self, **changes: Any) -> None:
        """Change options; a reduction under way keeps the options of its launch."""
        if changes.get("reshard_after_forward") is not None:
            self.keeps_slices = False
        self.options = replace(self.options, **changes)
        if "keep_storage" in changes:
            for group in self.groups:
                group.keep_storage(self.options.keep_storage)
        if "gather_by" in changes:
            self._gathers = []
        if "reduction" in changes:
            for group in self.groups:
                group.gradients.scale(self.options.reduction)

    @property
    def reshard_after_forward(self) -> bool:
        """The value that was set; by default True, and False for a root."""
        chosen = self.options.reshard_after_forward
        return (not self.root) if chosen is None else chosen

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def params(self) -> list[Param]:
        """All of them, group by group."""
        return [param for group in self.groups for param in group.params]

    @property
    def offloaded(self) -> bool:
        """Whether shards are in CPU memory and it computes elsewhere."""
        return any(group.plan.offload is not None for group in self.groups)

    @property
    def trained(self) -> str:
        """The unit's name and the names of its parameters that are trained, which every rank must agree on."""
        names = [param.name for param in self.params if param.sharded.requires_grad]
        return f"{self.name}, which trains {', '.join(names) or 'nothing'}"

    def lay_out(self, params: list[Param], values: dict[str, torch.Tensor]) -> list[Group]:
        """Groups of these parameters with full values, which all ranks share, for `take`; changes nothing else."""
        kinds: dict[tuple[Any, ...], list[Param]] = {}
        for param in params:
            dtypes = (param.dtype, param.grad_dtype, param.precision)
            key = (param.kind, param.data, dtypes, param.requires_grad, param.selected)
            kinds.setdefault(key, []).append(param)
        groups = []
        for (kind, *_), members in kinds.items():
            plan = plan_group(members, self._request, kind.lay_out)
            for member, cut in zip(members, plan.params, strict=True):
                if member.other is not None:
                    check_alike(member.name, member.other, cut.placements)
            suffix = "" if len(kinds) == 1 else f" ({members[0].name} ...)"
            reduction = self.options.reduction
            group = kind(self.name, suffix, plan, members, self._streams, self._make_hook, reduction)
            group.load(values)
            groups.append(group)
        return groups

    def take(self, groups: list[Group]) -> None:
        """Use these groups of `lay_out`, and put their sharded parameters into the modules."""
        self.groups = groups
        for group in groups:
            group.home = self.modules[0]
            group.commit()

    def take_over(self, group: Group, giver: "Unit", names: Mapping[Place, str]) -> None:
        """Gather and reduce a group from now on, instead of a unit inside this one, under its names in this one."""
        giver.groups.remove(group)
        giver._gathers = []
        self.groups.append(group)
        group.home = self.modules[0]
        group.plan = replace(group.plan, neighbors=group.plan.data.neighbors(self._request.neighbors))
        for param in group.params:
            param.name = next(names[place] for place in param.places if place in names)
        group.suffix = f" ({group.params[0].name} ...)"
        group.rename(self.name)
        group.gradients.scale(self.options.reduction)
        if group.keeps_storage:
            group.keep_storage(False)

    @property
    def has_one_dtype(self) -> bool:
        """Whether the parameters of each group have one dtype, as `adopt` needs them."""
        return all(len({param.registered_dtype for param in group.params}) == 1 for group in self.groups)

    def has_moved(self) -> bool:
        """Whether parameters were moved or assigned, so that `prepare` copies them into the shards."""
        return any(group.has_moved() for group in self.groups)

    def prepare(self) -> None:
        """Before a pass: adopt parameters that were moved or assigned, and drop gathered values that are out of date.

        Modules of a list that the last pass left out are not waited for. Raises RuntimeError for parameters without
        memory, by name.
        """
        if not self.entered:
            self._waiting_for.clear()
        if self.shown:
            self.hide()
        for group in self.groups:
            if group.has_moved():
                self.adopt()
                break
        for group in self.groups:
            if group.buffer is None:
                self._refuse_meta()
            if not self.at_rest and (group.changed_since_gather() or group.gathered_written()):
                self.reshard()

    def check_open(self) -> None:
        """Raise RuntimeError if the parameters cannot be used now."""
        if self.closed:
            raise RuntimeError(f"the parameters of {self.name} {self.closed}")

    @property
    def written(self) -> bool:
        """Whether gathered parameters were changed in place: the shards do not have the change."""
        return any(group.gathered_written() for group in self.groups)

    @property
    def versions(self) -> list[list[int]]:
        """Counts of writes to the shard of each group."""
        return [group.versions() for group in self.groups]

    @property
    def changed_since_gather(self) -> bool:
        """Whether the sharded parameters were written to since they were gathered."""
        return any(group.changed_since_gather() for group in self.groups)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if gathered parameters were changed in place."""
        if self.written:
            self._refuse_written()

    @torch.inference_mode(False)  # training uses this memory too
    def adopt(self) -> None:
        """Copy parameters that were moved or assigned into the shards; gathered values are out of date then."""
        self.check_open()
        self.reshard()
        for group in self.groups:
            before = group.buffer
            group.adopt()
            if group.buffer is not before:
                self._gathers = []

    def materialize(self) -> None:
        """Like `adopt`, and allocate parameters that are on the meta device; see `Group`.

        Raises the first error of a group after the all-reduces of the others, which other ranks are in.
        """
        self.adopt()
        problem: Exception | None = None
        for group in self.groups:
            if group.buffer is None:
                self._gathers = []
                try:
                    group.materialize()
                except Exception as error:
                    problem = problem or error
        if problem is not None:
            raise problem

    def _refuse_meta(self) -> None:
        prefix = "" if self.root else f"{self.name}."
        missing = [
            prefix + param.name for group in self.groups if group.buffer is None for param in group.params
        ]
        raise RuntimeError(
            f"parameters {missing} are still on the meta device; call module.to_empty(device=...) and initialize them "
            "(reset_parameters), or load a state dict with assign=True, before the forward"
        )

    # -- sharded <-> unsharded --------------------------------------------------------------------------------------

    @property
    def meshes(self) -> tuple[DataMesh, ...]:
        """Those that its parameters are cut over, each once."""
        return tuple(dict.fromkeys(group.plan.data for group in self.groups))

    @property
    def at_rest(self) -> bool:
        """Whether it holds its shards and nothing more."""
        return self.full is Full.EMPTY and not self._shrunk

    def shares_memory_with(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these plain tensors is, or is a view of, an unsharded parameter."""
        own = {p.unsharded.untyped_storage()._cdata for p in self.params if type(p.unsharded) is nn.Parameter}
        return any(
            type(t) in (torch.Tensor, nn.Parameter) and t.untyped_storage()._cdata in own for t in tensors
        )

    def gather(self, after: Sequence[Any] | None = None) -> None:
        """Start gathering the parameters, unless they are gathered or on their way: one coalesced all-gather.

        It runs after these events, by default all work of the current stream; where the shards were written to since
        the pass began, after all reductions too.
        """
        if self.installed or self.full is Full.BUSY:
            return
        if self._streams.layer.capturing:
            refuse_capture(self.name)
        if self.closed:
            self.check_open()
        if self.full is Full.PRESENT:
            if not self.changed_since_gather:
                return
            self.reshard()
        if self._handles:  # of an earlier gather, of which not all could start
            self.reshard()
        with label("all_gather", self.name):
            written = False
            for group in self.groups:
                if group.buffer is None:
                    self.prepare()
                written = group.begin_gather() or written
            if written:
                after = [self._streams.layer.record(), *self._streams.reduced()]
            not_at_rest.add(self)
            if not self._gathers:
                self._gathers = self._gathers_of(self.groups)
            stream = self._streams.gather
            for call in self._gathers:
                self._handles.append(call.start(stream, after))
            self.full = Full.BUSY

    def _gathers_of(self, groups: list[Group]) -> list[Gather]:
        """The calls that gather these groups: one for each mesh, and transport."""
        calls: dict[tuple[Any, ...], list[dbuffer.DBuffer]] = {}
        for group in groups:
            assert group.buffer is not None
            calls.setdefault(group.plan.call, []).append(group.buffer)
        transport = self.options.gather_by
        return [dbuffer.Gather(buffers, transport) for buffers in calls.values()]

    def unshard(self, after: Sequence[Any] | None = None) -> None:
        """Gather the parameters, wait for them and put them into the modules."""
        if self.installed:
            return
        if self.full is not Full.BUSY:
            self.gather(after)
        for handle in self._handles:
            handle.wait()
        self._handles = []
        self.full, self.installed = Full.PRESENT, True
        for group in self.groups:
            group.register_unsharded()

    def reshard(self, *, keep_slices: bool = False) -> None:
        """Put the sharded parameters into the modules and free the gathered memory.

        With `keep_slices` and an integer `reshard_after_forward`, this rank's slice of the smaller group stays.
        """
        written = False
        if self.shown:
            self.hide()
        if self.full is not Full.EMPTY or self._handles:
            for handle in self._handles:
                handle.wait()
            self._handles = []
            self.full, self.installed, self.by_hand = Full.EMPTY, False, False
            for group in self.groups:
                assert group.buffer is not None
                neighbors = group.plan.neighbors if keep_slices and self.keeps_slices else None
                if neighbors is not None:
                    group.buffer.shrink(neighbors)
                    self._shrunk = True
                written = group.release() or written
        if self._shrunk and not keep_slices:
            self._shrunk = False
            for group in self.groups:
                assert group.buffer is not None
                group.buffer.forget_neighbors()
        if not self._shrunk:
            not_at_rest.discard(self)
        if written:
            self._refuse_written()

    def park(self) -> None:
        """Put the sharded parameters into the modules and keep the gathered memory."""
        if self.written:
            self.reshard()  # raises
        if self.shown:
            self.hide()
        self.installed = False
        for group in self.groups:
            group.register_sharded()

    def show(self) -> None:
        """Outside of passes, users now see the unsharded parameters: record the attributes that they may set."""
        self.shown = [(p, Settings.of(p.unsharded)) for p in self.params if p.unsharded is not None]

    def lost_changes(self) -> str:
        """Changes by users since `show` that do not reach the sharded parameters; empty: none."""
        for param, before in self.shown:
            changes = param.lost_changes(before)
            if changes:
                return f"{param.name}: {changes}"
            if param.unsharded is not None and param.unsharded.requires_grad and not before.requires_grad:
                try:
                    param.group.check_trainable(param)
                except ValueError as error:
                    return str(error)
        return "gathered parameters were changed in place" if self.written else ""

    def hide(self, *, in_backward: bool = False) -> None:
        """Copy attributes that users have set on the unsharded parameters since `show` to the sharded ones.

        Raises RuntimeError for a change that is lost, with the parameter's name, except `in_backward`, which uses hooks
        and adds to gradients; ValueError for a parameter that cannot require a gradient.
        """
        lost = "" if in_backward or not self.shown else self.lost_changes()
        shown, self.shown = self.shown, []
        refused: ValueError | None = None
        for param, before in shown:
            try:
                param.group.follow_users(param, before)
            except ValueError as error:
                refused = refused or error
            if lost:
                param.undo_changes()
        if refused is not None:
            raise refused
        if lost:
            self.reshard()  # raises for values
            raise RuntimeError(
                f"{self.name}, {lost}, while the module held the gathered parameter, which the shards do not follow. "
                "Call model.reshard() first, so that modules hold the sharded parameters"
            )

    def _refuse_written(self) -> NoReturn:
        raise RuntimeError(
            f"{self.name}: gathered parameters were changed in place, and the change is lost when they are freed. "
            "Call model.reshard() first, so that modules hold the sharded parameters, or use full_params; name a "
            "weight that its own module writes to (nn.Embedding(max_norm=...)) in fully_shard(ignored_params=...)"
        )

    # -- reductions -------------------------------------------------------------------------------------------------

    def groups_to_reduce(self) -> list[Group]:
        """All that are trained, as soon as a gradient or partial sum of one waits, or unused parameters count.

        Ranks may use different parameters of a unit, but have to reduce the same groups: the experts of one group may
        have had a token on another rank.
        """
        complete = self.options.reduction.all_reduce
        waiting = [
            group
            for group in self.groups
            if group.gradients.written or (complete and group.gradients.partial)
        ]
        if not (waiting or self.options.reduce_unused or self.always_reduced or self.host is not None):
            return waiting
        return [
            group
            for group in self.groups
            if group.gradients.written or any(p.sharded.requires_grad for p in group.params)
        ]

    # -- modules of a list ------------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module) -> None:
        """Record that `module` began its forward."""
        self.entered.append(module)
        if not self._waiting_for:
            self._waiting_for.update(self.modules)
            self.first = module

    def leave_module(self, module: nn.Module, *, end: bool) -> bool:
        """Record that `module` finished its forward, possibly by raising; with `end` no further one is waited for.

        Returns whether all modules have run in this pass, and none is under way.
        """
        if module in self.entered:
            self.entered.remove(module)
        self._waiting_for.discard(module)
        if end:
            self._waiting_for.clear()
        return not self._waiting_for and not self.entered

    def is_inside(self, module: nn.Module) -> bool:
        """Whether a forward of this module is under way."""
        return module in self.entered

    # -- recovery ---------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Free the gathered memory and the unreduced gradients of a failed iteration; frozen parameters stay so.

        Returns whether gathered parameters were changed since, which is lost.
        """
        written = self.installed and not self._handles and self.written
        changed = written or any(param.has_other_data for param in self.params)
        self._waiting_for.clear()
        self.entered.clear()
        self.shown = []
        if self._handles:
            self.full, self.installed = Full.BUSY, False  # also where not all could start
        handles, self._handles = self._handles, []
        for handle in handles:
            try:
                handle.wait()
            except RuntimeError:  # the failure that is being recovered from
                continue
        for group in self.groups:
            group.forget_writes()
        self.reshard()
        for param in self.params:
            param.restore()
        for group in self.groups:
            group.gradients.discard()
        return changed
