"""The offload policy of a unit: `fully_shard(offload_policy=SelectiveOffloadPolicy(...))`."""

from dataclasses import dataclass

from torch.distributed.fsdp import OffloadPolicy


@dataclass  # as torch's policies, not frozen
class SelectiveOffloadPolicy(OffloadPolicy):
    """Keep a unit's activations in CPU memory; its shards, gradients and optimizer states stay on the device.

    Values are the same bits. CPU memory is page-locked and used again in the next step. No effect where the device is
    the CPU.

    Activations: what autograd saves in the unit's forward is copied to the CPU while the next unit runs, and back, from
    the second step on, while backward runs the unit before. On the device stay: those of the unit that forward ends
    with, parameters, buffers, tensors below 64 KiB, conjugate and negative views, and tensor subclasses except DTensor.
    Activation checkpoints keep only their inputs: for a checkpoint around the unit they are saved in the unit around
    that, and move by its policy. Raises in forward if other saved-tensor hooks are active around the unit.

    Args:
        activations: offload those of the unit's modules, units inside included.
    """

    activations: bool = False
