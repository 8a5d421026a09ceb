"""Sharded parameters that are codes: what quantizes them, and what state dicts hold of them.

    sharded parameter  w         RaggedDTensor with the shape and dtype of the values, around a BlockQuantizedTensor
    state dict         w.codes   RaggedDTensor, a row of bytes for each row of w
                       w.scales  RaggedDTensor, a row of fp32 for each band of tiles

Both entries alias the shard, lie over the ranks as the parameter does, and load at any number of ranks.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

import ragged_shard
from dbuffer import BlockInt8, BlockQuantizedTensor, empty_codes
from ragged_shard import RaggedDTensor, RaggedShard

from .._plan.group import GroupPlan, ParamPlan, is_selected, wrap_local
from .._plan.param import ManagedParam
from ..quantization import QuantizationPolicy

CODES, SCALES = ".codes", ".scales"
VALUES = (torch.float32, torch.bfloat16, torch.float16)


class Entries(NamedTuple):
    """What a state dict holds of one parameter.

    Attributes:
        codes: (*shape[:-1], bytes of a row); int8 where codes are integers, else uint8.
        scales: fp32, (bands, tiles of a band).
    """

    codes: torch.Tensor
    scales: torch.Tensor


def is_at_rest(param: torch.Tensor) -> bool:
    """Whether a sharded parameter is kept as codes."""
    return isinstance(param, RaggedDTensor) and isinstance(param.local, BlockQuantizedTensor)


def check_taken_over(param: ManagedParam[Any], policy: QuantizationPolicy | None) -> None:
    """Raise ValueError, naming the parameter, where an outer unit keeps codes that the new unit does not go on with."""
    held = param.example
    if not isinstance(held, RaggedDTensor) or not isinstance(held.local, BlockQuantizedTensor):
        return
    wanted = policy.at_rest if policy is not None and is_selected(param, policy) else None
    if wanted != held.local.format:
        raise ValueError(
            f"quantization_policy: parameter {param.name} is kept as codes of {held.local.format} by the unit around, "
            f"and would be kept {'as values' if wanted is None else f'as codes of {wanted}'} here; give both the same "
            "policy, or shard inner modules first"
        )


def entries_of(sharded: torch.Tensor) -> Entries:
    """Codes and scales of a sharded parameter as distributed tensors that share its memory. Communicates nothing."""
    assert isinstance(sharded, RaggedDTensor)
    local = sharded.local
    assert isinstance(local, BlockQuantizedTensor)
    mesh, grid, fmt = sharded.device_mesh, local.run.grid, local.format
    ((axis, cut),) = [
        (axis, placement)
        for axis, placement in enumerate(sharded.placements)
        if isinstance(placement, RaggedShard)
    ]
    bands = []
    for rank in range(mesh.size(axis)):
        start, stop = [edge * grid.rows // sum(cut.local_units) for edge in cut.unit_range(rank)]
        first, last = grid.scales_of(start, stop)
        bands.append((last - first) // grid.across)
    shape = (*sharded.shape[:-1], fmt.code_bytes(grid.columns))
    codes = local.codes.view(-1, *shape[len(cut.dims) :])
    if isinstance(fmt, BlockInt8):
        codes = codes.view(torch.int8)
    by_bands = list(sharded.placements)
    by_bands[axis] = RaggedShard((0,), tuple(bands))
    scales = local.scales.view(-1, grid.across)
    return Entries(
        RaggedDTensor.from_local(codes, mesh, sharded.placements, shape=shape),
        RaggedDTensor.from_local(scales, mesh, by_bands, shape=(grid.num_bands, grid.across)),
    )


def from_entries(plan: GroupPlan, param: ParamPlan, like: torch.Tensor, found: Entries) -> RaggedDTensor:
    """A sharded parameter of codes and scales that lie over ranks in any way, or are whole on each.

    Communicates where they are distributed and lie otherwise (see `ragged_shard.redistribute`).

    Args:
        like: the sharded parameter.

    Raises:
        ValueError: of another shape or dtype than the format's, by the parameter's name.
    """
    assert isinstance(like, RaggedDTensor)
    moved: list[torch.Tensor] = []
    for what, value, wanted in zip((CODES, SCALES), found, entries_of(like), strict=True):
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise ValueError(
                f"{param.name}{what}: {value.dtype} of shape {tuple(value.shape)}; {plan.at_rest} has {wanted.dtype} "
                f"of shape {tuple(wanted.shape)}. Load it with the format that it was saved in"
            )
        moved.append(_laid_out(value.detach(), wanted).to(plan.data.device))
    local = like.local
    assert isinstance(local, BlockQuantizedTensor)
    codes, scales = moved[0].view(torch.uint8).view(-1), moved[1].view(-1)
    return wrap_local(param, local.around(codes, scales))


def quantized(
    plan: GroupPlan, param: ParamPlan, value: torch.Tensor, device: torch.device | None = None
) -> BlockQuantizedTensor:
    """This rank's slice of a parameter as codes, in memory of its own; from meta on meta.

    Communicates where the value is distributed and lies otherwise (see `ragged_shard.redistribute`).

    Args:
        value: the parameter's values or codes: whole on each rank, or distributed over the mesh.
        device: of the codes. Defaults to the one that computes.
    """
    value = value.detach()
    if isinstance(value, RaggedDTensor) and is_at_rest(value) and value.placements != param.placements:
        like = _empty(plan, param, value.dtype, torch.device("meta"))
        value = from_entries(plan, param, wrap_local(param, like), entries_of(value))
    with torch.no_grad():
        if isinstance(value, DTensor):
            value = ragged_shard.redistribute(value, placements=param.placements).to_local()
        else:
            value = plan.geometry.cut(param.name, value)
        device = value.device if value.is_meta else (device or plan.data.device)
        dtype = value.dtype if value.dtype in VALUES else plan.dtypes.kept
        made = _empty(plan, param, dtype, device)
        made.copy_(value)
    return made


def _empty(
    plan: GroupPlan, param: ParamPlan, dtype: torch.dtype, device: torch.device
) -> BlockQuantizedTensor:
    assert plan.at_rest is not None
    return empty_codes(plan.geometry, param.name, plan.at_rest, dtype, device)


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a value, placed as another."""
    assert isinstance(like, RaggedDTensor)
    with torch.no_grad():
        if isinstance(value, DTensor):
            placed = ragged_shard.redistribute(value, placements=like.placements)
        else:
            placed = ragged_shard.distribute_tensor(
                value, like.device_mesh, like.placements, src_data_rank=None
            )
    return placed.local
