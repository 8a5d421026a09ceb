"""One `fully_shard` call: its parameters, gathered and reduced together."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

import dbuffer
from dbuffer import Handle

from . import _torch_compat as compat
from ._context import Context
from ._group import Group, parts_of
from ._labels import label
from ._mesh import DataMesh
from ._param import ManagedParam
from ._reduction import Reduction
from ._scaling import ReduceOptions
from .block_policies import BlockPolicy


class Unit:
    """The state of one unit.

        sharded --gather()--> on its way --unshard()--> unsharded --reshard()--> sharded

    Attributes:
        modules: those passed to `fully_shard`.
        name: the first module's name in the root, for errors and profiles.
        groups: its parameters by dtype, trained or not, and where `split` by large child.
        context: what it shares with the other units of its model.
        split: whether other units are inside, so that parameters in different children are used far apart.
        root: whether no other unit is around it.
        entered_backward: between its pre-backward and its post-backward.
        running: the modules whose forward is under way.
        waiting_for: the modules of a list that have not run in this pass.
        gathered_ahead: gathered because it was expected, and not used yet.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        data: DataMesh,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        block_policy: BlockPolicy | None,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = modules
        self.name = type(modules[0]).__name__
        self.data = data
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.block_policy = block_policy
        self.context = Context(data.device)
        self.context.units.append(self)
        self.groups: list[Group] = []
        self.split = False
        self.root = True
        self.entered_backward = False
        self.running: list[nn.Module] = []
        self.waiting_for: set[nn.Module] = set()
        self._reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.neighbours: dist.ProcessGroup | None = None  # to gather from again after forward
        self.unshard_in_backward = True
        self.requires_gradient_sync = True
        self.reduce_unused = False
        self.reduce_options = ReduceOptions()
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.gathered_ahead = False
        self._handles: list[Handle] = []
        self._unsharded = False
        self._released: list[Group] = []  # ahead of the unit, in backward

    def rename(self, name: str) -> None:
        """Call the unit by its name in the root."""
        for group in self.groups:
            group.rename(group.name.replace(self.name, name, 1))
        self.name = name

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def params(self) -> list[ManagedParam]:
        """All of them, group by group."""
        return [param for group in self.groups for param in group.params]

    def take(self, params: list[ManagedParam], values: dict[str, torch.Tensor]) -> None:
        """Shard these parameters, of which every rank holds the full values; they are in the modules afterwards."""
        self.groups = []
        kinds: dict[tuple[torch.dtype, bool, int], list[ManagedParam]] = {}
        parts = parts_of(params) if self.split else {}
        for param in params:
            kinds.setdefault((param.dtype, param.requires_grad, parts.get(param.name, 0)), []).append(param)
        for members in kinds.values():
            group = Group(
                self.name if len(kinds) == 1 else f"{self.name} ({members[0].name} ...)",
                members,
                self.data,
                self.mp_policy,
                self.offload_policy,
                self.block_policy,
                self.context.recycler,
                self.accept_grad,
            )
            group.load({param.name: values[param.name] for param in members})
            self.groups.append(group)
        for param in params:
            param.register_sharded()

    def prepare(self) -> None:
        """Before a pass: take in what was moved or assigned, and drop gathered values that are out of date.

        Raises:
            RuntimeError: parameters without memory, by name.
        """
        for group in self.groups:
            group.adopt()
        missing = [param.name for group in self.groups if group.buffer is None for param in group.params]
        if missing:
            raise RuntimeError(
                f"{self.name}: parameters {missing} are still on the meta device; call module.to_empty(device=...) "
                "and initialise them (reset_parameters), or load a state dict with assign=True, before the forward"
            )
        if any(group.changed_since_gather() for group in self.groups):
            self.reshard()

    # -- sharded <-> unsharded --------------------------------------------------------------------------------------

    @property
    def unsharded(self) -> bool:
        """Whether the module holds the full parameters."""
        return self._unsharded

    @property
    def gathered(self) -> bool:
        """Whether the full parameters are there or on their way."""
        return bool(self._handles) or (self._unsharded and not self._released)

    @property
    def reshard_after_forward(self) -> bool | int:
        """As set; not set: True, but False for a root."""
        chosen = self._reshard_after_forward
        return (not self.root) if chosen is None else chosen

    @reshard_after_forward.setter
    def reshard_after_forward(self, value: bool) -> None:
        self._reshard_after_forward, self.neighbours = value, None

    def gather(self) -> None:
        """Start gathering the parameters: one coalesced all-gather. Nothing where they are there or on their way."""
        if self.gathered:
            return
        context = self.context
        with label("all_gather", self.name):
            for group in self._absent():
                if group.buffer is None:
                    self.prepare()
                group.remember_gather()
            for buffers in self._buffers_by_mesh():
                self._handles.append(
                    dbuffer.all_gather(buffers, stream=context.gather_stream, after=context.gather_after())
                )

    def _absent(self) -> list[Group]:
        return self._released if self._unsharded else self.groups

    def _buffers_by_mesh(self) -> list[list[dbuffer.DBuffer]]:
        found: dict[int, list[dbuffer.DBuffer]] = {}
        for group in self._absent():
            assert group.buffer is not None
            found.setdefault(id(group.data.mesh), []).append(group.buffer)
        return list(found.values())

    def unshard(self) -> None:
        """Gather the parameters, wait for them and put them into the modules."""
        if self._unsharded and not self._released:
            return
        self.gather()
        with label("wait_for_all_gather", self.name):
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.wait()
        self._unsharded, self.gathered_ahead = True, False
        self._released.clear()
        for group in self.groups:
            for param in group.params:
                param.register_unsharded()

    def reshard(self) -> None:
        """Put the sharded parameters into the modules and free the gathered memory."""
        self._leave(None)
        for group in self.groups:
            if group.buffer is not None:
                group.buffer.forget_neighbors()

    def reshard_for_backward(self) -> None:
        """The same after forward: where neighbours were asked for, keep this rank's share among them."""
        self._leave(self.neighbours)

    def _leave(self, neighbours: dist.ProcessGroup | None) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        if not (self._unsharded or handles):
            return
        self._unsharded = self.gathered_ahead = False
        for group in self.groups:
            assert group.buffer is not None
            if neighbours is not None and group not in self._released:
                group.buffer.shrink(neighbours)
            group.release()
        self._released.clear()

    # -- gradients --------------------------------------------------------------------------------------------------

    def accept_grad(self, param: ManagedParam, _: torch.Tensor) -> None:
        """A gradient has been accumulated: bring it into the buffer and free it."""
        with torch.no_grad(), label("post_backward_accumulate", self.name):
            grad = param.take_grad()
            if grad is None:
                return
            group, context = self._group_of(param), self.context
            if not context.in_backward:  # a graph that does not go through a unit's output, of gradients say
                context.begin_backward()
            # Not in a run inside a run (reentrant checkpoints): there more gradients of this parameter may come.
            last = (
                self.split
                and compat.backward_id() == context.backward_id
                and group.gradients.awaits_only(param)
            )
            if last:
                self._release_early(group)
            if not group.gradients.has_memory:
                context.reap()
            context.land(group)
            group.gradients.write(param, grad, group.scaling(self.reduce_options).before)
            del grad
            # Ranks that use different parameters must not reduce at different times.
            if last and group.large and self.requires_gradient_sync and not self.reduce_unused:
                self._reduce([group for group in self.groups if group.gradients.complete])

    def _release_early(self, group: Group) -> None:
        """Free a group that backward is done with, where the unit's own ends much later: around others."""
        here = self.reshard_after_backward and self._unsharded and group not in self._released
        if here and not group.held_by_autograd():
            group.release()
            self._released.append(group)

    def _group_of(self, param: ManagedParam) -> Group:
        for group in self.groups:
            if param in group.params:
                return group
        raise AssertionError(f"{param.name} is in no group of {self.name}")

    def post_backward(self) -> None:
        """The unit's backward is over: free the parameters, start reducing the gradients."""
        self.entered_backward = False
        if self.reshard_after_backward:
            with label("post_backward_reshard", self.name):
                self.reshard()
                self.context.trim_when_last()
        if not self.requires_gradient_sync:
            return
        ready = [
            group
            for group in self.groups
            if group.gradients.pending
            or (self.reduce_unused and any(param.sharded.requires_grad for param in group.params))
        ]
        if ready:
            self._reduce(ready)

    def _reduce(self, groups: list[Group]) -> None:
        context = self.context
        options = replace(self.reduce_options)  # as they are now, whatever is set before it has landed
        context.reduce(Reduction(context, self.name, groups, options, self.reduce_unused))

    def reset(self) -> None:
        """Drop what a failed iteration left: gathered memory and gradients that were not reduced."""
        self.entered_backward = False
        self.waiting_for.clear()
        self.running.clear()
        for handle in self._handles:
            try:
                handle.wait()
            except RuntimeError:  # what is being recovered from
                continue
        self.reshard()
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        for group in self.groups:
            group.gradients.discard()
