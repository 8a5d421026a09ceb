"""Every name of torch that is private or differs between releases, in one place.

Tried on CPU with torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.

Private names: the autograd engine's callback queue, current graph task and what it executes, a parameter's hooks,
dispatch modes, `DeviceMesh._concatenate` and `_flatten`, a tensor's version (read and set) and base, a node's number,
the foreach ops, `Module._call_impl`, `torch.autograd._profiler_enabled`, `FakeTensorMode` (for plans of runs), the
two attributes by which dynamo recognizes modules whose parameters are swapped, the class of `load_state_dict`'s
result, the keys under which composable APIs keep their state, whether torch.func transforms and what it has wrapped,
what `shard_placement_fn` may return, whether compiled autograd runs, what DCP's default planner writes of a value,
the device bound to the world and a group's backend, the history and snapshot of an accelerator's memory, what torch's
flight recorders have, and `ProcessGroupGloo` and `ProcessGroupNCCL` as such, for a group with processes of another
world.
"""

import json
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Partial
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ragged_shard.device import CPU
from ragged_shard.dist import DISTRIBUTED, equalize_group_counts

T = TypeVar("T")

#: Torch's own function, also after a script has put another in its place.
TORCHS_FULLY_SHARD: Any = fsdp.fully_shard
VERSION = operator.attrgetter("_version")

IncompatibleKeys = _IncompatibleKeys  # what `load_state_dict` returns
# Absent before 2.15.
GradientReductionHandle: Any = getattr(fsdp, "GradientReductionHandle", object)
# Absent before 2.12.
DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", None)
# A placement and the mesh that it is on; absent before 2.12.
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)


def new_part(
    whole: dist.ProcessGroup, parts: list[list[int]], description: str, device_type: str
) -> dist.ProcessGroup:
    """A process group of this rank's part of a group, whose ranks must all ask; no others take part.

    Communicates as `equalize_group_counts` where the new group is not split from the whole one.

    Where a device is bound to the world (`init_process_group(device_id=)`) NCCL's groups are split from another: with
    `new_group` from the world, whose ranks would all have to join.

    Args:
        parts: ranks in `whole`, which are in one part each.
    """
    bound = dist.distributed_c10d._get_default_group().bound_device_id
    if bound is not None and whole._get_backend(bound).supports_splitting:
        group = dist.split_group(whole, parts, group_desc=description)
    else:
        (own,) = (part for part in parts if whole.rank() in part)
        equalize_group_counts([whole], device_type)
        ranks = dist.get_process_group_ranks(whole)
        group = dist.new_group(
            [ranks[rank] for rank in own], use_local_synchronization=True, group_desc=description
        )
    assert group is not None
    return group


def is_accumulated(leaf: torch.Tensor) -> bool:
    """Whether the run of the autograd engine that this thread is in adds up a leaf's gradient.

    Raises LookupError if it returns the gradient, as `torch.autograd.grad` does.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError as error:  # "A leaf node was passed ... but we are currently running autograd.grad()"
        raise LookupError from error


# `_call_impl`, and the function that torch's `register_fsdp_forward_method` puts in place of a method.
_CALLS = {
    torch.nn.Module._call_impl.__code__,
    *(code for code in fsdp.register_fsdp_forward_method.__code__.co_consts if isinstance(code, CodeType)),
}


def calls_under_way(module: torch.nn.Module, *methods: CodeType) -> int:
    """How many calls of a module this thread is in, with those of functions that have it as `self`."""
    codes, count = {*_CALLS, *methods}, 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code in codes and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


#: A number for the run of the autograd engine that this thread is in, -1 outside; a run inside a run has its own.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


#: Whether a transform of torch.func (grad, jvp, vmap ...) is under way on this thread.
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


# 2.13 deprecates the name that is the only one in 2.11.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(receive: torch.Tensor, send: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal slices of all ranks; `send` may be this rank's slice of `receive`."""
    _gather(receive, send, group=group)


def outside_transforms(call: Callable[..., T], *args: Any) -> T:
    """Call with torch.func's transforms set aside: communication and gathered memory are none of their business."""
    if not transforming():
        return call(*args)
    with torch._C._DisableFuncTorch():
        return call(*args)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of torch.func have wrapped; any other itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


#: at_end_of_backward(callback): the run of the autograd engine under way calls it when all its nodes are done.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward. Does not import dynamo."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and (module.compiled_autograd_enabled or module.in_compiled_autograd_region)


def store_at(host: str, port: int, members: int, timeout: timedelta, *, is_master: bool) -> Any:
    """A key-value store, which the master opens and the others connect to."""
    return dist.TCPStore(host, port, members, is_master, timeout)  # type: ignore[attr-defined]


