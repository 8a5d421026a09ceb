"""The device meshes of a run's splits: every axis by name, several views of the same ranks in the same order.

dense     pp  replicate  shard           tp      parameters; a batch is dealt out over replicate and part of shard
experts   pp  replicate  expert_shard    ep      the experts' parameters: shard x tp, divided otherwise
batches   pp  readers    cp              tp      who reads what
slices    all readers    slices                  the ranks that together have whole sequences (cp x tp)
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..splits import Splits


@dataclass(frozen=True)
class Meshes:
    """The meshes, and where this rank is. None where there is one process without ranks.

    Attributes:
        splits: what they were made for.
        dense, experts, batches, slices: see the module.
    """

    splits: Splits
    dense: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    batches: DeviceMesh | None = None
    slices: DeviceMesh | None = None

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The mesh of dense parameters, with the replicas if there are any."""
        if self.dense is None:
            return None
        return self.dense["replicate", "shard"] if self.splits.hsdp > 1 else self.dense["shard"]

    @property
    def expert_shard_mesh(self) -> DeviceMesh | None:
        """The mesh of experts if it differs from `shard_mesh`."""
        if self.experts is None:
            return None
        hybrid = self.splits.hsdp > 1
        return self.experts["replicate", "expert_shard"] if hybrid else self.experts["expert_shard"]

    def rank_of(self, axis: str) -> int:
        """This rank's place on an axis of `batches`: "pp", "readers", "cp" or "tp"."""
        return 0 if self.batches is None else self.batches.get_local_rank(axis)


def make_meshes(splits: Splits, device_type: str, timeout: timedelta | None = None) -> Meshes:
    """The meshes of a run. Collective: makes process groups. Without torch.distributed there are none.

    Args:
        splits: how the ranks are divided.
        device_type: of the meshes.
        timeout: of the groups' collectives, which else have torch's default, not that of the group of all ranks.
    """
    if not dist.is_initialized():
        return Meshes(splits)
    if splits.plain:
        dense = init_device_mesh(device_type, (splits.fsdp,), mesh_dim_names=("shard",))
        return Meshes(splits, dense)
    pp, hsdp, tp = splits.pp, splits.hsdp, splits.tp
    dense = init_device_mesh(
        device_type, (pp, hsdp, splits.shards, tp), mesh_dim_names=("pp", "replicate", "shard", "tp")
    )
    batches = init_device_mesh(
        device_type, (pp, splits.readers, splits.cp, tp), mesh_dim_names=("pp", "readers", "cp", "tp")
    )
    experts = slices = None
    if not splits.one_mesh:
        experts = init_device_mesh(
            device_type,
            (pp, hsdp, splits.shards * tp // splits.ep, splits.ep),
            mesh_dim_names=("pp", "replicate", "expert_shard", "ep"),
        )
    if splits.slices > 1:
        slices = init_device_mesh(
            device_type, (pp * splits.readers, splits.slices), mesh_dim_names=("sets", "slices")
        )
    if timeout is not None:
        for mesh in filter(None, (dense, experts, batches, slices)):
            for group in mesh.get_all_groups():
                group.set_timeout(timeout)
    return Meshes(splits, dense, experts, batches, slices)
