"""`local_shards`: the parts of a model's tensors that this rank holds, for engines that take shards.

a tensor in ranks' shards      | rank 0 |   rank 1   |  rank 2  |
boxes that engines want        |      engine 0     | engine 1   |
transfers                      | 0 -> 0 | 1 -> 0  |1->1| 2 -> 1 |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ragged_shard import Box

from .. import _torch_compat as compat
from .._torch.tree import cast_to, local_tensor
from .targets import Target, boxes_of, entries_of_model, plain_name, targets_of


@dataclass(frozen=True)
class LocalShard:
    """A box of a tensor of the model.

    Attributes:
        name: in the state dict; of a tied tensor the first.
        shape: of the whole tensor.
        box: which elements: offsets and sizes along each dimension.
        tensor: their values, in the shape of the box.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True)
class Transfer:
    """A box that one rank sends to one engine.

    Attributes:
        source, target: index of the rank, and of the engine.
        held, wanted: the boxes that it is cut from, and that it belongs to.
    """

    name: str
    source: int
    target: int
    held: Box
    wanted: Box
    part: Box


def local_shards(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[LocalShard]:
    """Yield this rank's boxes of every parameter and persistent buffer, as views of the shards; communicates nothing.

    They come in the order of names, so that ranks with different modules send in one order. A rank may hold no box of a
    tensor, or several. Together the ranks hold every element: replicas of HSDP, and all ranks of a tensor that is not
    sharded, hold the same boxes; tensor- and expert-parallel ranks their parts. With another `dtype` (of floating-point
    tensors), and where parameters are kept as codes, a box is a copy. Views are valid until values change, as by an
    optimizer's step.

    Raises:
        NotImplementedError: a parameter is a tensor subclass.
        ValueError: a tensor is on the meta device.
        RuntimeError: parameters are offloaded, or in `full_params`.
    """
    entries_of_model(model, buffers=True)  # checks, and adopts assigned values
    cast = cast_to(dtype)
    for target in sorted(targets_of(model), key=lambda target: plain_name(target.name)):
        values = _values(target)
        for box, view in boxes_of(values):
            yield LocalShard(plain_name(target.name), tuple(values.shape), box, cast(view))


@torch.no_grad()
def _values(target: Target) -> torch.Tensor:
    """A target's values, distributed as it is."""
    tensor = target.tensor.detach()
    if target.param is None:
        return tensor
    values = target.group.writable(tensor)
    if values is not tensor:  # it is codes
        local_tensor(values).copy_(target.group.local_values(tensor))
    if compat.is_wrapper_subclass(local_tensor(values)):
        kind = type(local_tensor(values)).__name__
        raise NotImplementedError(f"local_shards: {target.name} is kept as a {kind}; use iter_full_params")
    return values


def transfers(
    held: Sequence[Mapping[str, Sequence[Box]]], wanted: Sequence[Mapping[str, Sequence[Box]]]
) -> list[Transfer]:
    """Transfers by which engines get the boxes that they want, by name and engine; every element is sent once to each.

    Where several ranks hold a box, engines take turns. Equal on every rank that has the same arguments.

    Args:
        held: boxes of each rank, by name.
        wanted: boxes of each engine, by name.

    Raises:
        ValueError: no rank holds some of a wanted box, or ranks hold parts of it twice, in boxes that differ.
    """
    owners: dict[str, dict[Box, list[int]]] = {}
    for rank, boxes_by_name in enumerate(held):
        for name, boxes in boxes_by_name.items():
            for box in boxes:
                owners.setdefault(name, {}).setdefault(box, []).append(rank)
    found: list[Transfer] = []
    for target, boxes_by_name in enumerate(wanted):
        for name, boxes in boxes_by_name.items():
            for box in boxes:
                parts = [
                    Transfer(name, ranks[target % len(ranks)], target, own, box, part)
                    for own, ranks in owners.get(name, {}).items()
                    if (part := own.intersection(box)) is not None
                ]
                covered = sum(transfer.part.numel for transfer in parts)
                if covered != box.numel:
                    raise ValueError(
                        f"{name}: engine {target} wants {box.numel} elements at {box.offsets}; ranks hold {covered}"
                    )
                found += parts
    return sorted(found, key=lambda each: (each.name, each.target, each.part.offsets))
