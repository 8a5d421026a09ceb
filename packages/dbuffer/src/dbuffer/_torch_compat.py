"""Every name of torch that is private or differs between releases, in one place.

Tried on CPU with torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.

Private names: `_coalescing_manager`, `UntypedStorage._swap_data_ptr_` (absent in 2.11),
`torch._foreach_*`, `Tensor._version`, `Tensor._make_wrapper_subclass`, `_disabled_torch_function_impl`, an op's schema,
a process group's backend and its timeout, `torch.utils._pytree`. Deprecated: `Work.is_success`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils._pytree import tree_map_only as tree_map_only

from ragged_shard.device import CPU

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]

# 2.13 deprecates the names that are the only ones in 2.11.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

#: Collectives started inside it are one call to the backend; it yields the work to wait on.
coalescing: Callable[..., AbstractContextManager[Any]] = _coalescing_manager

# 2.13 can exchange the memory of two storages, so a block can be kept while every view of the storage stays valid.
CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


#: swap_memory(a, b) exchanges what two storages of one device hold, sizes included; all tensors on them follow.
swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", None
)  # type: ignore[assignment]  # only called where CAN_SWAP


def is_gloo(group: dist.ProcessGroup, device: torch.device = CPU) -> bool:
    """Whether a device's tensors travel through gloo in this group. `get_backend` knows no devices."""
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether coalesced calls of a device work: on NCCL, gloo and fake groups themselves, and on simulated ones.

    On a Python process group (torchft, or one of a user's) they bring no work since torch 2.8, or are not there. Where
    calls are checked (TORCH_DISTRIBUTED_DEBUG=DETAIL) the backend is wrapped.
    """
    if type(group) is not dist.ProcessGroup:
        return dist.get_backend(group) == "simulated"
    return type(group._get_backend(device)).__name__ in (
        "ProcessGroupNCCL",
        "ProcessGroupGloo",
        "FakeProcessGroup",
    )


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the group is torch's fake one, which moves no data."""
    return ":fake" in dist.get_backend_config(group)


def has_succeeded(work: Any) -> bool:
    """Whether a work, or each coalesced one, has completed without an error. False if unknown."""
    works = getattr(work, "works", (work,))  # `is_success` is deprecated, but the only way
    return work.is_completed() and all(hasattr(each, "is_success") and each.is_success() for each in works)


def is_interrupt(work: Any, error: BaseException) -> bool:
    """Whether an error from the wait for torch's work or works is a signal handler's: raised by a function outside.

    Torch's own are raised by C++, straight into the function that waits. False for works of others.
    """
    if not all(isinstance(each, dist.Work) for each in getattr(work, "works", (work,))):
        return False
    innermost = [frame for frame, _ in walk_tb(error.__traceback__)][-1]
    return not str(innermost.f_globals.get("__name__")).startswith(f"{__package__}.")


def wait_for(work: Any, seconds: float) -> bool:
    """Block until a work has completed, at most so long if it can; returns whether it has. On the host.

    Raises RuntimeError if it failed.
    """
    if hasattr(work, "wait_for"):
        return bool(work.wait_for(seconds))
    if getattr(type(work), "wait", None) is not dist.Work.wait:  # a user's
        work.wait()
        return True
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if str(error).startswith("Operation timed out!"):  # `Work::wait`; gloo's own timeout has another text
            return False
        raise
    return True


def timeout_seconds(group: dist.ProcessGroup, device: torch.device = CPU) -> float:
    """How long a group's collectives on a device wait for a rank; torch's default where a backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout.total_seconds()


def versions(tensors: Tensors) -> list[int]:
    """How often each was written to."""
    return [tensor._version for tensor in tensors]


#: What a subclass of Tensor that only answers ops sets as its `__torch_function__`.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def new_wrapper(
    cls: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """A contiguous tensor of a class that answers ops itself; it has no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def written_by(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an op that it writes to."""
    written: list[Any] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, (list, tuple)) else [value]
    return written


# One call for all segments: a single op where there is one tensor, else torch's multi-tensor kernels.


def zero(tensors: Tensors) -> None:
    """Set all to zero."""
    if len(tensors) == 1:
        tensors[0].zero_()
    elif tensors:
        torch._foreach_zero_(tensors)


def copy(to: Tensors, of: Tensors, non_blocking: bool = False) -> None:
    """Copy each into its counterpart, casting where dtypes differ."""
    if len(to) == 1:
        to[0].copy_(of[0], non_blocking=non_blocking)
    else:
        torch._foreach_copy_(to, of, non_blocking)


def add(to: Tensors, of: Tensors, alpha: float = 1.0) -> None:
    """Add `alpha` times each to its counterpart, in the counterpart's dtype."""
    if len(to) == 1:
        to[0].add_(of[0], alpha=alpha)
    else:
        torch._foreach_add_(to, of, alpha=alpha)


def scale(tensors: Tensors, by: Any) -> None:
    """Multiply all by one number."""
    if len(tensors) == 1:
        tensors[0].mul_(by)
    else:
        torch._foreach_mul_(tensors, by)


def copy_scaled(to: Tensors, of: Tensors, by: float) -> None:
    """Write `by` times each into its counterpart, multiplied in the wider of both dtypes: one kernel a segment."""
    # One element, not none: a 0-d tensor would leave the product in the narrower dtype.
    factor = torch.full((1,), by, dtype=torch.promote_types(to[0].dtype, of[0].dtype), device=to[0].device)
    for target, source in zip(to, of, strict=True):
        torch.mul(source, factor, out=target)
