"""What a buffer keeps of its full memory among the ranks of a smaller group, between two gathers.

full of 4 ranks   |  S  |  S  |  S  |  S  |
share of rank 0   |  S  |  S  |                in a group of 2: gathered again from one neighbour only
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ._device import DeviceLayer


@dataclass(frozen=True)
class Share:
    """This rank's share.

    Attributes:
        tensors: 1-D, one a segment, of equal size on all ranks of the group.
        group: whose shares make up the whole, in the order of its ranks.
        ready: the event after which they may be read.
    """

    tensors: tuple[torch.Tensor, ...]
    group: dist.ProcessGroup
    ready: Any


def cut_share(full: tuple[torch.Tensor, ...], group: dist.ProcessGroup, layer: DeviceLayer) -> Share:
    """Copy this rank's share out of gathered buffers."""
    tensors = []
    for flat in full:
        size = flat.numel() // group.size()
        tensors.append(flat.narrow(0, group.rank() * size, size).clone())
    return Share(tuple(tensors), group, layer.record())
