"""Every name of torch that is private or differs between releases, in one place.

Tried on CPU with torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.

Private names: the foreach ops (`torch._foreach_*`), the local tensor
under a distributed one (`_local_tensor`, without the view that `to_local()` costs) and its layout (`_spec`), what FSDP2
makes of a parameter that TP cuts (`_StridedShard`), and the hooks that `Optimizer.load_state_dict` runs.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard.dist import DISTRIBUTED, equalize_group_counts

TorchStridedShard = _StridedShard
SHARDS = (Shard, _StridedShard)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_sub_: Callable[..., None] = torch._foreach_sub_
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_div_: Callable[..., None] = torch._foreach_div_
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_
foreach_addcmul_: Callable[..., None] = torch._foreach_addcmul_

# Its name from torch 2.13 on, and the one before.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor under a distributed one, the tensor itself otherwise. No view, no autograd, no communication.

    Of a tensor subclass, such as torchao's float8 weights, the one tensor inside that has its shape and dtype.
    """
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DISTRIBUTED) else tensor
    return local if type(local) in _PLAIN else _inside(local)


def dtensor_around(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """A DTensor on the memory of `local`, of a global shape. Communicates nothing.

    `DTensor.from_local` copies the storage offset of `local` (torch 2.13), and `copy.deepcopy` fails for a DTensor
    whose offset is not 0.
    """
    stride = torch.empty(shape, device="meta").stride()
    empty = local.new_empty(0 if shape else ())  # without dimensions `from_local` takes this one's shape
    made = DTensor.from_local(empty, mesh, placements, run_check=False, shape=shape, stride=stride)
    made._local_tensor = local
    return made


def share_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two distributed tensors are known to have one mesh, placements, shape and dtype, without a comparison."""
    spec = getattr(first, "_spec", None)
    return spec is not None and spec is getattr(second, "_spec", None)


def _inside(tensor: Any) -> torch.Tensor:
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    inner = [getattr(tensor, name) for name in names]
    same = [t for t in inner if t.shape == tensor.shape and t.dtype == tensor.dtype]
    result: torch.Tensor = same[0] if len(same) == 1 else tensor
    return result


def new_ordered_group(
    ranks: Sequence[int], within: Sequence[dist.ProcessGroup], device_type: str
) -> dist.ProcessGroup:
    """A process group of these global ranks in this very order. All of them must ask, at the same time.

    Communicates as `equalize_group_counts` of ``within``, which together connect the ranks.

    Raises:
        NotImplementedError: ranks that do not ascend, in a release of torch that sorts them.
    """
    options: dict[str, Any] = {} if sorted(ranks) == list(ranks) else {"sort_ranks": False}
    if options and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise NotImplementedError(
            f"a process group of ranks {list(ranks)} in this order needs torch.distributed.new_group(sort_ranks=), "
            f"which torch {torch.__version__} does not have; use a newer torch, or AdamW or Muon for parameters that "
            "tensor parallelism cuts along their rows"
        )
    equalize_group_counts(within, device_type)
    result: dist.ProcessGroup = dist.new_group(
        list(ranks), use_local_synchronization=True, group_desc="optimizer", **options
    )
    return result


def load_hooks(optimizer: Any, when: str) -> Iterable[Any]:
    """The hooks of `register_load_state_dict_pre_hook` or, with "post", `.._post_hook`."""
    return tuple(getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks").values())
