"""What operands an op on a ragged tensor takes, and what of them is local.

another ragged tensor     the very same layout, else both layouts are printed
Replicate DTensor         on the same mesh; 0-d, or broadcasting to the tensor's shape: this rank's part of it
plain tensor              0-d only: nobody knows how a larger one is meant to lie
Python number             as it is
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_shard._autograd import local_and_layout
from ragged_shard._geometry import Box
from ragged_shard._layout import Layout
from ragged_shard._redistribute import run_view
from ragged_shard._tensor import RaggedDTensor


def is_distributed(value: Any) -> bool:
    """A RaggedDTensor or a DTensor of torch's."""
    return isinstance(value, (RaggedDTensor, DTensor))


def ragged_layout(values: Any) -> Layout | None:
    """The layout of the first ragged operand, or None."""
    for value in values:
        if isinstance(value, RaggedDTensor) and value._layout.axis is not None:
            return value._layout
    return None


def to_local(value: Any, target: Layout, func: Any) -> Any:
    """The local form of one operand of an op on tensors of layout ``target``.

    Raises:
        ValueError: a distributed operand in another layout, or of a shape that does not broadcast; a plain
        tensor that
            is not 0-d.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not is_distributed(value):
        if value.ndim == 0:
            return value
        raise ValueError(  # not a TypeError: Python's operators would swallow its message
            f"{func}: a plain tensor of shape {tuple(value.shape)} beside a ragged one ({target}); "
            "distribute it first with ragged_shard.distribute_like, or use to_local() on both"
        )
    local, layout = local_and_layout(value)
    if layout == target:
        return local
    if layout.replicate and layout.mesh == target.mesh:
        return local if layout.shape.numel() == 1 and local.ndim == 0 else local_part(local, target, func)
    raise ValueError(
        f"{func}: operands in different layouts:\n  {target}\n  {layout}\nredistribute one of them to the other's"
    )


def local_part(whole: torch.Tensor, target: Layout, func: Any = "local part") -> torch.Tensor:
    """This rank's part, under a ragged layout, of a tensor that broadcasts to the layout's shape.

    No communication.
    """
    try:
        expanded = whole.expand(target.shape)
    except RuntimeError:
        raise ValueError(
            f"{func}: an operand of shape {tuple(whole.shape)} does not broadcast to the ragged {target}"
        ) from None
    region = target.region
    assert region is not None
    assert target.local_shape is not None
    base, rest = region.box.sizes, torch.Size(region.box.sizes[region.prefix :]).numel()
    part = whole.new_empty(target.local_shape)
    origin = tuple(-offset for offset in region.box.offsets)
    for box in region.boxes():
        run_view(part, base, region.start * rest, box.moved(origin)).copy_(expanded[box.slices()])
    return part


def box_views(tensor: RaggedDTensor) -> list[tuple[Box, torch.Tensor]]:
    """This rank's boxes, in coordinates of the full tensor, each with the view of the local tensor that holds it."""
    region = tensor._layout.region
    assert region is not None
    rest = torch.Size(region.box.sizes[region.prefix :]).numel()
    origin = tuple(-offset for offset in region.box.offsets)
    return [
        (box, run_view(tensor._local_tensor, region.box.sizes, region.start * rest, box.moved(origin)))
        for box in region.boxes()
    ]


# What keeps a pending sum right: op(sum of parts) == sum of op(part). Value: which operands may be what.
_ANY = "any"
_SAME = "every tensor operand pending in the same layout, no numbers"
_ONE = "one pending operand, the others numbers or Replicate"
_FIRST = "the first operand pending, the others numbers or Replicate"
LINEAR = {
    "neg": _ANY, "clone": _ANY, "detach": _ANY, "alias": _ANY, "zero": _ANY, "zeros_like": _ANY, "empty_like": _ANY,
    "new_zeros": _ANY, "new_empty": _ANY, "_to_copy": _ANY, "view": _ANY, "_unsafe_view": _ANY,
    "unsqueeze": _ANY, "squeeze": _ANY, "expand": _ANY, "add": _SAME, "sub": _SAME, "copy": _SAME,
    "mul": _ONE, "div": _FIRST, "is_pinned": _ANY, "_pin_memory": _ANY,
}  # fmt: skip


def check_linear(func: Any, target: Layout, operands: list[Any], kwargs: dict[str, Any]) -> None:
    """Raise unless the op is linear in an operand with a pending reduction (`Partial`)."""
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
    rule = LINEAR.get(name.rstrip("_"))
    pending = [isinstance(o, RaggedDTensor) and o._layout.partial for o in operands]
    fits = rule == _ANY or (
        (rule == _SAME and all(pending))
        or (rule == _ONE and sum(pending) == 1)
        or (rule == _FIRST and pending[0] and sum(pending) == 1 and not kwargs.get("rounding_mode"))
    )
    if name == "_to_copy" and kwargs.get("dtype") is not None and not kwargs["dtype"].is_floating_point:
        fits = False
    if not fits:
        raise NotImplementedError(
            f"{func} on a tensor with a pending reduction ({target}): "
            + (f"it takes {rule}" if rule else "it is not linear, so applied to the parts it would be wrong")
            + "; redistribute Partial to Replicate first"
        )