def group_across(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """A process group with processes of other worlds that meet at a store; for `send` and `recv`."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


Hooks = dict[int, Callable[[torch.Tensor], Any]] | None
#: What `register_post_accumulate_grad_hook` has registered on a tensor, by id; None if nothing was.
post_accumulate_hooks: Callable[[torch.Tensor], Hooks] = operator.attrgetter("_post_accumulate_grad_hooks")
#: What `register_hook` has registered on a leaf, likewise.
gradient_hooks: Callable[[torch.Tensor], Hooks] = operator.attrgetter("_backward_hooks")


class RefuseCollectives(TorchDispatchMode):
    """Inside, this thread's collectives raise RuntimeError with a message, also those in ops of distributed tensors."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DISTRIBUTED) for each in types):
            return (
                NotImplemented  # these run first, and what they call comes here: as in torch's CommDebugMode
            )
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise RuntimeError(self._message)
        return func(*args, **(kwargs or {}))


#: Without a `reduce_dtype` FSDP2 reduces in the dtype of the sharded parameters from torch 2.15 on, before in that of
#: the unsharded ones.
REDUCES_AS_KEPT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Counts of in-place changes to each tensor's memory, through it and its views."""
    return list(map(VERSION, tensors))


def set_versions(tensors: Iterable[torch.Tensor], counts: Iterable[int]) -> None:
    """Set the counts that `versions` returns."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(counts))


#: The number of the next autograd node that this thread makes.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


def node_number(tensor: torch.Tensor) -> int:
    """The number of the autograd node that made a tensor, counted in its thread; -1 without one."""
    node = tensor.grad_fn
    return -1 if node is None else node._sequence_nr()


def node_of_base(tensor: torch.Tensor) -> Any:
    """The autograd node that made the tensor of which this one is a view; None if it is no view, or of a leaf."""
    base = tensor._base
    return None if base is None else base.grad_fn


#: Whether a profile is being taken.
profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


# One call for a list of tensors: set all to zero; copy or add each to its partner (to, of), with a cast if dtypes
# differ; multiply all by a number, or a 0-d tensor on their device.
zero: Callable[[list[torch.Tensor]], None] = torch._foreach_zero_
copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
add: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_
scale: Callable[[list[torch.Tensor], torch.Tensor | float], None] = torch._foreach_mul_


def norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm of each, summed in `dtype`: 1-D, on the tensors' device."""
    return torch.stack(torch._foreach_norm(tensors, order, dtype=dtype))


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, new tensors have shapes, dtypes and devices, but no memory, and ops on them compute nothing."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


def flight_recorders() -> dict[str, Any]:
    """The last collectives of this process as torch's flight recorders have them: of NCCL, and of the other backends.

    Empty if they are switched off (`TORCH_FR_BUFFER_SIZE=0`) or no collective was started.
    """
    names = {
        "NCCL": "_dump_nccl_trace_json",
        "others": "_dump_fr_trace_json",
    }  # builds without NCCL lack the first
    dumps = {key: getattr(torch._C._distributed_c10d, name, None) for key, name in names.items()}
    traces = {key: json.loads(dump()) for key, dump in dumps.items() if dump is not None}
    return {key: trace for key, trace in traces.items() if trace.get("entries")}


def join_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The mesh whose axes are those of several sub-meshes of one root mesh, in their order."""
    return DeviceMesh._concatenate(meshes)


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """A 1-D mesh of the named axes; of one name the axis itself."""
    flat = mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
    assert isinstance(flat, DeviceMesh)
    return flat


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of other tensors, and is not distributed."""
    return not isinstance(tensor, DISTRIBUTED) and bool(is_traceable_wrapper_subclass(tensor.data))


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether the group is torch's fake one, which moves no data and so cannot compare ranks."""
    return ":fake" in dist.get_backend_config(group)


def mark_for_dynamo(module: torch.nn.Module) -> None:
    """Tell torch.compile that the module's parameters are swapped by hooks, so that it takes them as inputs."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def set_fsdp_state(module: torch.nn.Module, state: Any) -> None:
    """Let `torch.distributed.fsdp.fully_shard.state(module)` find this, and composable APIs see that it is sharded."""
    module.__dict__.setdefault(STATE_KEY, {})[TORCHS_FULLY_SHARD.__wrapped__] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def default_device_type() -> str:
    """The accelerator's type if the machine has one, else cpu."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return CPU.type if accelerator is None else accelerator.type


def local_of_dtensor_grad(grad: torch.Tensor, like: tuple[Any, ...]) -> torch.Tensor:
    """The local tensor of a gradient that another parallelism left as a DTensor, in its parameter's placements.

    Communicates where the gradient is a pending sum over that mesh (one all-reduce or reduce-scatter of it).
    """
    if not isinstance(grad, DTensor):
        return grad
    if any(isinstance(placement, Partial) for placement in grad.placements) or grad.placements != like:
        grad = grad.redistribute(placements=like)
    local: Any = grad.to_local()
    waited: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return waited
