"""The parameters of one unit that share a dtype: one layout, one buffer for them, one for their gradients.

on meta     no memory: sharded parameters are ragged tensors on the meta device
   |  adopt(): every parameter has memory (to_empty, a loaded state dict)
at rest     sharded parameters are views of the buffer's shard; the buffer's full memory is released
   |  Unit.unshard / reshard
gathered    unsharded parameters are views of the buffer's full memory
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

import ragged_shard
from dbuffer import DBuffer, Recycler
from layout_planner import Layout, Rows, TensorSpec, plan
from ragged_shard import RaggedDTensor, RaggedShard

from . import _torch_compat as compat
from ._dtypes import Dtypes, dtypes_for
from ._gradients import Gradients
from ._mesh import DataMesh, place
from ._param import GradHook, ManagedParam
from ._scaling import ReduceOptions, Scaling, scaling
from .block_policies import BlockPolicy

_PART = 1 << 18  # elements: less is not worth a buffer, and a reduction, of its own
_NCCL_BYTES = 16  # slices off this boundary are copied element by element


def layout_for(
    params: list[ManagedParam], data: DataMesh, dtypes: Dtypes, policy: BlockPolicy | None
) -> Layout:
    """Plan where the parameters lie.

    Raises:
        ValueError: naming the parameter, where the policy returned something that is no block or does not fit.
    """
    specs = []
    for param in params:
        block = None if policy is None else policy(param.name, param.example())
        try:
            specs.append(TensorSpec(param.name, param.shape, Rows(1) if block is None else block))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"block_policy gave {block!r} for parameter {param.name} of shape {param.shape}: {error}"
            ) from error
    return plan(specs, data.shard_size, align=max(8, _NCCL_BYTES // dtypes.narrowest))


def parts_of(params: list[ManagedParam]) -> dict[str, int]:
    """Which parameters of a unit with other units inside go together: those of each large child; the small ones, 0.

    embed.weight: 1    final_norm.weight: 0    head.weight: 2         (the other units run in between)
    """
    sizes: dict[str, int] = {}
    for param in params:
        child = param.name.split(".")[0]
        sizes[child] = sizes.get(child, 0) + math.prod(param.shape)
    large = [child for child, size in sizes.items() if size >= _PART]
    numbers = {child: number for number, child in enumerate(large, start=1)}
    return {param.name: numbers.get(param.name.split(".")[0], 0) for param in params}


class Group:
    """One layout and its buffers.

    Attributes:
        name: for errors and profiles.
        params: in the order of the module.
        layout: where they lie.
        buffer: their memory; None while one is on the meta device.
        gradients: their gradients' memory.
    """

    def __init__(
        self,
        name: str,
        params: list[ManagedParam],
        data: DataMesh,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        block_policy: BlockPolicy | None,
        recycler: Recycler,
        on_grad: GradHook,
    ) -> None:
        self.name = name
        self.params = params
        self.data = data
        self._mp_policy = mp_policy
        self._offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
        self.recycler = recycler
        self._on_grad = on_grad
        self.dtypes = dtypes_for(params[0].dtype, mp_policy)
        self.layout = layout_for(params, data, self.dtypes, block_policy)
        self.buffer: DBuffer | None = None
        self.gradients = Gradients(self)
        self._locals: dict[str, torch.Tensor] = {}
        self._gathered_versions: tuple[int, ...] = ()
        self._users_at_rest = 0

    def rename(self, name: str) -> None:
        """Call the group, and its memory, by another name."""
        self.name = name
        if self.buffer is not None:
            self.buffer.name = name

    @property
    def offloaded(self) -> bool:
        """Whether shards are on the CPU while the unit computes elsewhere."""
        return self._offload is not None and self.data.device.type != "cpu"

    @property
    def shard_options(self) -> dict[str, Any]:
        """Where shards are, for `DBuffer`."""
        if not self.offloaded:
            return {}
        assert self._offload is not None
        return {"shard_device": "cpu", "pin_memory": self._offload.pin_memory}

    # -- getting memory ---------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take the parameters' values: full plain tensors, the same on every rank; sharded ones; or any on meta.

        While one has no memory, the sharded parameters stay where their values are, until `adopt`. Communicates for
        sharded ones that lie in another way (see `ragged_shard.redistribute`).
        """
        without_memory = any(value.is_meta for value in values.values())
        if not without_memory:
            self._allocate()
        for param in self.params:
            part = self._cut(param, values[param.name])
            if self.buffer is None:
                param.set_sharded(self.ragged(param, part.clone()))
            else:
                self.buffer.local_views[param.name].copy_(part)
        if not without_memory:
            self._bind()

    def adopt(self) -> None:
        """Move parameters that were given other memory (`to`, `to_empty`, an assigned state dict) into the buffer.

        Communicates only where a parameter was assigned that lies in another way over the ranks (the collective
        that `ragged_shard.redistribute` uses for it).

        Raises:
            ValueError: an assigned parameter of another shape or kind, or dtypes that differ within the group.
        """
        with torch.no_grad():
            moved = [param for param in self.params if self._was_moved(param)]
        if not moved:
            return
        for param in moved:
            self._accept_assigned(param)
        if any(param.sharded.is_meta for param in self.params):
            return
        found = {param.sharded.dtype for param in self.params}
        if len(found) > 1:
            names = {str(p.sharded.dtype): p.name for p in self.params}
            raise ValueError(
                f"{self.name}: parameters that were sharded together now have different dtypes {names}; "
                "convert all of them, or shard the module again"
            )
        with torch.no_grad():
            parts = {param.name: param.sharded.to_local() for param in self.params}  # type: ignore[attr-defined]
            if self.buffer is None or self.buffer.dtype not in found:
                self.dtypes = dtypes_for(found.pop(), self._mp_policy)
                self._allocate()
                moved = self.params
            assert self.buffer is not None
            for param in moved:
                self.buffer.local_views[param.name].copy_(parts[param.name])
        self._bind()

    def _was_moved(self, param: ManagedParam) -> bool:
        if param.registered() is not param.sharded and param.registered() is not param.unsharded:
            return True
        return param.sharded.to_local() is not self._locals.get(param.name)  # type: ignore[attr-defined]

    def _accept_assigned(self, param: ManagedParam) -> None:
        """Take a parameter object that was put into the module in place of ours."""
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
        like = param.sharded
        mine = self.as_sharded(param, assigned)
        param.sharded = assigned if isinstance(assigned, nn.Parameter) else nn.Parameter(assigned)
        if isinstance(assigned, RaggedDTensor):
            param.sharded.data = mine
        else:
            param.sharded = nn.Parameter(mine, requires_grad=like.requires_grad)
        for place_ in param.places:
            if place_.module._parameters.get(place_.attribute) is not param.unsharded:
                place_.module._parameters[place_.attribute] = param.sharded

    def as_sharded(self, param: ManagedParam, value: Any) -> RaggedDTensor:
        """A tensor of the parameter's global shape, laid out like the sharded parameter; memory of its own or shared.

        A full plain tensor is cut where it is; a distributed one is redistributed where it lies otherwise.
        """
        like: Any = param.sharded
        with torch.no_grad():
            if isinstance(value, RaggedDTensor):
                ragged: RaggedDTensor = value.detach()
                same = ragged.device_mesh == like.device_mesh and ragged.placements == like.placements
                return ragged if same else ragged.redistribute(placements=like.placements)
            if isinstance(value, DTensor):
                moved: RaggedDTensor = ragged_shard.redistribute(value.detach(), placements=like.placements)
                return moved
            if param.other is None:
                return self.ragged(param, self._cut(param, value).to(like.device, copy=True))
            return ragged_shard.distribute_tensor(
                value.detach(), like.device_mesh, like.placements, src_data_rank=None
            )

    def _allocate(self) -> None:
        """New buffers; nothing in them."""
        self.buffer = DBuffer(
            self.layout,
            self.data.mesh,
            dtype=self.dtypes.kept,
            full_dtype=self.dtypes.compute,
            device=self.data.device,
            shard_dim=-1,
            replicate_dim=0 if self.data.hybrid else None,
            recycler=self.recycler,
            name=self.name,
            check_ranks=not self.data.simulated,
            **self.shard_options,
        )
        self.gradients.forget()

    def _bind(self) -> None:
        """Point both objects of every pair into the buffer."""
        buffer = self.buffer
        assert buffer is not None
        for param in self.params:
            param.set_sharded(self.ragged(param, buffer.local_views[param.name]))
            with torch.no_grad():
                self._locals[param.name] = param.sharded.to_local()  # type: ignore[attr-defined]
            view = buffer.empty_views[param.name]
            if param.unsharded is None or param.unsharded_view is not view:
                param.set_unsharded(view, self._on_grad)
        self._users_at_rest = buffer.count_users()

    def ragged(self, param: ManagedParam, local: torch.Tensor) -> RaggedDTensor:
        """A distributed tensor like the sharded parameter around a local part; shares its memory."""
        mesh, placements = self._placed(param)
        shape = param.shape if param.other is None else param.other.shape
        return RaggedDTensor.from_local(local, mesh, placements, shape=shape)

    def _placed(self, param: ManagedParam) -> tuple[Any, Any]:
        ragged = RaggedShard(self.layout.local_dims(param.name), self.layout.local_units(param.name))
        return place(self.data, ragged, param.other)

    def _cut(self, param: ManagedParam, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a value, in the shape of the local tensor; shares memory where it can."""
        value = value.detach()
        if isinstance(value, RaggedDTensor):
            mesh, placements = self._placed(param)
            assert mesh == value.device_mesh
            with torch.no_grad():
                part: torch.Tensor = value.redistribute(placements=placements).to_local()
            return part
        start, stop = self.layout.local_range(param.name, self.data.shard_rank)
        suffix = param.shape[len(self.layout.local_dims(param.name)) :]
        return value.reshape(-1)[start:stop].view((stop - start) // math.prod(suffix), *suffix)

    def scaling(self, options: ReduceOptions) -> Scaling:
        """How this group's gradients are scaled around their reduction."""
        shards = self.data.shard_size
        return scaling(options, self.dtypes.reduce, shards, self.data.data_parallel_size // shards)

    @property
    def large(self) -> bool:
        """Whether it is worth a reduction of its own."""
        return self.layout.numel >= _PART

    # -- early release ----------------------------------------------------------------------------------------------

    def held_by_autograd(self) -> bool:
        """Whether a tensor on the gathered memory is saved for a backward to come.

        Once all gradients are there, every use that has one is over; one that has none, of a detached parameter, is
        not, and shows here.
        """
        assert self.buffer is not None
        return self.buffer.count_users() > self._users_at_rest

    def release(self) -> None:
        """Free the gathered parameters of this group, and show the sharded ones."""
        assert self.buffer is not None
        self.buffer.release()
        for param in self.params:
            param.register_sharded()

    # -- staleness --------------------------------------------------------------------------------------------------

    def remember_gather(self) -> None:
        """Note what the gathered memory holds."""
        self._gathered_versions = self._versions()

    def changed_since_gather(self) -> bool:
        """Whether the sharded parameters were written to since they were gathered."""
        return self._versions() != self._gathered_versions

    def _versions(self) -> tuple[int, ...]:
        assert self.buffer is not None
        return tuple(
            compat.version_of(shard) for shard in self.buffer.shard
        )  # local tensors share its counter
