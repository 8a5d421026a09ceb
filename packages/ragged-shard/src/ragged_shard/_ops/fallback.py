"""Ops that are not in the table, and tensors with torch's own placements: refused if an operand is ragged."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_shard._ops import operands
from ragged_shard._sharding import Sharding, contiguous_stride
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import Op

# The gradient of a sum: one number expanded to the full shape. Not copied, since each rank reads its own range only.
_EXPAND = torch.ops.aten.expand.default


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    """``fn`` of each leaf of an op's arguments or results: single values and lists (cheaper than a pytree)."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([_map(fn, entry) for entry in value])
    return fn(value)


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [entry for entry in value if isinstance(entry, torch.Tensor)]
    return tensors


def as_dtensor(value: Any) -> Any:
    """A RaggedDTensor with torch's own placements as a plain DTensor on the same storage; anything else unchanged."""
    if not isinstance(value, RaggedDTensor):
        return value
    sharding = value._sharding
    return DTensor.from_local(
        value._local_tensor,
        sharding.mesh,
        sharding.placements,
        run_check=False,
        shape=sharding.shape,
        stride=value._local_tensor.stride() if sharding.replicate else contiguous_stride(sharding.shape),
    )


def fallback(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse an op on a ragged tensor; run it locally if all operands are Replicate; else hand it to torch."""
    leaves = _tensors((*args, *kwargs.values()))
    ragged = operands.ragged_sharding(leaves)
    if ragged is not None or torch.Tag.inplace_view in func.tags:
        raise refusal(func, ragged or next(t._sharding for t in leaves if isinstance(t, RaggedDTensor)))
    shardings = [leaf._sharding for leaf in leaves if isinstance(leaf, RaggedDTensor)]
    in_place = func._schema.name.endswith("_")
    if not func._schema.is_mutable or in_place:
        done, result = _on_replicas(func, args, kwargs, leaves, shardings)
        if done:
            return args[0] if in_place and not isinstance(args[0], (list, tuple)) else result
    result = func(*_map(as_dtensor, args), **{k: _map(as_dtensor, v) for k, v in kwargs.items()})
    return args[0] if in_place and isinstance(args[0], RaggedDTensor) else result


def refusal(func: Op, sharding: Sharding) -> NotImplementedError:
    """The error for an op that has no rule."""
    if func.namespace == "c10d":
        return NotImplementedError(
            f"{func} moves plain tensors, got a ragged one ({sharding}). torch's functions with "
            "broadcast_from_rank0=True load full tensors of rank 0: pass the tensors of full_state_dict or "
            "full_optimizer_state_dict (fsdp_runtime: get_full_state_dict, get_full_optimizer_state_dict), or load a "
            "sharded state dict without full_state_dict=True"
        )
    return NotImplementedError(
        f"{func} has no rule for a ragged tensor ({sharding}). Nothing is gathered behind your back: use "
        "full_tensor() or redistribute(placements=[Replicate()] * mesh.ndim) for the full tensor, to_local() for "
        "this rank's, or fsdp_runtime.full_params(model) around code that works on whole weights, such as peft's "
        "merge_adapter; ragged-shard's docs/ops.md lists the ops that have a rule. In a forward under fully_shard, "
        "where no rank would get the others' gradients: call the module that has the parameter, or its unshard() "
        "before, or register_fsdp_forward_method for a method of it"
    )


def require_reduced(func: Op, sharding: Sharding) -> None:
    """Raise NotImplementedError for an op that is not linear on a tensor with a pending reduction."""
    if sharding.partial:
        raise NotImplementedError(
            f"{func} on a tensor with a pending reduction ({sharding}): it is not linear; redistribute Partial to "
            "Replicate first"
        )


def _on_replicas(
    func: Op, args: Any, kwargs: Any, leaves: list[torch.Tensor], shardings: list[Sharding]
) -> tuple[bool, Any]:
    """Run an op on local tensors if all operands are replicas on one mesh, which saves DTensor's dispatch."""
    first = shardings[0]
    for leaf in leaves:
        if isinstance(leaf, RaggedDTensor):
            if not leaf._sharding.replicate or leaf._sharding.mesh != first.mesh:
                return False, None
        elif isinstance(leaf, DTensor) or leaf.ndim:
            return False, None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False, None

    def local(value: Any) -> Any:
        return value._local_tensor if isinstance(value, RaggedDTensor) else value

    result = func(*_map(local, args), **{k: _map(local, v) for k, v in kwargs.items()})
    if func is not _EXPAND and any(not out.is_contiguous() for out in _tensors((result,))):
        return False, None  # such as a transposed view: only a plain DTensor can have its strides

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return RaggedDTensor._wrap(value, first.replicated(value.shape))

    return True, _map(wrap, result)
